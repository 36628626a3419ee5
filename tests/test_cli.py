import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny
from PIL import Image

import fednca
from fednca.base.errors import FedncaError
from fednca.cli.app import free_folder, main
from fednca.runs import Run, train


@pytest.fixture
def told(capsys):
    """Run a command that must fail, and return its one sentence."""

    def tell(*words):
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert all(line.startswith("preparing ") for line in out.splitlines())
        assert err.startswith("fednca: ")
        assert err.count("\n") == 1
        return err

    return tell


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rum", "command 'rum' is not known; did you mean 'run'?"),
        ("train", "command 'train' is not known; see `fednca --help`"),
        ("run demo --method fedcurv --lam 1", "flag '--lam' is not known; did you mean '--method.lam'?"),
        ("run demo --query-init etf", "flag '--query-init' is not known; did you mean '--method.query-init'?"),
        ("run", "the following arguments are required: PRESET"),
        ("run dermamnist", "preset 'dermamnist' is not known; did you mean 'dermamnist-0.5'?"),
        ("run no/such/file.toml", "cannot read 'no/such/file.toml': No such file or directory"),
        ("run demo --method fednca", "method 'fednca' is not known; did you mean 'fednca-ml'?"),
        ("run demo --dataset digit", "dataset 'digit' is not known; did you mean 'digits'?"),
        ("run demo --backbone resnet17", "backbone 'resnet17' is not known; did you mean"),
        ("run demo --learner fed", "method 'fed' is not known"),
        ("run demo --beta 0", "'partition.beta' should be greater than 0, not 0.0"),
        ("run demo --beta -1", "'partition.beta' should be greater than 0"),
        ("run demo --gamma 0", "'partition.gamma' should be greater than 0"),
        ("run demo --gamma 1.5", "'partition.gamma' should be less than or equal to 1, not 1.5"),
        ("run demo --rounds many", "setting 'train.rounds' should be a valid integer, not 'many'"),
        ("run demo --norm layer", "'model.norm' should be 'batch', 'group' or 'frozen', not 'layer'"),
        ("run demo --betas 0.9", "setting 'train.betas' should be 2 values separated by commas, not '0.9'"),
        ("run demo --betas 0.9,0.99,0.9", "should be 2 values separated by commas, not '0.9,0.99,0.9'"),
        ("run demo --device tpu", "device 'tpu' is not known (known: auto, cpu, cuda, cuda:N)"),
        ("run demo --device cuda:99", "device 'cuda:99' is not there"),
        ("run demo --roundz 3", "flag '--roundz' is not known; did you mean '--rounds'?"),
        ("run demo --rounds", "expected one argument"),
        ("run demo extra", "unexpected argument 'extra'; settings are given as --FLAG VALUE"),
        ("run demo --method.lambda 1", "option of fednca-ml 'lambda' is not known; did you mean 'lambda2'?"),
        ("run demo --method.lambda1 much", "setting 'lambda1' should be a valid number, not 'much'"),
        ("run demo --method.lambda1 -1", "'method.options.lambda1' should be greater than or equal to 0"),
        ("run demo --method.head etf --method.lambda1 1", "head 'etf' has no feature per class"),
        ("run demo --method fedavg --method.lambda1 1", "option of fedavg 'lambda1' is not known"),
        ("run demo --method.variant", "flag '--method.variant' needs a value"),
        ("run demo --learner.lambda1 1", "no --learner is given"),
        ("run demo --data.train_singles 1000", "1000 singles"),
        ("run demo --data.val_singles 0 --data.val_pairs 0", "digits has no validation images"),
        ("run demo --data.test_singles 0 --data.test_pairs 0", "digits has no test images"),
        ("run demo --gamma 0.05", "is 0.05, but of 10 classes this is less than one class"),
        ("run demo --betas 0.9,2", "setting 'train.betas' should be less than 1, not '2'"),
        ("run demo --betas 0.9,high", "setting 'train.betas' should be a valid number, not 'high'"),
        ("run demo --threads 99999999999999999999", "'threads' should be less than or equal to 1024"),
        ("run demo --method.lambda1 inf", "'method.options.lambda1' should be a finite number"),
        ("run demo --backbone resnet18 --image-size 32 --batch-size 1", "cannot train on batches of 1 at 32 px"),
        ("run demo --backbone convnext_atto --image-size 8", "backbone 'convnext_atto' cannot"),
        ("run demo --method fedavg-asl --learner fednca-ml", "differs from fedavg only in what a client learns"),
        ("run demo --out=", "argument --out: give a value that is not empty"),
        (f"run demo --out {'x' * 300}", "File name too long"),
        ("--nope", "flag '--nope' is not known"),
        ("--nope run demo", "flag '--nope' is not known"),
        ("--nope methods", "argument '--nope' is not known"),
        ("run demo --clients 2000", "images are too few to give 2000 clients"),
        ("run demo --pretrained no.safetensors", "weight file 'no.safetensors'"),
        ("run cifar10-0.5", "cifar10 lacks 'data/cifar10/cifar-10-batches-bin/data_batch_1.bin'"),
        ("partition demo --clients 1", "1 clients with 5 classes each cannot hold all 10 classes"),
        ("resume", "the following arguments are required: DIR"),
        ("resume no/such/folder", "'no/such/folder' is not a run folder"),
        ("resume . --rounds 3", "argument '--rounds' is not known"),
        ("bench", "the following arguments are required: PRESET"),
        ("bench demmo", "preset 'demmo' is not known; did you mean 'demo'?"),
        ("bench demo --methods fednca", "method 'fednca' is not known; did you mean 'fednca-ml'?"),
        ("bench demo --methods fedavg@fednca", "method 'fednca' is not known; did you mean 'fednca-ml'?"),
        ("bench demo --methods fedavg fedprox:nu=1", "option of fedprox 'nu' is not known (known: head, mu)"),
        ("bench demo --methods fedprox:mu=1,mu=2", "'mu' stands twice in 'fedprox:mu=1,mu=2'; give it one value"),
        ("bench demo --methods fedprox:mu", "'mu' in 'fedprox:mu' is not option=value"),
        ("bench demo --methods scaffold@fednca-ml:tau=1", "is not known; did you mean 'learner.tau'?"),
        ("bench demo --methods fedprox:mu=low", "setting 'mu' should be a valid number, not 'low'"),
        ("bench demo --methods fedprox:mu=-1", "'method.options.mu' should be greater than or equal to 0"),
        ("bench demo --methods fedprox:mu=1,fedavg", "'fedavg' in 'fedprox:mu=1,fedavg' is not option=value"),
        (
            "bench demo --methods fedavg:learner.tau=1",
            "is an option of a learner, but the row has none; write fedavg@LEARNER",
        ),
        ("bench demo --methods fedavg-asl@fednca-ml", "differs from fedavg only in what a client learns"),
        ("bench demo --methods fedavg fednca-ml:heads=3", "fednca-ml:heads=3: 3 attention heads do not divide 64"),
        ("bench demo --seeds 0", "--seeds '0' is neither a number of seeds, as in '3', nor a list"),
        ("bench demo --seeds 20260101", "for seed 20260101 alone write '--seeds 20260101,'"),
        ("bench demo --methods fedavg,fedprox:mu=1", "separate methods with options by spaces"),
        ("bench demo --seed 1", "setting 'seed' is chosen for each run of a bench; use --seeds"),
        ("bench demo --method fedavg", "'method.name' is chosen for each run of a bench; use --methods"),
        (
            "bench demo --method.tau 0.5",
            "'method.tau' is chosen for each run of a bench; use --methods NAME:tau=0.5",
        ),
        (
            "bench demo --learner fedavg --learner.head mlp",
            "'method.learner' is chosen for each run of a bench; use --me",
        ),
        ("bench demo --at-once 0", "argument --at-once: give a whole number (1 or more), not '0'"),
        ("bench demo --device cuda:99", "device 'cuda:99' is not there"),
        ("bench demo --rounds 0", "'train.rounds' should be greater than or equal to 1"),
        ("bench demo --dataset digit --methods fedavg", "dataset 'digit' is not known; did you mean 'digits'?"),
        ("bench cifar10-0.5 --methods fedavg", "cifar10 lacks 'data/cifar10/cifar-10-batches-bin/data_batch_1.bin'"),
        (f"bench demo --methods fedavg --out {'x' * 300}", "File name too long"),
        ("methods --classes 1", "argument --classes: give a whole number (2 to 512), not '1'"),
        ("table no/such/folder", "'no/such/folder' is not the folder of a bench: it has no bench.json"),
        ("methods fedavgg", "method 'fedavgg' is not known; did you mean 'fedavg'?"),
        ("datasets digitz", "dataset 'digitz' is not known; did you mean 'digits'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(told, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in told(*words.split())
    assert list(tmp_path.iterdir()) == []  # and leaves nothing behind


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds = ", "is not valid TOML"),
        ("train = 5\n", "setting 'train' should be"),
        ("method = 'fedavg'\n", "setting 'method' should be"),
        ("seed = 2020-01-01\n", "setting 'seed' should be a valid integer"),
        (f"seed = {'9' * 5000}\n", "is not valid TOML"),
        ("[train]\nrounds = '5'\n", "setting 'train.rounds' should be a valid integer, not '5'"),
        ("[train]\nepochs = 5\n", "setting 'train.epochs' is not known"),
        ("[method]\noptions = { tau = 'low' }\n", "setting 'method.options.tau' should be a valid number, not 'low'"),
        ("\x00\xff", "is not valid TOML"),
    ],
)
def test_a_bad_config_file_is_one_sentence(told, tmp_path, text, sentence):
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    assert sentence in told("run", path, "--out", tmp_path / "run")


def test_a_bench_refuses_options_in_its_file_but_takes_a_runs_own_config(told, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(tiny(method__options={"tau": 0.6}, train__rounds=1).to_toml())
    sentence = "sets method.options.tau = 0.6, which is chosen for each run of a bench; take it out and use"
    assert sentence in told("bench", path, "--methods", "fednca-ml", "--out", tmp_path / "bench")
    run = train(tiny(train__rounds=1), tmp_path / "run")  # its config has all options written out
    assert run.config.method.options["tau"] == 0.3
    words = ["bench", str(run.folder / "config.toml"), "--methods", "fedavg", "--seeds", "1"]
    assert main([*words, "--out", str(tmp_path / "bench")]) == 0


def test_run_then_mistakes_with_its_folder(config, told, capsys, tmp_path):
    folder = tmp_path / "run"
    assert (
        main(["run", config, "--out", str(folder), "--method.lambda1=0.5", "--train.lr", "2e-3", "--batch_size", "16"])
        == 0
    )
    out = capsys.readouterr().out
    assert "fednca-ml round 2/2" in out
    assert "best validation" in out
    run = Run(folder)
    assert (run.config.method.options["lambda1"], run.config.train.lr, run.config.train.batch_size) == (0.5, 2e-3, 16)

    assert "exists already; go on with `fednca resume" in told("run", config, "--out", folder)
    checkpoint = folder / "last.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    assert "is corrupted" in told("resume", folder)
    (folder / "partition.npz").write_bytes(b"nonsense")
    assert "is corrupted" in told("resume", folder)


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    [
        ("history.jsonl", lambda b: b"garbage\n" + b, "is damaged in line 1"),
        ("history.jsonl", lambda b: b.split(b"\n")[0] + b"\n", "has 1 rounds where the last checkpoint has 2"),
        ("history.jsonl", lambda b: b"\xff\n", "cannot be read"),
        (
            "partition.npz",
            lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 255]) + b[len(b) // 2 + 1 :],
            "partition.npz",
        ),
        ("config.toml", lambda b: b.replace(b"clients = 3", b"clients = 4"), "has 3 clients, its config.toml 4"),
        ("config.toml", lambda b: b.replace(b"resnet-small", b"test_resnet"), "does not fit the model"),
        ("last.safetensors", lambda b: b[:-1], "delete that file to start the run again"),
    ],
)
def test_a_damaged_run_folder_is_one_sentence(config, told, capsys, tmp_path, file, damage, sentence):
    assert main(["run", config, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    path = tmp_path / "run" / file
    path.write_bytes(damage(path.read_bytes()))
    assert sentence in told("resume", tmp_path / "run")


def test_a_lost_checkpoint_begins_anew(config, tmp_path):
    assert main(["run", config, "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "run/last.safetensors").unlink()
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert len(Run(tmp_path / "run").history) == 2


def test_signs_of_markup_in_a_folders_name_are_only_signs(config, capsys, tmp_path):
    assert main(["run", config, "--out", str(tmp_path / "x[/y][bold]z")]) == 0
    assert "x[/y][bold]z" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fednca {fednca.__version__}\n"
    assert fednca.__version__.startswith("0.")


@pytest.mark.parametrize("words", ["--version", "methods", "rum"])
def test_python_m_fednca_is_the_command(words, capsys):
    ended = subprocess.run([sys.executable, "-m", "fednca", words], capture_output=True, text=True, check=False)
    assert main([words]) == ended.returncode
    assert capsys.readouterr() == (ended.stdout, ended.stderr)


def test_a_folder_that_cannot_be_written(config, told, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot create" in told("run", config, "--out", tmp_path / "file" / "run")
    assert "exists already; choose another --out" in told("run", config, "--out", tmp_path / "file")


def test_what_is_not_named_in_utf8_is_refused_in_one_sentence(config, told, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    Path(odd).mkdir()
    (Path(odd) / "config.toml").write_text(Path(config).read_text())
    for words in (["report", odd], ["resume", odd], ["run", config, "--out", odd], ["bench", config, "--out", odd]):
        assert "run-?' is not named in UTF-8; rename the folder, or choose another" in told(*words)
    for flag in ("--root", "--pretrained"):
        assert "run-?', which is not UTF-8; rename the file or folder" in told("run", config, flag, odd)
    with pytest.raises(FedncaError, match="a setting has text that is not UTF-8"):
        tiny(data__root=odd)


def test_a_run_works_in_a_folder_that_is_not_named_in_utf8(config, tmp_path, monkeypatch):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/work-\xff")
    (Path(odd) / "data/digits").mkdir(parents=True)  # where the data would be, if they were files
    monkeypatch.chdir(odd)
    assert main(["run", config, "--rounds", "1", "--out", "run"]) == 0
    assert main(["resume", "run"]) == 0
    assert main(["export", "run", "--to", "safetensors", "--out", os.fsdecode(b"model-\xff.safetensors")]) == 0


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(config, tmp_path):
    folder = tmp_path / "run"
    limited = (
        "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (200_000, 200_000)); from fednca.cli.app import main; "
    )
    code = f"{limited}sys.exit(main({['run', config, '--out', str(folder)]}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "cannot write" in found.stderr
    assert found.stderr.count("\n") == 1
    assert main(["resume", str(folder)]) == 0
    assert Run(folder).finished


def test_a_learner_of_another_method(config, tmp_path):
    words = ["--method", "fedavg", "--learner", "fednca-ml", "--learner.lambda2", "0.5"]
    assert main(["run", config, "--out", str(tmp_path / "run"), *words]) == 0
    run = Run(tmp_path / "run")
    assert set(run.history[0]["losses"]) == {"bce", "neg", "pos"}
    assert run.config.method.learner_options["lambda2"] == 0.5


def test_demo_compares_both_methods(capsys, tmp_path):
    small = ["--rounds", "1", "--local-epochs", "1", "--out", str(tmp_path / "demo")]
    assert main(["demo", *small]) == 0
    out = capsys.readouterr().out
    assert "training images by class and client" in out
    assert "fedavg round 1/1" in out
    assert "fednca-ml round 1/1" in out
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"fedavg", "fednca-ml", "report.html"}
    assert free_folder(tmp_path / "demo") == tmp_path / "demo-2"


def test_listings(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, expected in (
        (["methods"], "fednca-ml"),
        (["methods", "fednca-ml"], "--method.lambda1"),
        (["methods", "fedavg"], "`mlp`"),
        (["datasets"], "digits"),
        (["datasets", "digits"], "--data.train-singles"),
        (["partition", "demo"], "nine"),
    ):
        assert main(words) == 0
        assert expected in capsys.readouterr().out


def test_data_is_prepared_as_a_run_would_read_it(capsys, tmp_path):
    for number in range(9):
        Image.fromarray(np.full((20, 20, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "8.png").write_text("garbage")
    rows = [f"{number}.png,train,{'cat; dog' if number % 2 else ''}" for number in range(9)]
    (tmp_path / "mine.csv").write_text(
        "\n".join(["image,part,finding", *rows, ""]).replace("0.png,train", "0.png,test")
    )
    words = ["data", "prepare", "folder", "--root", str(tmp_path), "--image-size", "16", "--cache", str(tmp_path / "c")]
    assert main(words) == 2
    assert "labels.csv' is not there; put it there, or name another with the option `table`" in capsys.readouterr().err
    words += ["--data.table", "mine.csv", "--data.label-column", "finding", "--data.separator", ";"]
    words += ["--data.split-column", "part"]
    assert main(words) == 2
    assert "8.png' is not an image of a known format" in capsys.readouterr().err
    assert main([*words, "--on-corrupt", "skip"]) == 0
    *_, note, ready = capsys.readouterr().out.splitlines()
    assert note.startswith("images left out because they cannot be read: 1, listed in '")
    assert str(tmp_path / "8.png") in Path(note.split("'")[1]).read_text()
    assert ready == "folder is ready: 7 train, 1 test, 2 classes"
    assert len(list((tmp_path / "c").iterdir())) == 2  # a store for each split


def test_a_run_says_how_many_images_it_leaves_out(capsys, tmp_path):
    for number in range(12):
        Image.fromarray(np.full((16, 16, 3), 20 * number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "8.png").write_text("garbage")
    lines = [f"{number}.png,{number % 2},{number % 3 % 2}" for number in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,cat,dog", *lines]))
    words = ["run", "demo", "--dataset", "folder", "--root", str(tmp_path), "--cache", str(tmp_path / "c")]
    small = "--on-corrupt skip --image-size 16 --rounds 1 --clients 1 --gamma 1 --min-samples 1 --device cpu"
    assert main([*words, *small.split(), "--engine", "eager", "--out", str(tmp_path / "run")]) == 0
    assert "cannot be read: 1, listed in the run's environment.json\n" in capsys.readouterr().out
    assert Run(tmp_path / "run").environment["unreadable"][0][1] == str(tmp_path / "8.png")


def test_data_is_prepared_at_the_size_of_its_preset(capsys, tmp_path):
    words = ["data", "prepare", "digits", "--cache", str(tmp_path / "c")]
    assert main(words) == 0
    assert "digits is ready: 2000 train, 400 val, 800 test" in capsys.readouterr().out
    assert not (tmp_path / "c").exists()  # the demo's images have its size as they are


def test_a_setting_has_a_folder_of_its_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for preset in ("dermamnist-0.1", "dermamnist-0.5"):
        words = ["--dataset", "digits", "--image-size", "16"]
        assert main(["partition", preset, *words]) == 0
        place = tmp_path / "runs/bench" / preset
        place.mkdir(parents=True)
        (place / "mine.txt").touch()
        assert main(["bench", preset, "--methods", "fedavg", *words]) == 2
        assert capsys.readouterr().err.startswith(f"fednca: 'runs/bench/{preset}' holds other things than a bench")
    assert {path.name for path in (tmp_path / "runs/partitions").iterdir()} == {"dermamnist-0.1", "dermamnist-0.5"}


def test_help_shows_what_a_flag_takes(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--criterion bce|balanced|asl", "--rounds N", "--lr X", "--betas X,Y", "--clip-norm X", "--root TEXT"):
        assert f"  {flag}, " in shown


def test_help_imports_nothing_slow():
    slow = {"torch", "numpy", "timm", "sklearn", "matplotlib"}
    code = (
        f"import sys; from fednca.cli.app import main\ntry: main(['--help'])\nfinally: print({slow} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("\nset()\n")


def test_ctrl_c_says_how_to_go_on(config, capsys, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fednca.cli.progress.PlainProgress.on_round", interrupt)
    assert main(["run", config, "--out", str(tmp_path / "my run")]) == 130
    before, command, after = capsys.readouterr().err.split("`")
    assert (before, after) == ("fednca: stopped; go on with ", "\n")
    assert shlex.split(command) == ["fednca", "resume", str(tmp_path / "my run")]
    monkeypatch.undo()
    assert main(shlex.split(command)[1:]) == 0


def test_a_gpu_that_is_full_in_the_middle_of_a_run_says_how_to_go_on(config, capsys, tmp_path, monkeypatch):
    def fill(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore about it")

    with monkeypatch.context() as patched:
        patched.setattr("fednca.engines.eager.EagerEngine.predict", fill)
        assert main(["run", config, "--out", str(tmp_path / "run")]) == 2
    before, command, after = capsys.readouterr().err.split("`")
    assert before.startswith("fednca: the GPU's memory is full; ")
    assert (after, before.count("\n")) == ("\n", 0)
    assert main(shlex.split(command)[1:]) == 0
