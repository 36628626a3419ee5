import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity

from fednca.base.errors import FedncaError
from fednca.data.store import StoredImages
from fednca.data.types import FileImages
from fednca.measures.collapse import Pairs
from fednca.report.samples import checkpoint_of, choose_examples, cosines, embed, look, pixels, sample_rows


def test_a_look_is_what_the_model_itself_says(runs):
    federation = runs[0].federation
    test = federation.dataset.test
    for run in (runs[0], runs[2]):
        seen = look(run, federation, np.array([3, 5, 40]), [7, 60])
        model = run.model()
        images = torch.from_numpy(test.images[[7, 60]]).permute(0, 3, 1, 2) / 127.5 - 1  # normalised by halves
        with torch.no_grad():
            output = model(images)
        np.testing.assert_allclose(seen.probabilities, output.logits.sigmoid(), atol=1e-5)
        places = [(n, c) for n, row in enumerate([3, 5, 40]) for c in np.flatnonzero(test.labels[row] == 1)]
        assert list(zip(seen.pairs.images.tolist(), seen.pairs.classes.tolist(), strict=True)) == places
        assert seen.grad_cam.shape[:2] == seen.evidence.shape[:2] == (2, 10)
        assert seen.evidence.shape[2:] == (16, 16)
        for c in range(10):
            own = seen.pairs.features[seen.pairs.classes == c]
            expected = own.mean(dim=0) if len(own) else torch.full((64,), torch.nan)
            np.testing.assert_allclose(seen.means[c], expected)
    assert seen.attention.shape == (2, 4, 10, *seen.grad_cam.shape[2:])
    np.testing.assert_allclose(seen.attention.sum(axis=(3, 4)), 1, rtol=1e-5)
    assert look(runs[0], federation, np.array([0]), [0]).attention is None


def test_the_most_final_checkpoint_is_looked_at(runs, open_run, tmp_path):
    assert checkpoint_of(runs[0]) == "final"
    assert checkpoint_of(open_run) == "best"
    (tmp_path / "config.toml").write_text((runs[0].folder / "config.toml").read_text())
    assert checkpoint_of(type(runs[0])(tmp_path)) is None


def test_samples_are_drawn_once_and_for_all(runs):
    federation = runs[0].federation
    drawn = sample_rows(federation, 20)
    assert len(set(drawn)) == 20
    assert (np.diff(drawn) > 0).all()
    np.testing.assert_array_equal(drawn, sample_rows(federation, 20))
    np.testing.assert_array_equal(sample_rows(federation, 10**6), np.arange(len(federation.dataset.test)))


def test_examples_show_as_many_classes_as_they_can():
    labels = np.zeros((40, 6), np.int8)
    labels[:, 0] = 1
    labels[:, 1] = 1
    labels[11] = [0, 0, 1, 1, 0, 0]
    labels[29] = [0, 0, 0, 0, 1, 1]
    labels[30] = [0, 0, 0, 1, 0, 0]  # one label only
    chosen = choose_examples(labels, 3)
    assert {11, 29} < set(chosen)
    assert len(set(chosen)) == 3
    assert choose_examples(labels, 3) == chosen
    single = np.eye(3, dtype=np.int8)
    assert sorted(choose_examples(single, 9)) == [0, 1, 2]
    assert len(choose_examples(np.zeros((4, 2), np.int8), 2)) == 2


def test_cosines_are_those_of_scikit_learn():
    means = np.random.default_rng(0).standard_normal((5, 7))
    np.testing.assert_allclose(cosines(means), cosine_similarity(means), atol=1e-12)
    means[2] = np.nan
    found = cosines(means)
    assert np.isnan(found[2]).all()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 2, 1)).all()


def test_an_embedding_keeps_neighbours_and_repeats_itself():
    rng = np.random.default_rng(0)
    classes = np.arange(90) % 3
    features = 20 * np.eye(8)[classes] + rng.standard_normal((90, 8))
    images = np.arange(90) // 2  # every image has two labels, but for the first, which has three
    images[2] = 0
    pairs = Pairs(*map(torch.from_numpy, (features, classes, images)))
    plane = embed(pairs, 60)
    assert plane.points.shape == (60, 2)
    centres = np.array([plane.points[plane.classes == c].mean(axis=0) for c in range(3)])
    nearest = ((plane.points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == plane.classes).all()
    np.testing.assert_array_equal(plane.points, embed(pairs, 60).points)
    everything = embed(pairs, 1000)
    assert everything.labels.tolist() == [list(images).count(image) for image in images]
    assert embed(Pairs(pairs.features[:4], pairs.classes[:4], pairs.images[:4]), 60) is None


def test_pixels_come_from_memory_and_from_stores_alike():
    images = np.random.default_rng(0).integers(0, 255, (5, 4, 4, 3), np.uint8)
    stored = StoredImages((images[:3], images[3:]))
    np.testing.assert_array_equal(pixels(images, [4, 1]), pixels(stored, [4, 1]))
    with pytest.raises(FedncaError, match="still files"):
        pixels(FileImages(()), [0])
