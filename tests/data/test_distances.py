import math
from itertools import combinations

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from fednca.data.distances import cooccurrence_distance, label_distance, missing_classes


def reference(counts):
    """SciPy's Jensen-Shannon distance, which normalises by itself, averaged over pairs of non-empty rows."""
    rows = [row for row in counts if row.sum()]
    return np.mean([jensenshannon(p, q, base=2) for p, q in combinations(rows, 2)])


@pytest.mark.parametrize(("clients", "classes"), [(2, 3), (10, 14), (7, 80)])
def test_the_label_distance_is_scipys_over_all_pairs(clients, classes):
    rng = np.random.default_rng(clients)
    counts = rng.integers(0, 50, (clients, classes)) * (rng.random((clients, classes)) < 0.6)
    assert label_distance(counts) == pytest.approx(reference(counts), rel=1e-9)


def test_clients_without_labels_are_left_out():
    counts = np.array([[4, 1, 0], [0, 0, 0], [1, 0, 7]])
    assert label_distance(counts) == pytest.approx(jensenshannon(counts[0], counts[2], base=2))


@pytest.mark.parametrize(
    ("counts", "distance"),
    [([[1, 3], [10, 30], [2, 6]], 0), ([[5, 0, 0], [0, 2, 0], [0, 0, 9]], 1), ([[1, 0], [0, 1], [1, 0]], 2 / 3)],
)
def test_alike_is_zero_and_apart_is_one(counts, distance):
    assert label_distance(np.array(counts)) == pytest.approx(distance, abs=1e-7)


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, 2], [0, 0]], [[0, 0], [0, 0]]])
def test_fewer_than_two_clients_have_no_distance(counts):
    assert math.isnan(label_distance(np.array(counts)))


def test_missing_classes_are_counted_per_client():
    assert missing_classes(np.array([[1, 0, 0], [2, 3, 4]])) == 1.0


def test_the_cooccurrence_distance_is_scipys_over_counted_pairs():
    rng = np.random.default_rng(0)
    clients = [((rng.random((n, 6)) < 0.3) - (rng.random((n, 6)) < 0.1).astype(int)) for n in (40, 25, 60)]
    clients = [np.clip(own, -1, 1).astype(np.int8) for own in clients]
    counts = np.zeros((3, 15))
    for k, own in enumerate(clients):
        for row in own:
            for pair in combinations(np.flatnonzero(row == 1), 2):
                counts[k, list(combinations(range(6), 2)).index(pair)] += 1
    assert cooccurrence_distance(clients) == pytest.approx(reference(counts), rel=1e-9)


def test_clients_whose_images_have_one_label_each_do_not_count():
    alone, both = np.eye(3, dtype=np.int8), np.array([[1, 1, 0]], np.int8)
    other = np.array([[0, 1, 1], [1, 1, 0]], np.int8)
    assert cooccurrence_distance([alone, both, other]) == pytest.approx(jensenshannon([1, 0, 0], [1, 0, 1], base=2))
    assert math.isnan(cooccurrence_distance([alone, both]))
