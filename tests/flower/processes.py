"""A real federation on this machine: a SuperLink and SuperNodes as processes on loopback, with TLS and node keys."""

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_MAX_INTERVAL, HEARTBEAT_MIN_INTERVAL
from helpers import free_port

BIN = Path(sys.executable).parent
PATIENCE = 300  # seconds


def wait_until(condition, what: str):
    """Return the first true value of a condition, or fail after a time that the busiest machine does not need."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} did not happen within {PATIENCE} s")


def write_certificates(folder: Path) -> None:
    """Write ca.crt, and server.crt with server.key for 127.0.0.1, all valid for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's own authority")])
    server_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    ca = _certificate(ca_name, ca_name, ca_key.public_key(), ca_key, x509.BasicConstraints(ca=True, path_length=0))
    server = _certificate(server_name, ca_name, server_key.public_key(), ca_key, address)
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_private(server_key, serialization.PrivateFormat.PKCS8))


def write_node_key(path: Path) -> None:
    """Write a node's private key to `path` and its public key beside it, as .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def _private(key, form) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _certificate(subject, issuer, public_key, signing_key, extension) -> x509.Certificate:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number(), now - day, now + day)
    return builder.add_extension(extension, critical=False).sign(signing_key, hashes.SHA256())


@dataclass
class Federation:
    """A folder with all that the processes need, and the processes that run."""

    folder: Path
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # how long a log was when its process started

    def __post_init__(self) -> None:
        write_certificates(self.folder / "certificates")
        (self.folder / "home").mkdir()
        (self.folder / "home" / "config.toml").write_text(
            f"[superlink]\ndefault = 'test'\n\n[superlink.test]\naddress = '127.0.0.1:{self.port}'\n"
            f"root-certificates = '{self.folder}/certificates/ca.crt'\n"
        )

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "OMP_NUM_THREADS": "1",
        }
        return os.environ | own

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen:
        """Start a process whose output goes to NAME.log."""
        log = (self.folder / f"{name}.log").open("ab")
        self.starts[name] = log.tell()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=self.environment | environment,
            cwd=self.folder,
            start_new_session=True,
        )
        log.close()
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        """Return what the latest process of a name has written so far."""
        return (self.folder / f"{name}.log").read_bytes()[self.starts[name] :].decode(errors="replace")

    def kill(self, name: str) -> None:
        """Kill a process with its group at once, as a power failure would; what left the group ends by itself."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all processes that are left, also those that the ones started here have started."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for number in self.relatives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def relatives(self) -> list[int]:
        """Return the ids of all processes that were started from here, directly or not: they have this Flower home."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
                if f"FLWR_HOME={self.folder}/home".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def start_superlink(self) -> None:
        """Start the SuperLink with TLS and node authentication, and wait for its port."""
        certificates = self.folder / "certificates"
        self.start(
            "superlink",
            "flower-superlink",
            "--host=127.0.0.1",
            f"--port={self.port}",
            f"--ssl-ca-certfile={certificates}/ca.crt",
            f"--ssl-certfile={certificates}/server.crt",
            f"--ssl-keyfile={certificates}/server.key",
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            f"--database={self.folder}/superlink.db",
        )
        wait_until(self._listens, "the SuperLink's start")

    def start_simulation(self) -> None:
        """Start a SuperLink that simulates its nodes in this machine's Ray, without TLS, and wait for its port."""
        (self.folder / "home" / "config.toml").write_text(
            f"[superlink]\ndefault = 'test'\n\n[superlink.test]\naddress = '127.0.0.1:{self.port}'\ninsecure = true\n"
        )
        options = ("--insecure", "--simulation", "--host=127.0.0.1", f"--port={self.port}")
        self.start("superlink", "flower-superlink", *options, "--disable-runtime-dependency-installation")
        wait_until(self._listens, "the SuperLink's start")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def register(self, site: str) -> None:
        """Make a node's key and tell the SuperLink its public half."""
        write_node_key(self.folder / f"{site}.key")
        self.flwr("supernode", "register", f"{site}.pub", "test", "--name", site)

    def start_supernode(self, site: str, config: Path, *, mortal: bool = False) -> subprocess.Popen:
        """Start a site's SuperNode, whose death the SuperLink notices in 20 s if it is mortal, and else in an hour."""
        return self.start(
            site,
            sys.executable,
            str(Path(__file__).with_name("lively_supernode.py")),
            f"--superlink=127.0.0.1:{self.port}",
            f"--root-certificates={self.folder}/certificates/ca.crt",
            f"--auth-supernode-private-key={self.folder}/{site}.key",
            f"--port={free_port()}",
            f'--node-config=site="{config}"',
            HEARTBEAT_INTERVAL=str(HEARTBEAT_MIN_INTERVAL if mortal else HEARTBEAT_MAX_INTERVAL),
        )

    def flwr(self, *arguments: str) -> str:
        """Call Flower's command line and return what it prints."""
        done = subprocess.run(
            ["flwr", *arguments], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app: Path, *options: str, **config: object) -> str:
        """Submit a run and return its id."""
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        started = self.flwr("run", str(app), "test", "--run-config", settings, "--format", "json", *options)
        return str(json.loads(started[started.index("{") :])["run-id"])

    def status(self, run: str) -> str:
        """Return a run's status, such as `running` or `finished:completed`."""
        listed = self.flwr("ls", "test", "--run-id", run, "--format", "json")
        return str(json.loads(listed[listed.index("{") :])["runs"][0]["status"])
