import hashlib
import io
import re
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fednca.data.fetch import Archive, download, obtain, unpack
from fednca.errors import FedncaError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class Handler(BaseHTTPRequestHandler):
    """Serves the server's files by range; says what was asked; stops in the middle where it is told to."""

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.by_range else 0
        if start and start >= len(content):
            return self.send_error(416)
        body = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.stop_after])
        return None

    def log_message(self, *arguments):
        """Keep the output of the tests clean."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.files, running.ranges, running.by_range, running.stop_after = {"/file": CONTENT}, [], True, None
        running.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_arrives_whole_and_tells_how_far_it_is(server, tmp_path):
    told = []
    download(f"{server.url}/file", tmp_path / "new/a", checksum=MD5, progress=lambda *now: told.append(now))
    assert (tmp_path / "new/a").read_bytes() == CONTENT
    assert names(tmp_path) == ["new", "new/a"]
    assert told[0] == ("a", 0, len(CONTENT))
    assert ("a", len(CONTENT), len(CONTENT)) in told
    assert told[-1] == ("a, checking", len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256"])
def test_the_checksum_names_its_algorithm(server, tmp_path, algorithm):
    checksum = f"{algorithm}:{hashlib.new(algorithm, CONTENT).hexdigest()}"
    download(f"{server.url}/file", tmp_path / "a", checksum=checksum, progress=silent)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path):
    server.stop_after = 100_000
    with pytest.raises(FedncaError, match=r"stopped after 100000 of 300000 bytes .*; run this again"):
        download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert names(tmp_path) == ["a.partial"]
    with pytest.raises(FedncaError, match="stopped after 200000 of 300000 bytes"):
        download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    server.stop_after = None
    download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert names(tmp_path) == ["a"]


def test_a_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.by_range = False
    (tmp_path / "a.partial").write_bytes(b"x" * 1000)
    download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_download_that_was_whole_but_not_yet_in_place_is_put_there(server, tmp_path):
    (tmp_path / "a.partial").write_bytes(CONTENT)
    download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("partial", [b"", b"x" * 1000, b"x" * 400_000])
def test_a_wrong_checksum_leaves_nothing_behind(server, tmp_path, partial):
    server.files["/file"] = CONTENT if partial else CONTENT[:-1] + b"?"
    (tmp_path / "a.partial").write_bytes(partial)
    with pytest.raises(FedncaError, match=rf"/file' arrived with checksum md5:[0-9a-f]+ instead of {MD5}"):
        download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert names(tmp_path) == []


def test_a_file_put_there_by_hand_is_checked_and_never_removed(server, tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    (tmp_path / "a").write_bytes(b"something else")
    with pytest.raises(FedncaError, match=rf"a' is not the official file, whose checksum is {MD5}; delete it"):
        download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)
    assert (tmp_path / "a").read_bytes() == b"something else"
    assert server.ranges == []


def test_an_answer_that_is_an_error_is_told(server, tmp_path):
    with pytest.raises(FedncaError, match=r"/gone' answered 404 Not Found; .* put the file at '.*a' by hand"):
        download(f"{server.url}/gone", tmp_path / "a", checksum=MD5, progress=silent)
    assert names(tmp_path) == []


def test_no_network_is_told(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(
        FedncaError, match=r"/file' cannot be reached \(.*refused.*\); .* put the file at '.*a' by hand"
    ):
        download(f"{server.url}/file", tmp_path / "a", checksum=MD5, progress=silent)


def make_zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


MAKERS = {"zip": make_zip, "tar.gz": make_tar, "tar": lambda members: make_tar(members, "w")}
MEMBERS = {"images/one.png": b"1" * 5000, "images/deep/two.png": b"2" * 70, "other/three.txt": b"3"}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("inner", "unpacked"),
    [
        ("images", ["deep", "deep/two.png", "one.png"]),
        (".", ["images", "images/deep", "images/deep/two.png", "images/one.png", "other", "other/three.txt"]),
    ],
)
def test_a_folder_of_an_archive_becomes_the_target(tmp_path, kind, inner, unpacked):
    archive, told = tmp_path / f"some.{kind}", []
    archive.write_bytes(MAKERS[kind](MEMBERS))
    unpack(archive, inner, tmp_path / "target", lambda *now: told.append(now))
    assert names(tmp_path / "target") == unpacked
    assert (tmp_path / "target" / ("one.png" if inner == "images" else "images/one.png")).read_bytes() == b"1" * 5000
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, "target"]
    size = archive.stat().st_size
    assert told[-1] == (f"{archive.name}, unpacking", size, size)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be unpacked"),
        (b"<html>please log in</html>", "cannot be unpacked"),
        (make_tar({"images/a": CONTENT})[:150_000], "cannot be unpacked"),
        (make_zip({"images/a": CONTENT}).replace(CONTENT[1000:1010], b"0123456789"), "cannot be unpacked"),
        (make_zip({"images/a": b"1", "images/../../evil": b"2"}), r"'images/\.\./\.\./evil' points outside"),
        (make_zip({"images/a": b"1", "/evil": b"2"}), "'/evil' points outside"),
        (make_tar({"images/a": b"1", "../evil": b"2"}), r"cannot be unpacked \(.*evil.* outside the destination"),
        (make_tar({"other/a": b"1"}), "has no folder 'images'"),
    ],
    ids=["empty", "page", "cut", "changed", "upwards", "absolute", "tar-upwards", "other"],  # an archive has its time
)
def test_a_broken_or_wicked_archive_leaves_nothing_behind(tmp_path, content, sentence):
    archive = tmp_path / "below" / "some.archive"
    archive.parent.mkdir()
    archive.write_bytes(content)
    with pytest.raises(FedncaError, match=sentence):
        unpack(archive, "images", archive.parent / "target", silent)
    assert names(tmp_path) == ["below", "below/some.archive"]


def test_what_an_interrupted_unpacking_left_is_replaced(tmp_path):
    archive = tmp_path / "some.zip"
    archive.write_bytes(make_zip(MEMBERS))
    (tmp_path / "target.partial/images").mkdir(parents=True)
    (tmp_path / "target.partial/images/half").write_bytes(b"h")
    unpack(archive, "images", tmp_path / "target", silent)
    assert names(tmp_path) == ["some.zip", "target", "target/deep", "target/deep/two.png", "target/one.png"]


def test_an_archive_is_obtained_once_and_then_removed(server, tmp_path):
    content = make_tar(MEMBERS)
    server.files["/shared.gz"] = content
    checksum = f"md5:{hashlib.md5(content).hexdigest()}"
    archive = Archive("images_001.tar.gz", f"{server.url}/shared.gz", checksum, "images_001", inner=".")
    for _ in range(2):
        obtain(archive, tmp_path, silent)
        assert [path.name for path in tmp_path.iterdir()] == ["images_001"]
        assert (tmp_path / "images_001/images/one.png").exists()
    assert server.ranges == [None]
