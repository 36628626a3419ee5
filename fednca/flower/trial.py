"""Writes everything a trial federation needs: authority, certificates, node keys, settings, the app, the commands.

All private keys are made in one place here. That is fine for a trial; in a real federation each site makes its own.
"""

import datetime
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write
from fednca.config import load_config, validate
from fednca.flower.app import template, write_app
from fednca.flower.config import ServerConfig, SiteConfig
from fednca.flower.instructions import commands_page

CURVE = ec.SECP384R1
LOOPBACK = ("localhost", "127.0.0.1")  # the server's own processes connect through them
CLOCKS_DIFFER = datetime.timedelta(hours=1)
LONGEST = 3650  # days


@dataclass(frozen=True)
class Trial:
    """What `fednca flower init` is asked for."""

    folder: Path
    sites: Sequence[str]
    hosts: Sequence[str] = LOOPBACK
    port: int = 8000
    days: int = 30
    config: str = "demo"
    insecure: bool = False

    @property
    def address(self) -> str:
        """The name or address by which the sites reach the server, as in a URL."""
        return f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]


def write_trial(trial: Trial) -> Path:
    """Write a federation's folder, which must be new or empty."""
    check_trial(trial)
    folder, server = trial.folder, trial.folder / "server"
    with explain_write(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FedncaError(f"'{folder}' is not empty and is never overwritten; name a new folder")
        write_server(trial, server)
        for name in trial.sites:
            text = template("site.toml").format(name=json.dumps(name))
            write_new(folder / "sites" / name / "site.toml", text.encode())
            if not trial.insecure:
                write_node_key(folder / "sites" / name / "node.key", server / "nodes" / f"{name}.pub")
        if not trial.insecure:
            write_certificates(trial)
        page = commands_page(trial.sites, trial.address, trial.port, insecure=trial.insecure)
        write_new(folder / "COMMANDS.md", page.encode())
    return folder


def check_trial(trial: Trial) -> None:
    """Refuse settings with which a federation could not start."""
    if not 1 <= trial.days <= LONGEST:
        raise FedncaError(f"--days is {trial.days}; give 1 to {LONGEST}")
    if not 1 <= trial.port <= 65535:
        raise FedncaError(f"--port is {trial.port}; give 1 to 65535")
    if len({name.casefold() for name in trial.sites}) < len(trial.sites):
        raise FedncaError(f"--sites {' '.join(map(quote, trial.sites))} names one folder twice; name each site once")
    for name in trial.sites:
        validate(SiteConfig, {"name": name})
    for host in trial.hosts:
        subject_name(host)


def write_server(trial: Trial, folder: Path) -> None:
    """Write server.toml, the app, and the file by which `flwr` finds the SuperLink."""
    config, wanted = load_config(trial.config), trial.config
    if trial.config.endswith(".toml"):
        wanted = "run.toml"
        write_new(folder / wanted, config.to_toml().encode())
    text = template("server.toml").format(
        config=json.dumps(wanted),
        sites=json.dumps(list(trial.sites)),
        min_sites=min(ServerConfig.model_fields["min_sites"].default, len(trial.sites)),
        rounds=config.train.rounds,
    )
    write_new(folder / "server.toml", text.encode())
    write_app(folder / "app")
    path = (folder / "certificates/ca.crt").absolute()  # Flower takes no relative one
    authority = json.dumps(str(path), ensure_ascii=False)  # TOML knows no surrogate pairs
    safety = "insecure = true" if trial.insecure else f"root-certificates = {authority}"
    address = f'address = "{trial.address}:{trial.port}"'
    connection = f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\n{address}\n{safety}\n'
    write_new(folder / "flower/config.toml", connection.encode())


def write_certificates(trial: Trial) -> None:
    """Write the trial's own authority and the server's certificate; every site gets the authority's certificate."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    ca = make_authority(ca_key, now, trial.days)
    hosts = list(dict.fromkeys([*trial.hosts, *LOOPBACK]))
    certificate = make_certificate(hosts, key.public_key(), ca, ca_key, now, trial.days)
    folder = trial.folder / "server/certificates"
    for place in (folder, *(trial.folder / "sites" / name for name in trial.sites)):
        write_new(place / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    write_new(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))
    write_new(folder / "server.key", private_bytes(key, serialization.PrivateFormat.PKCS8), private=True)
    write_new(trial.folder / "authority/ca.key", private_bytes(ca_key, serialization.PrivateFormat.PKCS8), private=True)


def make_authority(key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int) -> x509.Certificate:
    """Make the certificate of an authority that may sign servers' certificates, but no further authorities."""
    basic = x509.BasicConstraints(ca=True, path_length=0)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return _sign("fednca trial authority", None, key.public_key(), key, now, days, {basic: True, usage: True})


def make_certificate(
    hosts: Sequence[str],
    key: ec.EllipticCurvePublicKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: int,
) -> x509.Certificate:
    """Make a server's certificate for host names and addresses."""
    basic = x509.BasicConstraints(ca=False, path_length=None)
    names = x509.SubjectAlternativeName([subject_name(host) for host in hosts])
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    purpose = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    extensions = {basic: True, names: False, usage: True, purpose: False}
    return _sign("fednca trial server", ca.subject, key, ca_key, now, days, extensions)


def subject_name(host: str) -> x509.DNSName | x509.IPAddress:
    """Return a host name or address in the form that certificates use."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host.isascii() or not all(host.split(".")) or not all(c.isalnum() or c in ".-" for c in host):
        raise FedncaError(f"host '{host}' is neither a host name nor an IP address; leave out port and slashes")
    return x509.DNSName(host.lower())


def write_node_key(private: Path, public: Path) -> None:
    """Write a node's key pair, as `ssh-keygen -t ecdsa -b 384` would."""
    key = ec.generate_private_key(CURVE())
    write_new(private, private_bytes(key, serialization.PrivateFormat.OpenSSH), private=True)
    form = serialization.PublicFormat.OpenSSH
    write_new(public, key.public_key().public_bytes(serialization.Encoding.OpenSSH, form) + b"\n")


def private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    """Return a private key as text, without a password."""
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that must not exist yet; a private one can be read by its owner only, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    except FileExistsError:
        raise FedncaError(f"'{path}' exists already and is not overwritten; name a new folder") from None
    with os.fdopen(number, "wb") as file:
        file.write(content)


def _sign(
    subject: str,
    issuer: x509.Name | None,
    key: ec.EllipticCurvePublicKey,
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: int,
    extensions: Mapping[x509.ExtensionType, bool],
) -> x509.Certificate:
    """Sign a certificate that is valid from now on; machines whose clock is up to an hour slow accept it, too.

    issuer: None signs its own certificate. extensions: each with whether it is critical.
    """
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    number, end = x509.random_serial_number(), now + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder(issuer or name, name, key, number, now - CLOCKS_DIFFER, end)
    own = x509.SubjectKeyIdentifier.from_public_key(key)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for extension, critical in {own: False, **extensions, signer: False}.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(ca_key, hashes.SHA384())
