import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torchmetrics.functional.classification import multilabel_auroc, multilabel_average_precision

from fednca.base.errors import FedncaError
from fednca.measures.metrics import at_thresholds, multilabel_metrics


def defined_mean(values):
    values = [v for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else math.nan


def reference_sklearn(p, y, thresholds):
    """Score each class over its known labels with scikit-learn, NaN where the score is not defined."""
    p, y = p.double().numpy(), y.numpy()
    limits = np.broadcast_to(np.asarray(thresholds, dtype=p.dtype), y.shape)
    auc, f1, ap = [], [], []
    for c in range(y.shape[1]):
        k = y[:, c] >= 0
        truth, score, claim = y[k, c], p[k, c], p[k, c] > limits[k, c]
        has_positive, has_both = 1 in truth, {0, 1} <= set(truth)
        auc.append(roc_auc_score(truth, score) if has_both else math.nan)
        f1.append(f1_score(truth, claim) if has_positive else math.nan)
        ap.append(average_precision_score(truth, score) if has_positive else math.nan)
    k = y >= 0
    truth, score, claim = y[k], p[k], (p > limits)[k]
    return {
        "macro_auc": defined_mean(auc),
        "micro_auc": roc_auc_score(truth, score) if {0, 1} <= set(truth) else math.nan,
        "macro_f1": defined_mean(f1),
        "micro_f1": f1_score(truth, claim) if 1 in truth else math.nan,
        "mean_ap": defined_mean(ap),
        "class_auc": auc,
        "class_f1": f1,
        "class_ap": ap,
    }


def assert_matches_sklearn(p, y, thresholds=0.5, metrics=None):
    metrics = metrics or multilabel_metrics(p, y, thresholds)
    for name, expected in reference_sklearn(p, y, thresholds).items():
        assert getattr(metrics, name) == pytest.approx(
            tuple(expected) if isinstance(expected, list) else expected, abs=1e-12, nan_ok=True
        ), name


def random_case(n, num_classes, prevalence=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, num_classes, generator=generator) < prevalence).long()
    p = torch.rand(n, num_classes, generator=generator) * 0.8 + 0.2 * y
    return p, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_case(dtype):
    p, y = random_case(500, 7)
    assert_matches_sklearn(p.to(dtype), y)


def test_agrees_with_torchmetrics_up_to_its_float32():
    p, y = random_case(500, 7)
    metrics = multilabel_metrics(p, y)
    assert metrics.class_auc == pytest.approx(multilabel_auroc(p, y, 7, average="none").tolist(), abs=1e-5)
    assert metrics.class_ap == pytest.approx(multilabel_average_precision(p, y, 7, average="none").tolist(), abs=1e-5)


def test_ties_are_shared():
    p, y = random_case(300, 5)
    assert_matches_sklearn((p * 4).round() / 4, y)
    assert_matches_sklearn(torch.full_like(p, 0.5), y)


def test_per_class_thresholds():
    p, y = random_case(300, 5)
    assert_matches_sklearn(p, y, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.99]))


def test_f1_moves_to_other_thresholds_and_all_else_stays():
    p, y = random_case(300, 5)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = -1
    thresholds = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.99], dtype=torch.float64)
    assert_matches_sklearn(p, y, thresholds, at_thresholds(multilabel_metrics(p, y), p, y, thresholds))


def test_unknown_labels_leave_every_score():
    p, y = random_case(300, 5)
    y[torch.rand(300, 5, generator=torch.Generator().manual_seed(1)) < 0.4] = -1
    assert_matches_sklearn(p, y)
    hidden = p.where(y >= 0, 1.0)
    assert multilabel_metrics(hidden, y) == multilabel_metrics(p, y)


def test_float_labels_count_like_integers():
    p, y = random_case(50, 3)
    assert multilabel_metrics(p, y.float()) == multilabel_metrics(p, y)


def test_undefined_classes_are_left_out_and_shown():
    p, y = random_case(100, 5)
    y[:, 0], y[:, 1], y[:, 2] = 0, 1, -1
    assert_matches_sklearn(p, y)
    metrics = multilabel_metrics(p, y)
    assert [math.isnan(v) for v in metrics.class_auc] == [True, True, True, False, False]
    assert [math.isnan(v) for v in metrics.class_f1] == [True, False, True, False, False]
    assert metrics.class_ap[1] == 1.0


def test_without_any_image_only_nan_remains():
    assert_matches_sklearn(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int8))


def test_without_any_positive_only_nan_remains():
    metrics = multilabel_metrics(torch.rand(4, 2), torch.zeros(4, 2))
    assert all(value is None or value == [None, None] for value in metrics.as_dict().values())


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_small_cases_of_every_kind(data, n, num_classes):
    def grid(values):
        rows = st.lists(st.sampled_from(values), min_size=num_classes, max_size=num_classes)
        return torch.tensor(data.draw(st.lists(rows, min_size=n, max_size=n)))

    assert_matches_sklearn(grid([0.0, 0.25, 0.5, 0.75, 1.0]), grid([-1, 0, 1]))


def test_the_threshold_itself_is_negative():
    metrics = multilabel_metrics(torch.tensor([[0.5], [0.6]]), torch.tensor([[0], [1]]))
    assert metrics.micro_f1 == 1.0


def test_dict_is_strict_json():
    p, y = random_case(20, 2)
    y[:, 0] = 0
    values = json.loads(json.dumps(multilabel_metrics(p, y).as_dict(), allow_nan=False))
    assert values["class_auc"][0] is None
    assert values["macro_f1"] == multilabel_metrics(p, y).macro_f1


@pytest.mark.parametrize("bad", [1.5, -0.1, math.nan])
def test_values_that_are_no_probabilities_are_refused(bad):
    with pytest.raises(FedncaError, match=r"outside \[0, 1\]"):
        multilabel_metrics(torch.tensor([[bad], [0.5]]), torch.tensor([[0], [1]]))
