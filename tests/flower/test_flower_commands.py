import datetime
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from folders import write_sites
from helpers import tiny
from in_process import simulated

from fednca.cli.app import main
from fednca.engines.model import build_model
from fednca.flower.config import ServerConfig
from fednca.flower.ready import check_registered, check_same_authority, connection
from fednca.flower.server import serve
from fednca.flower.trial import make_authority, make_certificate, private_bytes
from fednca.flower.uploads import what_leaves
from fednca.methods import create_method, find_method, method_names

DIGITS = [f"digit {digit}" for digit in range(10)]
FEDERATED = [name for name in method_names() if not find_method(name).rule.centralized]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A federation whose sites have their images."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["flower", "init", str(folder / "trial"), "--sites", "north", "east"]) == 0
    for name, path in write_sites(folder / "digits", {"north": DIGITS[:7], "east": DIGITS[3:]}, images=12).items():
        path.unlink()
        shutil.move(path.parent, folder / "trial/sites" / name / "data")
    return folder / "trial"


@pytest.fixture
def trial(whole, tmp_path):
    """A copy to spoil."""
    folder = tmp_path / "trial"
    shutil.copytree(whole, folder)
    edit(folder / "server/flower/config.toml", str(whole), str(folder))
    return folder


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def told(capsys, *words):
    """Return what a command that must fail says."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fednca: ")
    return err


def certify(trial, begin=0, hosts=("localhost",)):
    """Put another server's certificate and key, valid from so many days on for 5 days, in place of the written ones."""
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=begin)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = make_authority(ca_key, now, 5)
    certificate = make_certificate(hosts, key.public_key(), ca, ca_key, now, 5)
    folder = trial / "server/certificates"
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(private_bytes(key, serialization.PrivateFormat.PKCS8))


def other_key(path):
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(private_bytes(key, serialization.PrivateFormat.OpenSSH))


def spoil_header(trial, header):
    table = trial / "sites/north/data/labels.csv"
    table.write_text(re.sub("^.*", header, table.read_text(), count=1))


def cut_table(trial, rows):
    table = trial / "sites/north/data/labels.csv"
    table.write_text("\n".join(table.read_text().splitlines()[: rows + 1]))


FAULTS = {
    "expired": (lambda t: certify(t, begin=-9), "expired on "),
    "not yet valid": (lambda t: certify(t, begin=9), "is not valid before "),
    "wrong host": (lambda t: certify(t, hosts=["other.example.org"]), "is not for host 'localhost'"),
    "server's key": (lambda t: other_key(t / "server/certificates/server.key"), "server.key' does not belong to"),
    "another authority": (
        lambda t: (t / "server/certificates/ca.crt").write_bytes(
            make_authority(
                ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC), 5
            ).public_bytes(serialization.Encoding.PEM)
        ),
        "was not signed by the 'ca.crt'",
    ),
    "no certificate": (lambda t: (t / "server/certificates/server.crt").write_text("?"), "is not a PEM certificate"),
    "site's authority": (certify, "north/ca.crt' is not the server's ca.crt"),
    "node's key": (lambda t: other_key(t / "sites/north/node.key"), "node.key' does not belong to"),
    "no node's key": (lambda t: (t / "sites/north/node.key").unlink(), "node.key' cannot be read"),
    "open key": (lambda t: (t / "sites/north/node.key").chmod(0o644), "can be read by others"),
    "moved": (lambda t: edit(t / "server/flower/config.toml", str(t), "/elsewhere"), "which does not exist"),
    "unknown setting": (
        lambda t: edit(t / "server/server.toml", "min_sites", "min_site"),
        "setting 'min_site' is not known; did you mean 'min_sites'?",
    ),
    "unknown override": (
        lambda t: edit(t / "server/server.toml", "rounds =", "round ="),
        "did you mean 'train.rounds'?",
    ),
    "no federation": (
        lambda t: edit(
            t / "server/server.toml", "[overrides.train]", "[overrides]\nmethod.name='centralized'\n[overrides.train]"
        ),
        "has no federation",
    ),
    "site's setting": (lambda t: edit(t / "sites/east/site.toml", "device", "devise"), "did you mean 'device'?"),
    "site's device": (
        lambda t: edit(t / "sites/east/site.toml", 'device = "auto"', 'device = "kuda"'),
        "east/site.toml': device 'kuda' is not known (known: auto, cpu, cuda, cuda:N)",
    ),
    "server's device": (
        lambda t: edit(t / "server/server.toml", "[overrides.train]", "[overrides]\ndevice='gpu:0'\n[overrides.train]"),
        "server.toml': device 'gpu:0' is not known",
    ),
    "no folder": (lambda t: edit(t / "sites/north/site.toml", '"data"', '"dta"'), "dta' is not a folder"),
    "no images": (lambda t: shutil.rmtree(t / "sites/north/data/images"), "which is not there"),
    "a broken image": (lambda t: break_image(t), "is cut off, damaged"),
    "no image folder": (
        lambda t: edit(t / "sites/north/site.toml", "[options]", "[options]\nimage_folder='pics'\n"),
        "image_folder ",
    ),
    "no label column": (
        lambda t: edit(t / "sites/north/site.toml", "[options]", "[options]\nlabel_column='finding'\n"),
        "label_column 'finding' is not in table",
    ),
    "no class column": (
        lambda t: edit(t / "sites/north/site.toml", "[options]", "[options]\nclasses=['digit 1', 'digit 11']\n"),
        "no training row has a label for class 'digit 11'",
    ),
    "unknown site": (lambda t: edit(t / "sites/north/site.toml", '"north"', '"west"'), "not in the server's list"),
    "a name twice": (lambda t: edit(t / "sites/north/site.toml", '"north"', '"east"'), "is already named 'east'"),
    "no validation": (lambda t: leave_out(t, "val"), "no site has validation images"),
    "no test": (lambda t: leave_out(t, "test"), "no site has test images"),
    "state": (lambda t: (t / "sites/north/state").write_text(""), "state' cannot be written"),
    "one image": (lambda t: cut_table(t, 2), "fewer than 2 images for training"),
    "unknown key": (
        lambda t: (t / "server/nodes/north.pub").write_text("ssh-foo AAAAB3NzaC1yc2E= x\n"),
        "north.pub' cannot be read",
    ),
    "no connection": (lambda t: (t / "server/flower/config.toml").write_text("superlink = 3"), "how to reach"),
    "no named connection": (
        lambda t: (t / "server/flower/config.toml").write_text('[superlink]\ndefault = "x"\nx = "y"\n'),
        "how to reach",
    ),
    "spelling": (
        lambda t: spoil_header(t, "image,split,digit 0,digit 1,digit 2,Digit-3,digit 4,digit 5,digit 6"),
        "agree on one name",
    ),
}


def leave_out(trial, part):
    """Take the rows of a part out of all tables, and make those of each other part a patient, who cannot be parted."""
    for table in trial.glob("sites/*/data/labels.csv"):
        header, *rows = table.read_text().splitlines()
        kept = [f"{patient},{row}" for row in rows if (patient := row.split(",")[1]) != part]
        table.write_text("\n".join([f"patient,{header}", *kept]))


def break_image(trial):
    path = sorted((trial / "sites/north/data/images").iterdir())[-1]
    path.write_bytes(path.read_bytes()[:60])


def test_a_device_may_be_one_that_this_machine_lacks(trial, capsys):
    edit(trial / "sites/east/site.toml", 'device = "auto"', 'device = "cuda:99"')
    assert main(["flower", "check", str(trial)]) == 0


def test_images_that_are_to_be_left_out_may_be_broken(trial, capsys):
    break_image(trial)
    edit(trial / "sites/north/site.toml", "device", 'on_corrupt = "skip"\ndevice')
    assert main(["flower", "check", str(trial)]) == 0


@pytest.mark.parametrize("name", FAULTS)
def test_check_says_what_is_wrong(trial, capsys, name):
    spoil, sentence = FAULTS[name]
    spoil(trial)
    assert sentence in told(capsys, "flower", "check", trial)


def test_check_says_all_that_is_wrong_at_once(trial, capsys):
    FAULTS["no folder"][0](trial)
    FAULTS["expired"][0](trial)
    lines = told(capsys, "flower", "check", trial).splitlines()
    assert lines[0] == "fednca: 5 problems:"
    assert len(lines) == 6


def test_check_finds_the_federation_and_each_part_of_it_ready(trial, tmp_path, capsys):
    shutil.copytree(trial / "sites/north", tmp_path / "elsewhere")
    for part in (trial, trial / "server", trial / "sites/north", tmp_path / "elsewhere"):
        capsys.readouterr()
        assert main(["flower", "check", str(part)]) == 0
        assert capsys.readouterr().out == "ready\n"


def test_check_in_a_sites_own_folder_compares_keys_too(trial, capsys, monkeypatch):
    FAULTS["node's key"][0](trial)
    monkeypatch.chdir(trial / "sites/north")
    assert "does not belong to" in told(capsys, "flower", "check", ".")


def test_a_site_may_lie_below_the_root_of_a_file_system(trial, monkeypatch):
    shutil.copytree(trial / "sites/north", trial / "alone")
    monkeypatch.setattr("pathlib.Path.absolute", lambda path: Path("/") / path.name)  # as if mounted at /alone
    assert list(check_registered(trial / "alone")) == list(check_same_authority(trial / "alone")) == []


def test_one_fault_is_told_once(trial, capsys):
    (trial / "sites/north/node.key").write_text("?")
    assert told(capsys, "flower", "check", trial).count("is not a private key") == 1


def test_a_folder_may_have_any_name(tmp_path, capsys):
    folder = tmp_path / "Klinik Süd 😀"
    assert main(["flower", "init", str(folder), "--sites", "north"]) == 0
    assert Path(str(connection(folder / "server")["root-certificates"])).is_file()
    (folder / "sites/north/node.key").chmod(0o644)
    hint = re.search("`(chmod .*)`", told(capsys, "flower", "check", folder))[1]
    assert shlex.split(hint) == ["chmod", "600", str(folder / "sites/north/node.key")]


def test_check_of_another_folder_is_refused(tmp_path, capsys):
    assert "neither server.toml nor site.toml" in told(capsys, "flower", "check", tmp_path)


def test_init_refuses_to_overwrite(trial, capsys):
    err = told(capsys, "flower", "init", trial, "--sites", "north")
    assert err.count("\n") == 1
    assert "never overwritten" in err


def test_insecure_must_be_asked_for_and_warns(tmp_path, capsys):
    assert main(["flower", "init", str(tmp_path / "a"), "--sites", "north"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["flower", "init", str(tmp_path / "b"), "--sites", "north", "--insecure"]) == 0
    assert "warning: nothing is encrypted" in capsys.readouterr().out


def test_an_action_must_be_named(capsys):
    assert "ACTION" in told(capsys, "flower")


@pytest.mark.parametrize("name", FEDERATED)
def test_what_leaves_is_what_the_sites_really_send(name, tmp_path):
    config = tiny(method__name=name, train__rounds=1)
    (tmp_path / "run.toml").write_text(config.to_toml())
    grid = simulated()
    serve(grid, ServerConfig(config=str(tmp_path / "run.toml"), out=str(tmp_path / "run"), wait=5.0))

    sent = set()  # (size in bytes) of every record of arrays, for every kind of message
    words = set()
    for message, reply in grid.sent:
        for part, record in reply.content.array_records.items():
            if size := sum(len(array.data) for array in record.values() if len(record) > 1):
                sent.add((message.metadata.message_type, part, size))
        words |= {*reply.content.metric_records, *reply.content.config_records}
    told = what_leaves(config, 10)
    assert sorted(each.record for each in told if each.record) == sorted(size for *_, size in sent)
    assert words == {"site", "counts", "losses"}
    assert [each.what.split(":")[0].split(" of ")[0] for each in told if each.record is None] == [
        "name",
        "counts",
        "mean",
        "its kind, not its text",
    ]
    copies = find_method(name).rule.copies
    method = create_method(config)
    model = build_model(config, method, tuple(DIGITS), pretrained="none")
    trained = sum(weight.numel() * 4 for weight in model.parameters() if weight.requires_grad)
    extra = [each.numbers for each in told if "extra tensors" in each.what]
    assert extra == ([copies * trained] if copies else [])


@pytest.mark.parametrize("command", ["resume", "figures"])
def test_commands_that_need_the_sites_images_say_so(capsys, tmp_path, command):
    (tmp_path / "run.toml").write_text(tiny(train__rounds=1).to_toml())
    serve(simulated(), ServerConfig(config=str(tmp_path / "run.toml"), out=str(tmp_path / "run"), wait=5.0))
    assert "its images are at the sites, and `flwr run` resumes it" in told(capsys, command, str(tmp_path / "run"))


def test_what_leaves_counts_bytes_as_the_checkpoint_does(capsys, tmp_path):
    config = tiny(method__name="scaffold", train__rounds=1)
    (tmp_path / "run.toml").write_text(config.to_toml())
    serve(simulated(), ServerConfig(config=str(tmp_path / "run.toml"), out=str(tmp_path / "run"), wait=5.0))
    content = (tmp_path / "run/final.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    ends = {name: each["data_offsets"] for name, each in header.items() if name.startswith("weights/")}
    size = sum(end - begin for begin, end in ends.values())

    assert main(["flower", "what-leaves", "--method", "scaffold", "--preset", "demo"]) == 0
    out = capsys.readouterr().out
    assert f"{size:,} B" in out
    assert "c_k" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "scafold"], "did you mean 'scaffold'?"),
        (["--method", "centralized"], "has no federation"),
        (["--dataset", "folder"], "give --classes"),
        *[(["--classes", given], f"--classes is {given}; give 2 to 30000") for given in ("1", "0", "-3", str(10**12))],
        (["--dataset", "folder", "--classes", "0"], "--classes is 0; give 2 to 30000"),
        (["--presets", "demo"], "--presets"),
    ],
)
def test_what_leaves_refuses_with_a_sentence(words, sentence, capsys):
    assert sentence in told(capsys, "flower", "what-leaves", *words)
