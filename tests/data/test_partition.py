import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare

from fednca.data.partition import (
    ELSEWHERE,
    NOWHERE,
    Partition,
    deal,
    dirichlet_presence,
    summary,
)
from fednca.errors import FedncaError

POLICIES = ("drop", "mask", "loss-mask")


def random_labels(seed: int, images: int, classes: int, density: float = 0.25) -> np.ndarray:
    """Draw multi-hot labels with some all-zero rows and some unknown entries."""
    draw = np.random.default_rng(seed).random((images, classes))
    return ((draw < density).astype(np.int8) - (draw > 0.97)).astype(np.int8)


def label_set(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(row == 1).tolist())


def members(partition: Partition, k: int) -> set[int]:
    return set(np.flatnonzero(partition.classes[k]).tolist())


@st.composite
def problems(draw):
    """Draw settings that can be met, with or without groups."""
    classes, clients = draw(st.integers(2, 9)), draw(st.integers(1, 6))
    gamma = draw(
        st.floats(max(1 / clients, 1 / classes), 1).filter(lambda g: clients * math.ceil(g * classes - 1e-9) >= classes)
    )
    labels = random_labels(draw(st.integers(0, 1000)), draw(st.integers(1, 120)), classes)
    grouped = draw(st.booleans())
    groups = np.random.default_rng(1).integers(0, 30, len(labels)) if grouped else None
    options = {"beta": draw(st.sampled_from([0.01, 0.5, 10.0])), "seed": draw(st.integers(0, 9))}
    options |= {"unmatched": draw(st.sampled_from(POLICIES)), "groups": groups, "draws": 8, "min_samples": 0}
    return labels, {"clients": clients, "gamma": gamma, **options}


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_image_is_with_one_client_or_left_out_for_one_reason(problem):
    labels, options = problem
    partition = dirichlet_presence(labels, **options)
    everywhere = np.concatenate([*partition.clients, *partition.left_out.values()])
    assert np.array_equal(np.sort(everywhere), np.arange(len(labels)))
    assert all((np.diff(rows) > 0).all() for rows in partition.clients)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_clients_hold_m_classes_and_classes_have_their_holders(problem):
    labels, options = problem
    partition = dirichlet_presence(labels, **options)
    m = math.ceil(options["gamma"] * labels.shape[1] - 1e-9)
    assert (partition.classes.sum(axis=1) == m).all()
    holders = 2 if options["clients"] * m >= 2 * labels.shape[1] else 1
    assert (partition.classes.sum(axis=0) >= holders).all()
    np.testing.assert_allclose(partition.proportions.sum(axis=1), 1)
    assert not partition.proportions[~partition.classes.T].any()


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_client_holds_only_label_sets_it_may(problem):
    labels, options = problem
    partition = dirichlet_presence(labels, **options)
    allowed = [members(partition, k) for k in range(options["clients"])]
    for k, rows in enumerate(partition.clients):
        for row in rows:
            present = label_set(labels[row])
            matched = any(present <= classes for classes in allowed)
            if matched or options["unmatched"] == "drop":
                assert present <= allowed[k]
            else:
                assert present & allowed[k]
    for row in partition.left_out[NOWHERE]:
        assert options["unmatched"] == "drop"
        assert not any(label_set(labels[row]) <= classes for classes in allowed)
    if options["groups"] is None:
        assert not len(partition.left_out[ELSEWHERE])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_groups_are_never_split_and_only_misfits_are_left_out(problem):
    labels, options = problem
    groups = np.arange(len(labels)) // 3
    partition = dirichlet_presence(labels, **options | {"groups": groups})
    homes = {}
    for k, rows in enumerate(partition.clients):
        for group in groups[rows]:
            assert homes.setdefault(group, k) == k
    for row in partition.left_out[ELSEWHERE]:
        assert not label_set(labels[row]) <= members(partition, homes[groups[row]])


@settings(max_examples=40, deadline=None)
@given(problems())
def test_images_without_a_label_are_dealt_evenly(problem):
    labels, options = problem
    empty = ~(labels == 1).any(axis=1)
    alone = dirichlet_presence(labels, **options | {"groups": None})
    sizes = [np.count_nonzero(empty[rows]) for rows in alone.clients]
    assert sum(sizes) == np.count_nonzero(empty)
    assert max(sizes) - min(sizes) <= 1


def test_unmatched_images_take_no_turn_in_the_even_dealing():
    labels = np.repeat(np.array([[1, 1], [0, 0]], np.int8), [60, 40], axis=0)
    partition = deal(labels, np.eye(4, 2, dtype=np.bool_), np.eye(2, 4), np.random.default_rng(0))
    assert len(partition.left_out[NOWHERE]) == 60
    assert [len(rows) for rows in partition.clients] == [10, 10, 10, 10]


def test_groups_without_a_finding_are_dealt_evenly():
    groups = np.repeat(np.arange(22), 5)
    labels = np.zeros((110, 4), np.int8)
    labels[:10:5, 0] = 1  # groups 0 and 1 have a finding
    partition = dirichlet_presence(labels, 4, 1.0, 0.5, 0, groups=groups, min_samples=0)
    sizes = [len(set(groups[rows]) - {0, 1}) for rows in partition.clients]
    assert sorted(sizes) == [5, 5, 5, 5]


@settings(max_examples=20, deadline=None)
@given(problems())
def test_the_seed_decides_everything(problem):
    labels, options = problem
    first, again = dirichlet_presence(labels, **options), dirichlet_presence(labels.copy(), **options)
    np.testing.assert_array_equal(first.proportions, again.proportions)
    for mine, same in zip(first.clients, again.clients, strict=True):
        np.testing.assert_array_equal(mine, same)


def test_another_seed_deals_otherwise():
    labels = random_labels(0, 400, 6)
    one, other = (dirichlet_presence(labels, 4, 0.5, 0.7, seed, min_samples=1) for seed in (0, 1))
    assert not np.array_equal(one.proportions, other.proportions)


def test_labels_that_lie_column_by_column_are_dealt_alike():
    labels = random_labels(2, 400, 14)
    options = {"clients": 3, "beta": 0.5, "gamma": 0.7, "seed": 0}
    by_row, by_column = (dirichlet_presence(order(labels), **options) for order in (np.array, np.asfortranarray))
    for one, other in zip(by_row.clients, by_column.clients, strict=True):
        assert np.array_equal(one, other)


def test_single_labels_follow_their_dirichlet_shares():
    """scipy's chi-square test, one per class, pooled."""
    labels = np.eye(5, dtype=np.int8)[np.arange(20_000) % 5]
    partition = dirichlet_presence(labels, 6, 2.0, 0.6, 11)
    observed = summary(partition, labels)
    statistic, freedom = 0.0, 0
    for c, share in enumerate(partition.proportions):
        holders = share > 0
        statistic += chisquare(observed[holders, c], 4000 * share[holders]).statistic
        freedom += np.count_nonzero(holders) - 1
        assert not observed[~holders, c].any()
    assert 0.001 < chi2.sf(statistic, freedom) < 0.999


def test_proportions_are_dirichlet():
    """A Dirichlet(beta) coordinate of h has mean 1/h and variance (h - 1) / (h² (h beta + 1))."""
    labels, beta, h = np.ones((40, 2), np.int8), 0.5, 4
    shares = np.concatenate(
        [dirichlet_presence(labels, h, beta, 1, s, min_samples=0).proportions.ravel() for s in range(400)]
    )
    assert shares.mean() == pytest.approx(1 / h)
    assert shares.var() == pytest.approx((h - 1) / (h**2 * (h * beta + 1)), rel=0.1)


def test_label_sets_go_by_the_mean_of_their_shares_among_eligible_clients():
    """Y = {0, 1} fits clients 0 and 1 only; closed form: (0.5 + 0.2) : (0.1 + 0.8), whatever client 2 holds."""
    classes = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1]], np.bool_)
    proportions = np.array([[0.5, 0.1, 0.4], [0.2, 0.8, 0], [0, 0.3, 0.7]])
    labels = np.tile(np.array([[1, 1, 0]], np.int8), (20_000, 1))
    partition = deal(labels, classes, proportions, np.random.default_rng(0))
    sizes = np.array([len(rows) for rows in partition.clients])
    expected = 20_000 * np.array([0.7, 0.9]) / 1.6
    assert sizes[2] == 0
    assert chisquare(sizes[:2], expected).pvalue > 0.001


def test_eligible_clients_without_any_share_get_equal_parts():
    classes = np.array([[1, 1], [1, 1], [1, 0]], np.bool_)
    proportions = np.array([[0, 0, 1], [0, 0, 0]], float)
    labels = np.ones((3000, 2), np.int8)
    partition = deal(labels, classes, proportions, np.random.default_rng(0))
    sizes = [len(rows) for rows in partition.clients]
    assert sizes[2] == 0
    assert chisquare(sizes[:2]).pvalue > 0.001


def test_a_group_goes_by_the_sum_of_its_positive_images():
    """Two images of class 0 (client 0's) and one of class 1 (client 1's): odds 2 : 1, whatever the empty images."""
    classes, proportions = np.eye(2, dtype=np.bool_), np.eye(2)
    labels = np.tile(np.array([[1, 0], [1, 0], [0, 1], [0, 0]], np.int8), (3000, 1))
    groups = np.repeat(np.arange(3000), 4)
    partition = deal(labels, classes, proportions, np.random.default_rng(0), groups=groups)
    homes = [len(np.unique(groups[rows])) for rows in partition.clients]
    assert chisquare(homes, [2000, 1000]).pvalue > 0.001
    assert len(partition.clients[0]) == 3 * homes[0]
    assert len(partition.clients[1]) == 2 * homes[1]
    assert len(partition.left_out[ELSEWHERE]) == homes[0] + 2 * homes[1]


def test_a_group_none_of_whose_labels_fit_keeps_its_empty_images():
    classes, proportions = np.eye(2, dtype=np.bool_), np.eye(2)
    labels = np.array([[1, 1], [0, 0], [1, 1]], np.int8)
    partition = deal(labels, classes, proportions, np.random.default_rng(0), groups=np.zeros(3, np.int64))
    assert np.concatenate(partition.clients).tolist() == [1]
    assert partition.left_out[NOWHERE].tolist() == [0, 2]


def test_unknown_labels_neither_bind_nor_count():
    classes, proportions = np.eye(2, dtype=np.bool_), np.eye(2)
    labels = np.array([[1, -1], [-1, 1], [-1, -1]], np.int8)
    partition = deal(labels[:2], classes, proportions, np.random.default_rng(0))
    assert [rows.tolist() for rows in partition.clients] == [[0], [1]]
    everything = deal(labels, classes, proportions, np.random.default_rng(0))
    assert sum(map(len, everything.clients)) == 3
    assert summary(everything, labels).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("policy", "outside"), [("mask", 0), ("loss-mask", -1)])
def test_a_client_does_not_see_present_labels_outside_its_classes(policy, outside):
    classes = np.array([[1, 1, 0], [0, 1, 1]], np.bool_)
    proportions = np.array([[1, 0], [1, 0], [0, 1]], float)
    labels = np.array([[1, 0, 1], [1, 1, 0], [0, -1, 1], [0, 0, -1]], np.int8)
    before = labels.copy()
    partition = deal(labels, classes, proportions, np.random.default_rng(0), unmatched=policy)
    home = next(k for k, rows in enumerate(partition.clients) if 0 in rows)
    seen = {row: partition.client_labels(labels, k)[i] for k in (0, 1) for i, row in enumerate(partition.clients[k])}
    assert seen[0].tolist() == ([1, 0, outside] if home == 0 else [outside, 0, 1])
    for row in (1, 2, 3):
        assert seen[row].tolist() == labels[row].tolist()
    np.testing.assert_array_equal(labels, before)


def test_a_matched_image_is_never_masked():
    labels = random_labels(5, 600, 5)
    partition = dirichlet_presence(labels, 4, 0.5, 0.8, 0, unmatched="mask")
    matched = [any(label_set(row) <= members(partition, k) for k in range(4)) for row in labels]
    for k, rows in enumerate(partition.clients):
        keep = np.array(matched)[rows]
        np.testing.assert_array_equal(partition.client_labels(labels, k)[keep], labels[rows][keep])


def test_summary_counts_positives_as_a_loop_does():
    labels = random_labels(2, 300, 6)
    partition = dirichlet_presence(labels, 3, 1.0, 0.7, 0, unmatched="mask")
    expected = np.zeros((3, 6), int)
    for k, rows in enumerate(partition.clients):
        for row in rows:
            for c in label_set(labels[row]) & members(partition, k):
                expected[k, c] += 1
    np.testing.assert_array_equal(summary(partition, labels), expected)


def test_more_draws_leave_fewer_images_out():
    labels = (np.random.default_rng(0).random((500, 12)) < 0.25).astype(np.int8)

    def left_out(draws):
        partition = dirichlet_presence(labels, 6, 1.0, 0.5, 4, min_samples=0, draws=draws)
        return len(partition.left_out[NOWHERE])

    assert left_out(256) < left_out(1)


def test_scarce_classes_are_all_held():
    """With 10 clients of 2 classes and 10 classes, every class has exactly two holders: random draws never do it."""
    partition = dirichlet_presence(np.eye(10, dtype=np.int8).repeat(40, 0), 10, 1.0, 0.2, 0, min_samples=1)
    assert (partition.classes.sum(axis=0) == 2).all()
    assert len(np.unique(partition.classes, axis=0)) > 2


def test_every_client_reaches_min_samples():
    labels = np.eye(10, dtype=np.int8)[np.arange(1000) % 10]
    partition = dirichlet_presence(labels, 10, 0.1, 0.5, 0, min_samples=20)
    assert min(map(len, partition.clients)) >= 20


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"beta": 0.0}, r"beta \(.*\) is 0.0"),
        ({"beta": math.nan}, r"beta \(.*\) is nan"),
        ({"gamma": 0.0}, r"gamma \(.*\) is 0.0"),
        ({"gamma": 1.5}, r"gamma \(.*\) is 1.5"),
        ({"gamma": 0.05}, r"gamma \(.*\) is 0.05, but of 10 classes this is less than one class"),
        ({"clients": 0}, "clients is 0"),
        ({"clients": 4, "gamma": 0.1}, "4 clients with 1 classes each cannot hold all 10 classes"),
        ({"min_samples": 101}, "1000 images are too few to give 10 clients at least 101 each"),
        ({"min_samples": 100, "beta": 0.01}, "never had more than [0-9]+ images, but min_samples is 100"),
        ({"unmatched": "masks"}, "unmatched policy 'masks' is not known; did you mean 'mask'"),
        ({"labels": np.zeros(1000, np.int8)}, r"labels have shape \(1000,\)"),
    ],
)
def test_impossible_settings_end_in_a_sentence_soon(changes, sentence):
    labels = np.eye(10, dtype=np.int8)[np.arange(1000) % 10]
    options = {"labels": labels, "clients": 10, "beta": 0.5, "gamma": 0.5, "seed": 0} | changes
    started = time.monotonic()
    with pytest.raises(FedncaError, match=sentence):
        dirichlet_presence(**options)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("gamma", "classes", "m"), [(0.71, 7, 5), (0.5, 10, 5), (0.75, 80, 60), (0.5, 20, 10)])
def test_presence_rounds_up_as_published(gamma, classes, m):
    labels = np.eye(classes, dtype=np.int8).repeat(20, 0)
    partition = dirichlet_presence(labels, 10, 0.5, gamma, 0, min_samples=0)
    assert (partition.classes.sum(axis=1) == m).all()


def test_rounding_above_a_whole_number_adds_no_class():
    assert 0.28 * 25 > 7
    labels = np.eye(25, dtype=np.int8).repeat(20, axis=0)
    assert (dirichlet_presence(labels, 10, 0.5, 0.28, 0, min_samples=0).classes.sum(axis=1) == 7).all()


def test_every_image_of_a_group_has_one_vote():
    classes = np.array([[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]], np.bool_)
    proportions = np.array([[0.1, 0, 0.9, 0], [0.1, 0, 0, 0.9], [0, 1, 0, 0]])
    labels = np.tile(np.array([[1, 1, 0], [0, 0, 1]], np.int8), (3000, 1))  # one fits client 0 alone, one client 1
    partition = deal(labels, classes, proportions, np.random.default_rng(0), groups=np.repeat(np.arange(3000), 2))
    sizes = [len(rows) for rows in partition.clients]
    assert sizes[2:] == [0, 0]
    assert chisquare(sizes[:2]).pvalue > 0.001


def test_min_samples_is_the_least_that_a_client_may_have():
    labels = np.eye(4, dtype=np.int8)[np.arange(400) % 4]
    least = [min(map(len, dirichlet_presence(labels, 4, 0.5, 0.5, s, min_samples=60).clients)) for s in range(30)]
    assert min(least) == 60
