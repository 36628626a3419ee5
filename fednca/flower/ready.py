"""Checks a federation's folder, or only the server's or a site's part of it: one sentence for each problem."""

import datetime
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fednca.base.devices import read_device
from fednca.base.errors import FedncaError
from fednca.config import read_toml, validate
from fednca.data.images import read_image
from fednca.data.sources import folder as folder_source
from fednca.data.types import Dataset
from fednca.flower.classes import join_classes
from fednca.flower.config import load_server, load_site
from fednca.flower.roster import Announced, check_judged
from fednca.flower.site import FEWEST, image_paths, split_parts
from fednca.flower.state import check_writable
from fednca.flower.trial import subject_name

Problems = Iterator[str]
Watch = Callable[[Iterable[None], str, int], Iterable[None]]  # shows how far something is: steps, what, how many


def find_problems(folder: Path, watch: Watch = lambda steps, what, total: steps) -> list[str]:
    """Return the problems of the server's and the sites' folders that are here; every image is read once."""
    server = next((path for path in (folder, folder / "server") if (path / "server.toml").is_file()), None)
    alone = [folder] if (folder / "site.toml").is_file() else []
    sites = alone or sorted(path.parent for path in folder.glob("sites/*/site.toml"))
    if server is None and not sites:
        return [f"'{folder}' holds neither server.toml nor site.toml; name a folder that `fednca flower init` wrote"]
    problems: list[str] = []
    if server is not None:
        problems += [*check_server(server), *explained(check_server_certificate(server))]
    here: dict[str, Announced] = {}
    for site in sites:
        problems += check_site(site, here, watch)
        for check in (check_site_keys, check_registered, check_same_authority):
            problems += explained(check(site))
    if server is not None and not problems:
        problems += explained(check_together(server, here))
    return list(dict.fromkeys(problems))  # two checks may stumble over the same thing


def is_insecure(folder: Path) -> bool:
    """Return whether the server's part here is set up without encryption."""
    paths = [path / "flower/config.toml" for path in (folder, folder / "server")]
    return any(connection(path.parents[1]).get("insecure") is True for path in paths if path.is_file())


def explained(found: Problems) -> Problems:
    """Yield the sentences of a check; an error that ends it is one more."""
    try:
        yield from found
    except FedncaError as error:
        yield str(error)


def check_server(folder: Path) -> Problems:
    """Check that server.toml can be read and that its run can be federated."""
    from fednca.flower.server import check_fit
    from fednca.methods import create_method

    path = folder / "server.toml"
    try:
        settings = load_server(path)
        config = settings.run_config()
        check_fit(settings, config, create_method(config))
        read_device(config.device)
    except FedncaError as error:
        yield f"'{path}': {error}"


def check_site(folder: Path, here: dict[str, Announced], watch: Watch) -> list[str]:
    """Check site.toml, the table of labels and all images; note in `here` what the site would tell the server."""
    path = folder / "site.toml"
    try:
        site = load_site(path)
        read_device(site.device)  # its name only: this may be another machine than the site's
        root = Path(site.root)
        if not root.is_dir():
            raise FedncaError(f"root '{root}' is not a folder; name the folder with labels.csv and the images")
        check_writable(Path(site.state))
        if site.name in here:
            raise FedncaError(f"another site is already named '{site.name}'; give each its own name")
        options = validate(folder_source.Options, site.options, "options")
        found = folder_source.load(options, root)
        images = {part: len(own.rows) for part, own in split_parts(found, site).items()}
        if images["train"] < FEWEST:
            raise FedncaError(f"the table leaves fewer than {FEWEST} images for training; add training rows")
        for name, labels in zip(found.classes, found.train.labels.T, strict=True):
            if (labels < 0).all():
                raise FedncaError(f"no training row has a label for class '{name}'; correct its name or leave it out")
        if site.on_corrupt == "fail":
            check_images(found, site.name, watch)
    except FedncaError as error:
        return [f"'{path}': {error}"]
    here[site.name] = Announced(site.name, 0, found.classes, images)
    return []


def check_images(dataset: Dataset, site: str, watch: Watch) -> None:
    """Read every image; the first that cannot be read is an error."""

    def read(path: Path) -> None:
        read_image(path)

    paths = image_paths(dataset)
    with ThreadPoolExecutor() as pool:
        for _ in watch(pool.map(read, paths), f"reading images of {site}", len(paths)):
            pass


def check_together(server: Path, here: dict[str, Announced]) -> Problems:
    """Check that the sites here are in the server's list, spell classes alike, and can evaluate a model."""
    settings = load_server(server / "server.toml")
    for name in here.keys() - set(settings.sites):
        yield f"site '{name}' is not in the server's list ({', '.join(settings.sites)}); add it to its `sites`"
    if here:
        join_classes({name: site.classes for name, site in here.items()}, settings.classes)
    if here.keys() >= set(settings.sites):
        check_judged(here.values())


def check_server_certificate(folder: Path) -> Problems:
    """Check the server's certificate: its dates, its host, who signed it, and whether its key is the right one."""
    if is_insecure(folder):
        return
    authority, path, key = (folder / "certificates" / name for name in ("ca.crt", "server.crt", "server.key"))
    ca, certificate = load_certificate(authority), load_certificate(path)
    yield from check_dates(authority, ca)
    yield from check_dates(path, certificate)
    used = Path(str(connection(folder).get("root-certificates", "")))
    if not used.is_file():
        yield f"'{folder / 'flower/config.toml'}' names '{used}', which does not exist; write where ca.crt is now"
    host = str(connection(folder).get("address", "")).rpartition(":")[0].strip("[]")
    if not covers(certificate, host):
        yield f"certificate '{path}' is not for host '{host}'; make a new one for it (`--host {host}`)"
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        yield f"certificate '{path}' was not signed by the 'ca.crt' beside it; take both from the same folder"
    yield from check_private(key)
    if load_key(key).public_key() != certificate.public_key():
        yield f"key '{key}' does not belong to certificate '{path}'; take both from the same folder"


def check_site_keys(folder: Path) -> Problems:
    """Check the authority's certificate and the node's key at a site; an insecure site has neither."""
    ca, key = folder / "ca.crt", folder / "node.key"
    if not ca.exists() and not key.exists():
        return
    yield from check_dates(ca, load_certificate(ca))
    yield from check_private(key)
    load_key(key)


def check_registered(folder: Path) -> Problems:
    """Check that a node's private key belongs to the public key at the server, where both are here."""
    private, public = folder / "node.key", server_beside(folder) / "nodes" / f"{folder.absolute().name}.pub"
    if not private.is_file() or not public.is_file():
        return
    try:
        known = serialization.load_ssh_public_key(public.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedncaError(f"public key '{public}' cannot be read ({error}); copy it again from the site") from None
    if load_key(private).public_key() != known:
        yield f"key '{private}' does not belong to '{public}'; copy the public key again from the site, and register it"


def check_same_authority(folder: Path) -> Problems:
    """Check that a site trusts the authority that signed the server's certificate, where both are here."""
    own, server = folder / "ca.crt", server_beside(folder) / "certificates/ca.crt"
    if own.is_file() and server.is_file() and load_certificate(own) != load_certificate(server):
        yield f"certificate '{own}' is not the server's ca.crt; copy it again from '{server}'"


def server_beside(folder: Path) -> Path:
    """Return where the server's part is, if this site's part lies in the federation's folder."""
    return folder.absolute().parent.parent / "server"


def check_dates(path: Path, certificate: x509.Certificate) -> Problems:
    """Check that a certificate is valid now."""
    now = datetime.datetime.now(datetime.UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        yield f"certificate '{path}' expired on {end:%Y-%m-%d %H:%M} UTC; make new ones"
    if now < begin:
        yield f"certificate '{path}' is not valid before {begin:%Y-%m-%d %H:%M} UTC; is this machine's clock right?"


def check_private(path: Path) -> Problems:
    """Check that only its owner can read a private key."""
    if path.is_file() and path.stat().st_mode & 0o077:
        yield f"key '{path}' can be read by others; run `chmod 600 {quote(str(path))}`"


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Return whether a certificate names a host or address."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    wanted = subject_name(host)
    return str(wanted.value) in [str(name).lower() for name in names.get_values_for_type(type(wanted))]


def connection(folder: Path) -> dict[str, object]:
    """Return how `flwr` reaches the SuperLink."""
    path = folder / "flower/config.toml"
    found = read_toml(path).get("superlink", {})
    chosen = found.get(found.get("default", ""), {}) if isinstance(found, dict) else None
    if not isinstance(chosen, dict):
        raise FedncaError(f"'{path}' does not say how to reach the SuperLink; write it as `fednca flower init` does")
    return chosen


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise FedncaError(f"certificate '{path}' cannot be read ({error.strerror}); copy it again") from None
    except ValueError:
        raise FedncaError(f"'{path}' is not a PEM certificate; copy it again") from None


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key of an elliptic curve, in either of its formats."""
    try:
        content = path.read_bytes()
        ssh = b"OPENSSH" in content[:40]
        key = (serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key)(content, None)
    except OSError as error:
        raise FedncaError(f"key '{path}' cannot be read ({error.strerror}); copy it again") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise FedncaError(f"'{path}' is not a private key without password; copy it again") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedncaError(f"key '{path}' is not an elliptic-curve key; make one with `ssh-keygen -t ecdsa -b 384`")
    return key
