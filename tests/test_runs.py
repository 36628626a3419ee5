"""Runs as folders: what they hold, and that no interruption changes how they end."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Stop, StopAfter, tiny
from older_runs import age
from PIL import Image
from sklearn.metrics import f1_score

import fednca
import fednca.base.files
import fednca.runs.checkpoint
import fednca.runs.folder
import fednca.runs.history
import fednca.runs.training
from fednca.base.errors import FedncaError, RunFailedError
from fednca.config import load_config
from fednca.engines.scoring import predict
from fednca.engines.workplace import build_workplace
from fednca.measures.metrics import multilabel_metrics
from fednca.measures.thresholds import pick_thresholds, score_histograms
from fednca.methods.contract import Server
from fednca.models.heads import constants_of
from fednca.runs import Run, resume, train
from fednca.runs.callbacks import Callback
from fednca.runs.checkpoint import State
from fednca.runs.history import select_rounds
from fednca.runs.training import to_device

CONFIG = tiny(train__rounds=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(CONFIG, tmp_path_factory.mktemp("runs") / "whole")


def timeless(history):
    clocks = {"seconds", "train_seconds", "samples_per_second"}
    return [{key: value for key, value in record.items() if key not in clocks} for record in history]


def assert_same_run(found: Run, expected: Run):
    for which in ("last", "best", "final"):
        a, b = found.state(which), expected.state(which)
        assert (a.round, a.best) == (b.round, b.best)
        torch.testing.assert_close(a.server.weights, b.server.weights, rtol=0, atol=0)
    assert found.state("final").thresholds.tolist() == expected.state("final").thresholds.tolist()
    assert timeless(found.history) == timeless(expected.history)
    assert found.results == expected.results


def test_the_package_lists_what_it_offers():
    code = "import fednca; print(*dir(fednca))"  # in a process where nothing has been looked up yet
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"Run", "load_config", "resume", "train"} <= set(listed)


def test_a_mistake_that_shows_before_the_first_round_leaves_the_place_free(tmp_path):
    with pytest.raises(FedncaError, match="CUDA graphs need a CUDA device"):
        train(CONFIG.replace({"engine": "graphs", "device": "cpu"}), tmp_path / "run")
    assert train(CONFIG.replace({"train.rounds": 1}), tmp_path / "run").finished


def test_a_run_knows_everything_it_did(whole):
    run = fednca.Run(whole.folder)
    assert run.finished
    assert [record["round"] for record in run.history] == [1, 2, 3, 4]
    assert set(run.history[0]["losses"]) == {"bce", "neg", "pos"}
    assert run.config.method.options["lambda1"] == 1.0  # resolved: this model starts from scratch
    assert run.config.data.options["train_singles"] == 12
    assert run.environment["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert load_config(run.folder / "config.toml") == run.config
    assert not list(run.folder.glob("*.partial"))


def test_the_best_checkpoint_is_the_model_whose_metrics_are_reported(whole):
    place = build_workplace(whole.config, whole.method, whole.federation, whole.model("best"), torch.device("cpu"))
    found = multilabel_metrics(
        predict(place.method, place.model, place.test, 256, whole.config.train), place.test.labels
    )
    assert found.as_dict() == whole.results["val"]["test"]
    assert whole.state("best").round == whole.results["val"]["round"]


def test_thresholds_of_every_round_are_those_of_the_best_f1_on_validation_images(whole):
    place = build_workplace(whole.config, whole.method, whole.federation, whole.model("last"), torch.device("cpu"))
    found = whole.history[-1]["calibrated"]
    thresholds = torch.tensor(found["thresholds"], dtype=torch.float64)
    for name, shard in (("val", place.val), ("test", place.test)):
        scores = predict(place.method, place.model, shard, 256, whole.config.train)
        assert found[name] == multilabel_metrics(scores, shard.labels, thresholds).as_dict()
        f1 = f1_score(shard.labels, scores > thresholds, average="macro")
        assert found[name]["macro_f1"] == pytest.approx(f1, abs=1e-12)
    bins = torch.linspace(0, 1, whole.config.calibrate.bins + 1, dtype=torch.float64)[:-1]
    val = predict(place.method, place.model, place.val, 256, whole.config.train)
    best = [max(f1_score(place.val.labels[:, c], val[:, c] > each) for each in bins) for c in range(val.shape[1])]
    assert found["val"]["class_f1"] == pytest.approx(best, abs=1e-12)
    assert whole.results["last"]["calibrated"] == found
    assert whole.state("final").thresholds.tolist() == whole.results["val"]["calibrated"]["thresholds"]


def test_counts_that_clients_withhold_decide_no_threshold(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1).replace({"calibrate.min_count": 5, "calibrate.bins": 50})
    run = train(config, tmp_path / "run")
    place = build_workplace(run.config, run.method, run.federation, run.model("last"), torch.device("cpu"))
    scores = predict(place.method, place.model, place.val, 256, run.config.train)
    own = zip(scores.split(place.val_sizes), place.val.labels.split(place.val_sizes), strict=True)
    sent = sum(score_histograms(*each, run.config.calibrate) for each in own)
    together = score_histograms(scores, place.val.labels, run.config.calibrate)
    expected, others = (pick_thresholds(counts, run.config.calibrate).tolist() for counts in (sent, together))
    assert run.history[0]["calibrated"]["thresholds"] == expected != others


def test_the_reported_loss_is_that_of_the_clients_weighted_by_their_images(whole):
    sizes = [len(rows) for rows in whole.federation.train.partition.clients]
    record = whole.history[2]
    each = [record["clients"][str(k)]["pos"] for k in range(3)]
    assert record["losses"]["pos"] == pytest.approx(np.average(each, weights=sizes), rel=1e-12)


def test_three_ways_to_choose_a_round():
    def record(number, val, test):
        return {"round": number, "val": {"macro_f1": val}, "test": {"macro_f1": test}}

    history = [record(1, 0.2, 0.9), {"round": 2}, record(3, 0.5, 0.4), record(4, None, None), record(5, 0.5, 0.3)]
    chosen = select_rounds(history, CONFIG)
    assert {name: result["round"] for name, result in chosen.items()} == {"val": 5, "paper": 1, "last": 5}
    assert select_rounds([], CONFIG) == {}


def test_of_equal_rounds_the_later_one_is_kept_and_reported(tmp_path):
    run = train(tiny(method__name="fedavg", train__lr=1e-12, model__norm="group"), tmp_path / "run")  # learns nothing
    assert len({record["val"]["macro_f1"] for record in run.history}) == 1
    assert run.state("best").round == run.results["val"]["round"] == 3


def test_evaluation_every_second_round_and_after_the_last(tmp_path):
    run = train(tiny(train__rounds=3, evaluate__every=2), tmp_path / "run")
    assert ["test" in record for record in run.history] == [False, True, True]


class Dice:
    """Lets a number of writes pass and stops the process at the next, before or after it takes place."""

    def __init__(self, monkeypatch, allowed, after):
        self.left = allowed
        for module, name in (
            (fednca.runs.training, "write_atomic"),
            (fednca.runs.training, "append_line"),
            (fednca.runs.history, "write_atomic"),
            (fednca.runs.checkpoint, "write_atomic"),
        ):
            monkeypatch.setattr(module, name, self.guard(getattr(fednca.base.files, name), after))

    def guard(self, write, after):
        def guarded(path, content):
            self.left -= 1
            if self.left < 0 and not after:
                raise Stop
            write(path, content)
            if self.left < 0:
                raise Stop

        return guarded


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("allowed", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 17])
def test_a_stop_at_any_write_is_mended_by_resume(whole, tmp_path, monkeypatch, allowed, after):
    with monkeypatch.context() as patch:
        Dice(patch, allowed, after)
        with pytest.raises(Stop):
            train(CONFIG, tmp_path / "run")
    assert_same_run(resume(tmp_path / "run"), whole)


@pytest.mark.parametrize("renamed", [1, 2])
def test_a_stop_while_the_best_model_is_renamed_leaves_nothing_behind(whole, tmp_path, monkeypatch, renamed):
    replace, left = Path.replace, [renamed]

    def counted(path, target):
        left[0] -= path.stem == "next"
        if left[0] < 0:
            raise Stop
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counted)
        with pytest.raises(Stop):
            train(CONFIG, tmp_path / "run")
    assert_same_run(resume(tmp_path / "run"), whole)
    for which in ("last", "best", "final"):
        name = f"{which}.json"
        assert (tmp_path / "run" / name).read_text() == (whole.folder / name).read_text()
    assert not list((tmp_path / "run").glob("next.*"))


def test_a_half_written_line_of_history_is_mended(whole, tmp_path):
    with pytest.raises(Stop):
        train(CONFIG, tmp_path / "run", [StopAfter(2)])
    with (tmp_path / "run/history.jsonl").open("a") as file:
        file.write('{"round": 3, "los')
    assert_same_run(resume(tmp_path / "run"), whole)


def test_a_stop_between_rarer_checkpoints_loses_no_round_and_a_kill_is_mended(tmp_path):
    config, last = tiny(train__rounds=5, train__checkpoint_every=2), tmp_path / "run/last.safetensors"
    with pytest.raises(Stop):
        train(config, tmp_path / "run", [StopAfter(2)])
    before = last.read_bytes()
    with pytest.raises(Stop):
        resume(tmp_path / "run", [StopAfter(3)])
    assert Run(tmp_path / "run").state("last").round == 3
    last.write_bytes(before)  # as a kill would leave it, with a round more in history
    assert_same_run(resume(tmp_path / "run"), train(config, tmp_path / "whole"))


def write_pictures(folder):
    """Thirty noisy pictures of two classes with a table."""
    rng, rows = np.random.default_rng(0), ["image,split,a,b"]
    (folder / "images").mkdir(parents=True)
    for number in range(30):
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(folder / f"images/{number}.png")
        part = "test" if number % 5 == 0 else "val" if number % 5 == 1 else "train"
        rows.append(f"{number}.png,{part},{number // 5 % 2},{number // 3 % 2}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


def test_a_run_finds_its_relative_data_from_anywhere(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    write_pictures(home / "pictures")
    elsewhere.mkdir()
    places = {"data__name": "folder", "data__options": {}, "data__root": "pictures", "data__cache": "cache"}
    config = tiny(**places, partition__clients=2, partition__gamma=1.0, partition__min_samples=2)
    monkeypatch.chdir(home)
    whole = train(config, "whole")
    with pytest.raises(Stop):
        train(config, "run", [StopAfter(1)])
    monkeypatch.chdir(elsewhere)
    run, whole = resume("../home/run"), Run(home / "whole")
    assert run.config.data.root == "pictures"
    assert_same_run(run, whole)
    assert list(elsewhere.iterdir()) == []
    home.rename(tmp_path / "moved")  # then the folder counts in which one is
    monkeypatch.chdir(tmp_path / "moved")
    assert Run("run").federation.dataset.test.labels.shape == (6, 2)


class Snapshot(Callback):
    """Copies a run's folder after a round, as a kill would leave it."""

    def __init__(self, after, place):
        self.after, self.place = after, place

    def on_start(self, run, federation, rounds_done):
        self.folder = run.folder

    def on_round(self, record, best):
        if record.number == self.after:
            shutil.copytree(self.folder, self.place)


def test_a_killed_run_that_goes_another_way_ends_with_the_model_of_its_results(tmp_path):
    config = tiny(train__rounds=6, train__checkpoint_every=3, evaluate__select="macro_auc")
    whole = train(config, tmp_path / "whole", [Snapshot(5, tmp_path / "run")])
    written_out = tmp_path / "run/config.toml"
    text = written_out.read_text()
    written_out.write_text(text.replace(f"lr = {config.train.lr}", "lr = 1.0"))  # from which nothing good comes
    assert written_out.read_text() != text
    assert whole.results["val"]["round"] > 3
    run = resume(tmp_path / "run")
    assert run.results["val"]["round"] == run.state("final").round <= 3


def test_a_finished_run_with_more_rounds_is_not_finished_until_they_are_done(tmp_path):
    run = train(tiny(train__rounds=2), tmp_path / "run")
    path = run.folder / "config.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 4"))
    with pytest.raises(Stop):
        resume(run.folder, [StopAfter(3)])
    assert not Run(run.folder).finished
    assert not (run.folder / "final.safetensors").exists()
    assert_same_run(resume(run.folder), train(tiny(train__rounds=4), tmp_path / "whole"))


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    run = train(CONFIG, tmp_path / "run")
    before = (run.folder / "last.safetensors").read_bytes()
    assert_same_run(resume(run.folder), whole)
    assert (run.folder / "last.safetensors").read_bytes() == before


def test_kill_minus_nine_at_random_moments(tmp_path):
    config = tiny(train__rounds=80)
    path, folder = tmp_path / "config.toml", tmp_path / "killed"
    path.write_text(config.to_toml())
    dice = random.Random(time.time_ns())  # any moment must do
    arguments = ["run", str(path), "--out", str(folder)]
    for kill in range(3):
        code = "import torch; torch.set_num_threads(1); from fednca.cli.app import main; raise SystemExit(main({}))"
        code = code.format(arguments)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        before = written(folder)
        while process.poll() is None and written(folder) == before:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Run(folder).finished, f"kill {kill} came too late to show anything"
        arguments = ["resume", str(folder)]
    assert_same_run(resume(folder), train(config, tmp_path / "whole"))


def written(folder):
    """Return when the run wrote something last, the lock apart."""
    return max((path.stat().st_mtime_ns for path in folder.glob("[!.]*")), default=0)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    config = tiny(train__optimizer="sgd", train__lr=1e30, train__batch_size=8)
    with pytest.raises(RunFailedError, match=r"round 1, client 0: the loss term '(bce|neg|pos)' became (nan|inf)"):
        train(config, tmp_path / "run")
    assert Run(tmp_path / "run").state("last").round == 0
    written_out = tmp_path / "run" / "config.toml"
    written_out.write_text(written_out.read_text().replace("lr = 1e+30", "lr = 0.01"))
    assert_same_run(resume(tmp_path / "run"), train(config.replace({"train.lr": 0.01}), tmp_path / "whole"))


def test_a_server_step_that_is_not_finite_names_its_round(tmp_path):
    config = tiny(method__name="fedadam", method__options={"server_lr": 1e38}, train__rounds=4)
    with pytest.raises(RunFailedError, match=r"round \d, (after aggregation|evaluation|client \d): .*not finite"):
        train(config, tmp_path / "run")


def test_a_folder_in_use_is_refused(tmp_path):
    with pytest.raises(Stop):
        train(CONFIG, tmp_path / "run", [StopAfter(1)])
    with fednca.runs.folder.locked(tmp_path / "run"), pytest.raises(FedncaError, match="in use by another process"):
        resume(tmp_path / "run")


def test_other_data_than_the_partitions_is_refused(tmp_path):
    run = train(CONFIG, tmp_path / "run")
    text = (run.folder / "config.toml").read_text()
    (run.folder / "config.toml").write_text(text.replace("train_singles = 12", "train_singles = 13"))
    with pytest.raises(FedncaError, match="other labels"):
        resume(run.folder)


OLDER = [("fedavg", None), ("fedlgt", None), ("scaffold", "fednca-ml"), ("fedavg", "spherefed"), ("fedadam", None)]


@pytest.mark.parametrize(("method", "learner"), OLDER)
def test_a_run_of_an_older_version_is_read_and_goes_on(tmp_path, method, learner):
    config = tiny(method__name=method, method__learner=learner)
    fresh = train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", [StopAfter(2)])
    older, finished = age(Run(tmp_path / "run")), age(Run(shutil.copytree(fresh.folder, tmp_path / "finished")))
    assert older.method == finished.method == fresh.method
    for which in ("best", "last"):
        assert_same_model(older.model(which), older.state(which), fresh.model("last"))
    assert_same_model(finished.model("final"), fresh.state("final"), fresh.model("final"))
    assert_same_run(resume(older.folder), fresh)
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    resume(finished.folder)
    assert {path.name: path.read_bytes() for path in finished.folder.iterdir()} == before


def assert_same_model(model, state, like):
    """Compare a model with a checkpoint's weights, and what it has besides them with another model."""
    torch.testing.assert_close(dict(model.state_dict()), state.server.weights, rtol=0, atol=0)
    torch.testing.assert_close(constants_of(model), constants_of(like), rtol=0, atol=0)


def test_an_older_run_whose_best_model_is_not_closed_is_refused_unless_it_is_finished(tmp_path):
    config = tiny(method__name="spherefed")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", [StopAfter(2)])
    age(Run(tmp_path / "run"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(FedncaError, match="begun by an older fednca, which kept its best model without the closing"):
        resume(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    finished = age(train(config, tmp_path / "finished"))
    final = finished.state("final")
    assert resume(finished.folder).state("final").thresholds.tolist() == final.thresholds.tolist()
    torch.testing.assert_close(finished.state("final").server.weights, final.server.weights, rtol=0, atol=0)


def test_history_is_json_without_nan(whole):
    text = (whole.folder / "history.jsonl").read_text()
    assert "NaN" not in text
    assert all(json.loads(line) for line in text.splitlines())


def test_only_what_the_server_holds_goes_to_the_device_when_a_run_is_resumed():
    own = {"control": torch.ones(2)}
    state = to_device(State(3, Server({"w": torch.ones(2)}, {"m": torch.ones(2)}), {7: own}), torch.device("meta"))
    assert state.server.weights["w"].is_meta
    assert state.server.state["m"].is_meta
    assert state.clients == {7: own}
    assert not state.clients[7]["control"].is_meta  # as many as there are clients, of whom few may take part
