import numpy as np
import pytest
from helpers import composite_counts

from fednca.base.errors import FedncaError
from fednca.data.compose import compose

# Images per class as MedMNIST publishes them for DermaMNIST.
DERMAMNIST = {
    "train": (228, 359, 769, 80, 779, 4693, 99),
    "val": (33, 52, 110, 12, 111, 671, 14),
    "test": (66, 103, 220, 23, 223, 1341, 29),
}


def coloured(per_class: int, classes: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Make images that tell class and source apart: every pixel is random, and never black."""
    labels = np.repeat(np.arange(classes), per_class)
    images = np.random.default_rng(7).integers(1, 256, (len(labels), side, side, 3), dtype=np.uint8)
    return images, labels


def naive_canvas(image: np.ndarray, far: bool, shift: int) -> np.ndarray:
    """Copy one image onto its canvas, pixel by pixel."""
    side = len(image)
    canvas = np.zeros((2 * side, 2 * side, 3), np.uint8)
    for y in range(side):
        for x in range(side):
            corner = side - shift if far else shift
            canvas[corner + y, corner + x] = image[y, x]
    return canvas


def all_placements(images: np.ndarray, rows: np.ndarray, far: bool) -> list[np.ndarray]:
    shifts = range(images.shape[1] // 4)
    return [naive_canvas(images[row], far, shift) for row in rows for shift in shifts]


def is_any_of(canvas: np.ndarray, candidates: list[np.ndarray]) -> bool:
    return any(np.array_equal(canvas, candidate) for candidate in candidates)


def test_singles_are_one_source_image_at_a_corner():
    images, labels = coloured(per_class=3, classes=2)
    canvases, hot = compose(images, labels, 2, singles=None, pairs=0, rng=np.random.default_rng(0))
    assert canvases.shape == (6, 16, 16, 3)
    for i, canvas in enumerate(canvases):
        at_corners = [all_placements(images, np.array([i]), far) for far in (False, True)]
        assert is_any_of(canvas, at_corners[0] + at_corners[1])
        assert hot[i].tolist() == np.eye(2)[labels[i]].tolist()


def test_pairs_are_the_maximum_of_one_image_of_each_class_at_opposite_corners():
    images, labels = coloured(per_class=2, classes=3)
    canvases, hot = compose(images, labels, 3, singles=0, pairs=6, rng=np.random.default_rng(1))
    who_is_far = set()
    for canvas, present in zip(canvases, hot, strict=True):
        a, b = np.flatnonzero(present)
        for far in (False, True):
            candidates = [
                np.maximum(one, other)
                for one in all_placements(images, np.flatnonzero(labels == a), far)
                for other in all_placements(images, np.flatnonzero(labels == b), not far)
            ]
            if is_any_of(canvas, candidates):
                who_is_far.add(far)
                break
        else:
            pytest.fail("a composite that the naive loop cannot make")
    assert who_is_far == {False, True}


def test_jitter_takes_every_shift_below_a_quarter_of_the_side():
    images = np.full((400, 12, 12), 255, np.uint8)
    canvases, _ = compose(images, np.zeros(400, int), 1, singles=None, pairs=0, rng=np.random.default_rng(0))
    first_lit = {(int(y.min()), int(x.min())) for y, x in (np.nonzero(canvas[..., 0]) for canvas in canvases)}
    assert first_lit == {(0, 0), (1, 1), (2, 2), (12, 12), (11, 11), (10, 10)}


def test_grey_images_become_three_equal_channels():
    grey = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    labels = np.array([0, 0, 1, 1])
    flat, _ = compose(grey, labels, 2, singles=1, pairs=2, rng=np.random.default_rng(3))
    repeated, _ = compose(grey[..., None].repeat(3, -1), labels, 2, singles=1, pairs=2, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(flat, repeated)


def test_limited_singles_use_no_source_image_twice():
    images, labels = coloured(per_class=5, classes=2)
    canvases, hot = compose(images, labels, 2, singles=5, pairs=0, rng=np.random.default_rng(0))
    brightness = sorted(int(canvas.sum()) for canvas in canvases)
    assert brightness == sorted(int(image.sum()) for image in images)
    assert hot.sum(axis=0).tolist() == [5, 5]


def test_the_generator_decides_everything():
    images, labels = coloured(per_class=4, classes=3)
    runs = [compose(images, labels, 3, singles=2, pairs=3, rng=np.random.default_rng(s))[0] for s in (5, 5, 6)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize(("singles", "pairs"), [(None, 3), (2, 3), (2, 0), (0, 1)])
def test_counts_foretell_what_compose_makes(singles, pairs):
    counts = (4, 2, 5)
    labels = np.repeat(np.arange(3), counts)
    images = np.zeros((len(labels), 4, 4), np.uint8)
    _, hot = compose(images, labels, 3, singles=singles, pairs=pairs, rng=np.random.default_rng(0))
    total, prevalence = composite_counts(counts, singles, pairs)
    assert len(hot) == total
    np.testing.assert_allclose(hot.mean(axis=0), prevalence)


@pytest.mark.parametrize(("part", "pairs", "total"), [("train", 50, 8057), ("val", 10, 1213), ("test", 20, 2425)])
def test_dermamnist_has_the_published_sizes(part, pairs, total):
    assert composite_counts(DERMAMNIST[part], None, pairs)[0] == total


@pytest.mark.parametrize(
    ("part", "pairs", "class_index", "percent"),
    [("train", 50, 5, 61.97), ("test", 20, 5, 60.25), ("test", 20, 3, 5.90)],
)
def test_dermamnist_has_the_published_prevalences(part, pairs, class_index, percent):
    prevalence = composite_counts(DERMAMNIST[part], None, pairs)[1][class_index]
    assert round(100 * prevalence, 2) == percent


@pytest.mark.parametrize(
    ("labels", "singles", "pairs", "sentence"),
    [
        ([0, 0, 1], 2, 0, "class 1 has only 1 source images for 2 singles"),
        ([0, 0, 2], None, 1, "class 1 has no source image for its 1 composites per pair"),
    ],
)
def test_too_few_source_images_are_named(labels, singles, pairs, sentence):
    with pytest.raises(FedncaError, match=sentence):
        compose(
            np.zeros((3, 4, 4), np.uint8),
            np.array(labels),
            3,
            singles=singles,
            pairs=pairs,
            rng=np.random.default_rng(0),
        )
