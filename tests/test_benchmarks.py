"""The benchmark of rounds compares rows that do the same work; a real run says what that work is."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny
from rich.console import Console

from fednca.base.errors import FedncaError
from fednca.runs import train

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    """Import a module of the benchmarks, which are no package of ours."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.parametrize("method", ["fedavg", "fednca-ml"])
def test_rows_end_with_the_weights_of_a_run(bench, tmp_path, method):
    config = tiny(method__name=method, workers=2, train__precision="float64")
    expected = train(config, tmp_path / "run").state("last").server.weights
    rows, work = bench("peers.rows").ROWS, bench("peers.work").load_work(config)
    for name in ("plain", "eager", "processes"):
        outcome = rows[name].run(work)
        assert outcome.seconds > 0
        for tensor, wanted in expected.items():
            torch.testing.assert_close(outcome.weights[tensor], wanted, rtol=1e-6, atol=1e-6, msg=f"{name}: {tensor}")


def test_steps_and_images_are_those_of_the_batches(bench):
    tools = bench("peers.work")
    work = tools.load_work(tiny(train__local_epochs=2, train__participation=0.67))
    seen = [
        len(images)
        for number in work.rounds
        for client in work.chosen(number)
        for batches in tools.epochs(work.shards[client], work.config, number, client)
        for images, _ in batches
    ]
    assert work.count() == (len(seen), sum(seen))


def test_a_client_sent_to_another_process_has_the_same_batches(bench, tmp_path):
    work, parcel, tools = bench("peers.work").load_work(tiny()), bench("peers.parcel"), bench("peers.work")
    parcel.save(work, tmp_path)
    there = parcel.load(str(tmp_path))
    assert len(there.shards) == len(work.shards)
    for client, (shard, sent) in enumerate(zip(work.shards, there.shards, strict=True)):
        own, others = (tools.epochs(each, work.config, 1, client) for each in (shard, sent))
        for (images, labels), (same_images, same_labels) in zip(next(own), next(others), strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)


@pytest.mark.parametrize("row", ["pfl", "pfl-torchrun", "pfl-forked", "flower"])
def test_peers_that_are_not_installed_say_so(bench, monkeypatch, row):
    rows, work = bench("peers.rows").ROWS, bench("peers.work").load_work(tiny())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FedncaError, match=r"is not installed"):
        rows[row].run(work)


def test_a_row_that_cannot_run_is_left_out_with_its_reason(bench):
    found = bench("peers.launch").launch("limit", tiny(), 1)
    assert "CUDA" in found.left_out


def test_a_row_in_its_own_process_scales_a_federation_of_random_images(bench):
    config = tiny(partition__clients=5, train__participation=0.4, train__rounds=2, train__batch_size=16)
    found = bench("peers.launch").launch("eager", config, 1, synthetic=True, watch=True)
    assert not found.left_out
    assert found.images == 2 * 2 * 64  # rounds, clients in each, their images
    assert found.steps == 2 * 2 * 4
    assert found.memory > 10 * 2**20
    assert found.weights


def test_the_distance_is_the_largest_of_any_tensor(bench):
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([2.0]), "steps": torch.tensor(7)}
    weights = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.0]), "steps": torch.tensor(9)}
    assert bench("peers.work").largest_distance(weights, reference) == pytest.approx(0.5)


def test_a_row_is_described_by_its_best_repeat_beside_the_plain_loop(bench):
    measured, rounds = bench("peers.launch").Measured, bench("rounds")
    runs = {
        (row, 1): [measured(seconds=seconds, steps=200, images=6000) for seconds in several]
        for row, several in {"plain": (11.0, 10.0), "processes": (4.0, 5.0)}.items()
    }
    first = {row: measured(memory=2**20) for row in ("plain", "processes")}
    line = rounds.describe("processes", ("processes", 1), first, runs, None)
    assert line["seconds"] == 4
    assert line["ms_per_client_step"] == pytest.approx(20)
    assert line["times_plain"] == pytest.approx(2.5)
    assert line["images_per_second"] == pytest.approx(1500)
    assert line["memory"] == 2**20
    assert rounds.describe("processes", ("processes", 1), {}, runs, None) == line | {"memory": None}


def test_settings_are_changed_by_their_path(bench):
    configure = bench("rounds").configure
    config = configure("demo", "fednca-ml", 4, ["model.backbone=resnet18", "data.image_size=64"])
    assert (config.model.backbone, config.data.image_size, config.train.rounds) == ("resnet18", 64, 4)
    with pytest.raises(FedncaError, match=r"model.backbon"):
        configure("demo", "fedavg", 1, ["model.backbon=resnet18"])


def test_training_is_subtracted_from_the_rounds_between_whose_beginnings_it_lies(bench):
    tools = bench("flower_rounds")
    workers = [[(1.0, 2.0), (6.0, 7.5)], [(1.0, 1.5), (3.0, 4.0), (9.5, 20.0)]]
    rounds = tools.cut([0.0, 5.0, 9.0, 21.0], workers, every=2)
    assert [each.seconds for each in rounds] == [5, 4, 12]
    assert [each.beyond for each in rounds] == [3.5, 2.5, 1.5]  # the first worker, busy for 1 s, did not delay round 1
    assert [each.judged for each in rounds] == [False, True, False]


def test_of_several_repeats_the_one_with_the_least_beyond_training_counts(bench):
    tools = bench("flower_rounds")
    slow = [tools.Round(4.0, 1.0, False), tools.Round(9.0, 0.0, True), tools.Round(5.0, 1.0, False)]
    fast = [tools.Round(6.0, 4.0, False), tools.Round(9.5, 0.0, True), tools.Round(5.0, 3.0, False)]
    assert tools.best_repeat([slow, fast], judged=False) == (5.5, 2.0)
    assert tools.best_repeat([slow, fast], judged=True) == (9.0, 9.0)


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_a_folder_without_images_is_one_sentence(bench, tmp_path, monkeypatch, capsys, place):
    monkeypatch.setattr("sys.argv", ["store.py", str(tmp_path / place)])
    with pytest.raises(SystemExit, match="2"):
        bench("store").main()
    assert capsys.readouterr().err.endswith("holds no file that ends in .jpg, .jpeg, .png\n")


@pytest.mark.parametrize("script", ["rounds", "steps"])
@pytest.mark.parametrize("flags", [["--repeats", "0"], ["--repeats", "many"], ["--json", "nowhere/numbers.json"]])
def test_a_wrong_flag_is_refused_before_anything_is_measured(bench, monkeypatch, capsys, script, flags):
    monkeypatch.setattr("sys.argv", [f"{script}.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        bench(script).main()
    said = capsys.readouterr().err
    assert f"error: argument {flags[0]}: give a " in said
    assert said.endswith(f", not '{flags[1]}'\n")


def test_a_reason_is_printed_with_its_brackets(bench, capsys):
    rounds, found = bench("rounds"), bench("peers.launch").Measured(left_out="install '.[bench]'")
    assert rounds.is_left_out("pfl", found, Console())
    assert capsys.readouterr().out == "pfl: left out, install '.[bench]'\n"


def test_rows_none_of_which_can_be_run_are_one_sentence(bench, monkeypatch):
    rounds, found = bench("rounds"), bench("peers.launch").Measured(left_out="CUDA graphs need a CUDA device")
    monkeypatch.setattr(rounds, "launch", lambda *_, **__: found)
    for brief in (True, False):
        with pytest.raises(FedncaError, match="none of these rows can run here"):
            rounds.compare(tiny(), ["graphs"], 1, Console(), brief=brief)


def test_steps_without_a_gpu_are_one_sentence():
    command = [sys.executable, str(BENCHMARKS / "steps.py"), "--sizes", "64"]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: device 'cuda' is not there: torch finds 0 CUDA devices\n")
