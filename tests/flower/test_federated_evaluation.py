"""Metrics and thresholds from the sites' histograms against those of the pooled scores."""

import pytest
import torch
from helpers import tiny
from in_process import simulated
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fednca.config import CalibrateConfig
from fednca.flower.config import ServerConfig
from fednca.flower.records import from_arrays
from fednca.flower.server import serve
from fednca.measures.histograms import expand, judge_histograms, metrics_of
from fednca.measures.metrics import multilabel_metrics
from fednca.measures.thresholds import score_histograms
from fednca.runs import Run, train


def scores_and_labels(images=400, classes=4, seed=0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (images, classes), generator=rng)
    scores = (torch.rand(images, classes, generator=rng) + labels * 0.4) / 1.4
    labels[torch.rand(images, classes, generator=rng) < 0.2] = -1
    return scores, labels


def test_expanded_histograms_have_the_histograms_they_came_from():
    config = CalibrateConfig(bins=50)
    counted = score_histograms(*scores_and_labels(), config)
    assert torch.equal(score_histograms(*expand(counted), config), counted)


@pytest.mark.parametrize("threshold", [0.5, 0.3])
def test_metrics_of_histograms_are_those_of_the_scores(threshold):
    scores, labels = scores_and_labels()
    found = metrics_of(score_histograms(scores, labels, CalibrateConfig(bins=1000)), threshold)
    for c in range(scores.shape[1]):
        known = labels[:, c] >= 0
        y, p = labels[known, c], scores[known, c]
        assert found["class_f1"][c] == pytest.approx(f1_score(y, p > threshold))
        assert found["class_auc"][c] == pytest.approx(roc_auc_score(y, p), abs=2e-3)
        assert found["class_ap"][c] == pytest.approx(average_precision_score(y, p), abs=2e-3)
    exact = multilabel_metrics(scores, labels, threshold)
    assert found["micro_auc"] == pytest.approx(exact.micro_auc, abs=2e-3)


def test_sites_are_judged_together_and_one_by_one():
    config = CalibrateConfig(bins=1000)
    scored = {  # four different ones, two parts of two sites
        site: {part: scores_and_labels(150, seed=10 * far + near) for near, part in enumerate(["val", "test"])}
        for far, site in enumerate(["north", "south"])
    }
    sent = {site: {part: score_histograms(*each, config) for part, each in own.items()} for site, own in scored.items()}
    thresholds, record = judge_histograms(sent, config)
    for part in ("val", "test"):
        everybody = [torch.cat(each) for each in zip(*(own[part] for own in scored.values()), strict=True)]
        assert record[part]["macro_f1"] == pytest.approx(multilabel_metrics(*everybody).macro_f1)
        calibrated = multilabel_metrics(*everybody, thresholds).macro_f1
        assert record["calibrated"][part]["macro_f1"] == pytest.approx(calibrated)
        for site, own in scored.items():
            found = record["by_site"][site]
            assert found[part]["macro_f1"] == pytest.approx(multilabel_metrics(*own[part]).macro_f1)
            calibrated = multilabel_metrics(*own[part], thresholds).macro_f1
            assert found["calibrated"][part]["macro_f1"] == pytest.approx(calibrated)
            assert not any(name.startswith("class_") for name in found[part])


def test_a_class_that_nobody_knows_has_no_metrics():
    found = metrics_of(torch.zeros(2, 3, 11, dtype=torch.int64))
    assert found["macro_auc"] is None
    assert found["class_f1"] == [None] * 3


@pytest.mark.parametrize("name", ["fedavg", "spherefed"])
def test_a_run_chooses_the_round_and_the_thresholds_that_the_engine_chooses(name, tmp_path):
    config = tiny(method__name=name, train__rounds=4, train__lr=5e-3)
    expected = train(config, tmp_path / "engine")
    (tmp_path / "run.toml").write_text(config.to_toml())
    settings = ServerConfig(config=str(tmp_path / "run.toml"), out=str(tmp_path / "flower"))
    found = Run(serve(simulated(), settings))
    for mine, reference in zip(found.history, expected.history, strict=True):
        for part in ("val", "test"):
            assert mine[part]["class_f1"] == pytest.approx(reference[part]["class_f1"], nan_ok=True)
            assert mine[part]["macro_auc"] == pytest.approx(reference[part]["macro_auc"], abs=0.01)
    for which in ("val", "last"):
        assert found.results[which]["round"] == expected.results[which]["round"]
        mine, reference = (run.results[which]["calibrated"] for run in (found, expected))
        assert mine["thresholds"] == reference["thresholds"]
        assert mine["test"]["class_f1"] == pytest.approx(reference["test"]["class_f1"], nan_ok=True)
    mine, reference = (run.state("final") for run in (found, expected))
    torch.testing.assert_close(mine.server.weights, reference.server.weights, rtol=0, atol=1e-6)
    assert torch.equal(mine.thresholds, reference.thresholds)
    images = torch.zeros(1, 3, 16, 16)
    torch.testing.assert_close(found.model()(images).logits, expected.model()(images).logits, rtol=0, atol=1e-5)


def test_small_counts_do_not_leave_a_site(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1).replace({"calibrate.min_count": 3, "calibrate.bins": 4})
    (tmp_path / "run.toml").write_text(config.to_toml())
    settings = ServerConfig(config=str(tmp_path / "run.toml"), out=str(tmp_path / "flower"))
    grid = simulated()
    serve(grid, settings)
    counts = torch.stack(
        [
            from_arrays(reply.content["histograms"])["val"]
            for message, reply in grid.sent
            if message.metadata.message_type == "evaluate"
        ]
    )
    assert counts.max() >= 3
    assert not ((counts > 0) & (counts < 3)).any()
