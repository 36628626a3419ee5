"""Downloads that resume where they stopped; files are checked and unpacked before they are put in place."""

import gzip
import hashlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write

Progress = Callable[[str, int, int], None]
"""Called with the current step, how much of it is done (bytes or images), and how much there is (0: unknown)."""

CHUNK = 1 << 20
TIMEOUT = 60  # seconds to wait for the next byte
BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError)


@dataclass(frozen=True)
class Archive:
    """An official tar or zip file, and the folder that it is unpacked to."""

    name: str
    url: str
    checksum: str
    """Algorithm and digest, such as `md5:c32a…`."""
    folder: str
    """Where its content goes, below the dataset's root."""
    inner: str | None = None
    """Which folder of the archive becomes `folder` ('.': all of it); by default the one of the same name."""


def obtain(archive: Archive, root: Path, progress: Progress) -> None:
    """Download an archive, unpack it below `root` and delete it; do nothing if its folder is already there."""
    target = root / archive.folder
    if target.exists():
        return
    path = root / archive.name
    download(archive.url, path, checksum=archive.checksum, progress=progress)
    unpack(path, archive.inner or archive.folder, target, progress)
    path.unlink()


def download(url: str, path: Path, *, checksum: str, progress: Progress) -> None:
    """Download a file, or check the one that is already there.

    The bytes first go to `path.partial`, and a new attempt continues where the last one stopped.
    checksum: `algorithm:hex`, with any algorithm of hashlib.
    """
    if path.exists():
        if digest(path, checksum, progress) != checksum:
            raise FedncaError(
                f"'{path}' is not the official file, whose checksum is {checksum}; delete it and try again"
            )
        return
    partial = path.with_name(path.name + ".partial")
    with explain_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    _receive(url, path, partial, progress)
    found = digest(partial, checksum, progress)
    if found != checksum:
        partial.unlink()
        raise FedncaError(f"'{url}' arrived with checksum {found} instead of {checksum} and was deleted; try again")
    partial.replace(path)


def digest(path: Path, like: str, progress: Progress) -> str:
    """Return a file's checksum, `algorithm:hex`, by the same algorithm as the checksum `like`."""
    algorithm = like.partition(":")[0]
    summed = hashlib.new(algorithm, usedforsecurity=False)
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            summed.update(chunk)
            done += len(chunk)
            progress(f"{path.name.removesuffix('.partial')}, checking", done, total)
    return f"{algorithm}:{summed.hexdigest()}"


def unpack(archive: Path, inner: str, target: Path, progress: Progress) -> None:
    """Unpack a tar or zip file, then rename its folder `inner` ('.': all of it) to `target` in one step."""
    workplace = target.with_name(target.name + ".partial")
    shutil.rmtree(workplace, ignore_errors=True)
    try:
        with explain_write(target), archive.open("rb") as file:
            _extract(file, archive, workplace, progress)
            if not (workplace / inner).is_dir():
                raise FedncaError(f"'{archive}' has no folder '{inner}'; replace it with the official archive")
            (workplace / inner).rename(target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _receive(url: str, path: Path, partial: Path, progress: Progress) -> None:
    """Append the missing bytes to the partial file; the caller then checks its checksum."""
    done = partial.stat().st_size if partial.exists() else 0
    response = _open(url, path, done)
    if response is None:
        return
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else 0
        with explain_write(partial), partial.open("ab" if done else "wb") as file:
            progress(path.name, done, total)
            while chunk := _read(response, url, done, total):
                file.write(chunk)
                done += len(chunk)
                progress(path.name, done, total)


def _open(url: str, path: Path, done: int) -> HTTPResponse | None:
    """Request a file from byte `done` on; return None if it has no more bytes."""
    request = Request(url, headers={"User-Agent": "fednca"} | ({"Range": f"bytes={done}-"} if done else {}))
    by_hand = f"try again later, or put the file at '{path}' by hand"
    try:
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if done and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        raise FedncaError(f"'{url}' answered {error.code} {error.reason}; {by_hand}") from error
    except (OSError, HTTPException) as error:
        raise FedncaError(f"'{url}' cannot be reached ({getattr(error, 'reason', error)}); {by_hand}") from error
    return response


def _read(response: HTTPResponse, url: str, done: int, total: int) -> bytes:
    """Return the next chunk, or b'' at the end; an end before `total` bytes is an error."""
    try:
        chunk = response.read(CHUNK)
        if not chunk and done < total:
            raise HTTPException("connection closed")
    except (OSError, HTTPException) as error:
        so_far = f"{done} of {total or 'unknown'} bytes"
        raise FedncaError(
            f"the download of '{url}' stopped after {so_far} ({error}); run this again to continue"
        ) from error
    return chunk


def _extract(file: IO[bytes], archive: Path, folder: Path, progress: Progress) -> None:
    total = archive.stat().st_size

    def told(members: Iterable[Any], start: Callable[[Any], int]) -> Iterator[Any]:
        for member in members:
            progress(f"{archive.name}, unpacking", start(member), total)
            yield member
        progress(f"{archive.name}, unpacking", total, total)

    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as zipped:
                for name in zipped.namelist():
                    # zipfile would silently drop such parts of a path; no honest archive has them.
                    if name.startswith(("/", "\\")) or ".." in Path(name).parts:
                        raise zipfile.BadZipFile(f"its member '{name}' points outside the folder")
                zipped.extractall(folder, told(zipped.infolist(), lambda member: member.header_offset))
        else:
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(folder, told(tar, lambda _: file.tell()), filter="data")
    except BROKEN as error:
        raise FedncaError(f"'{archive}' cannot be unpacked ({error}); delete it and run this again") from error
