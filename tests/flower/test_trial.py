"""What `fednca flower init` writes, judged by `ssl`, by `cryptography`'s verifier and by Flower itself."""

import contextlib
import datetime
import ipaddress
import os
import re
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from helpers import free_port
from processes import BIN, wait_until

from fednca.base.errors import FedncaError
from fednca.flower.config import load_server, load_site
from fednca.flower.trial import Trial, make_authority, make_certificate, write_trial

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture
def trial(tmp_path):
    hosts = ["fed.example.org", "10.1.2.3"]
    return write_trial(Trial(tmp_path / "trial", ["north", "east side"], hosts, days=30))


def shake_hands(ca: Path, certificate: Path, key: Path, host: str) -> None:
    """Let a client that trusts `ca` and a server talk TLS in memory; ssl raises what it does not accept."""
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(ca))
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    server_side.load_cert_chain(certificate, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert client.cipher() is not None


def certificates(folder):
    inside = folder / "server/certificates"
    return inside / "ca.crt", inside / "server.crt", inside / "server.key"


@pytest.mark.parametrize("host", ["fed.example.org", "10.1.2.3", "localhost", "127.0.0.1"])
def test_ssl_accepts_the_server_under_all_its_names(trial, host):
    shake_hands(*certificates(trial), host)


@pytest.mark.parametrize("host", ["evil.example.org", "10.1.2.4"])
def test_ssl_refuses_another_host(trial, host):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(*certificates(trial), host)


def test_ssl_refuses_another_trials_authority(trial, tmp_path):
    other = write_trial(Trial(tmp_path / "other", ["north"], ["fed.example.org"]))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(other / "sites/north/ca.crt", *certificates(trial)[1:], "fed.example.org")


@pytest.mark.parametrize(("begin", "reason"), [(NOW - 9 * DAY, "expired"), (NOW + 9 * DAY, "not yet valid")])
def test_ssl_refuses_certificates_out_of_date(tmp_path, begin, reason):
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = make_authority(ca_key, NOW, 30)
    server = make_certificate(["localhost"], key.public_key(), ca, ca_key, begin, 5)
    paths = [tmp_path / name for name in ("ca.crt", "server.crt", "server.key")]
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    contents = [ca.public_bytes(serialization.Encoding.PEM), server.public_bytes(serialization.Encoding.PEM), private]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with pytest.raises(ssl.SSLCertVerificationError, match=reason):
        shake_hands(*paths, "localhost")


def test_the_chain_holds_for_as_many_days_as_asked_for(trial):
    ca, server = (x509.load_pem_x509_certificate(path.read_bytes()) for path in certificates(trial)[:2])
    host = x509.IPAddress(ipaddress.ip_address("10.1.2.3"))

    def verify(when, name=host):
        builder = PolicyBuilder().store(Store([ca])).time(when)
        return builder.build_server_verifier(name).verify(server, [])

    assert verify(NOW + 29 * DAY) == [server, ca]
    for when in (NOW + 31 * DAY, NOW - DAY):
        with pytest.raises(VerificationError):
            verify(when)
    with pytest.raises(VerificationError):
        verify(NOW, x509.DNSName("evil.example.org"))


def test_private_keys_are_nobody_elses_and_fit_the_public_ones(trial):
    private = sorted(path.relative_to(trial).as_posix() for path in trial.rglob("*.key"))
    assert private == [
        "authority/ca.key",
        "server/certificates/server.key",
        "sites/east side/node.key",
        "sites/north/node.key",
    ]
    assert {(trial / name).stat().st_mode & 0o777 for name in private} == {0o600}
    for name in ("north", "east side"):
        key = serialization.load_ssh_private_key((trial / f"sites/{name}/node.key").read_bytes(), None)
        public = serialization.load_ssh_public_key((trial / f"server/nodes/{name}.pub").read_bytes())
        assert key.public_key() == public
        assert key.curve.name == "secp384r1"


def test_configs_can_be_read_back(trial):
    server = load_server(trial / "server/server.toml")
    assert (server.sites, server.config, server.min_sites) == (["north", "east side"], "demo", 2)
    assert server.run_config().partition.clients == 2
    assert load_site(trial / "sites/east side/site.toml").name == "east side"


def test_a_config_file_travels_with_the_server(tmp_path):
    (tmp_path / "mine.toml").write_text("seed = 7\n")
    folder = write_trial(Trial(tmp_path / "trial", ["north"], config=str(tmp_path / "mine.toml")))
    (tmp_path / "mine.toml").unlink()
    assert load_server(folder / "server/server.toml").run_config().seed == 7


def test_nothing_is_overwritten(trial):
    before = {path: path.read_bytes() for path in trial.rglob("*") if path.is_file()}
    with pytest.raises(FedncaError, match="never overwritten"):
        write_trial(Trial(trial, ["north"]))
    assert {path: path.read_bytes() for path in trial.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sites": ["../up"]}, "'../up' cannot name a site; begin with a letter from a to z"),
        ({"sites": [""]}, "'' cannot name a site; begin with a letter from a to z"),
        ({"sites": ["north", "North"]}, "names one folder twice"),
        ({"hosts": ["https://x"]}, "neither a host name nor an IP"),
        ({"hosts": ["x:8000"]}, "neither a host name nor an IP"),
        ({"days": 0}, "--days is 0"),
        ({"port": 70000}, "--port is 70000"),
        ({"config": "demmo"}, "did you mean 'demo'"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, changes, sentence):
    with pytest.raises(FedncaError, match=re.escape(sentence)):
        write_trial(Trial(**{"folder": tmp_path / "trial", "sites": ["north"]} | changes))
    assert not (tmp_path / "trial").exists()


def test_insecure_has_no_keys_and_says_so(tmp_path):
    folder = write_trial(Trial(tmp_path / "trial", ["north"], insecure=True))
    page = (folder / "COMMANDS.md").read_text()
    assert not [*folder.rglob("*.key"), *folder.rglob("*.crt")]
    assert page.count("--insecure") == 2
    assert "Use no real data" in page
    assert "--ssl" not in page


@pytest.fixture
def shell(tmp_path):
    """Run blocks of commands in a folder; what they start is ended by its id."""
    started = []

    def begin(block: str, folder: Path) -> tuple[subprocess.Popen, Path]:
        log = folder / "log"
        with log.open("wb") as file:
            environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            process = subprocess.Popen(
                ["bash", "-c", block],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        started.append(process)
        return process, log

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if f"FLWR_HOME={tmp_path}/".encode() in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_flower_takes_the_commands_as_they_are_written(tmp_path, shell):
    port = free_port()
    folder = write_trial(Trial(tmp_path / "trial", ["north"], ["localhost"], port=port))
    page = (folder / "COMMANDS.md").read_text().replace("--port=9094", f"--port={free_port()}")
    superlink, register, supernode, run, _ = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)

    shell(superlink, folder / "server")
    wait_until(lambda: listens(port), "the SuperLink's start")

    node, log = shell(supernode, folder / "sites/north")  # not registered yet
    assert wait_until(lambda: node.poll() is not None, "the refusal of an unknown key")
    assert "Failed to initialize the connection to the SuperLink" in log.read_text()

    done, log = shell(register, folder / "server")
    assert done.wait(60) == 0, log.read_text()
    node, log = shell(supernode, folder / "sites/north")
    wait_until(lambda: "SuperNode ID" in log.read_text() or node.poll() is not None, "the node's connection")
    assert node.poll() is None, log.read_text()

    _, log = shell(run, folder / "server")
    wait_until(lambda: "Successfully started run" in log.read_text(), "the run's start")
