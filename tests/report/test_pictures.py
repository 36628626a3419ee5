import numpy as np
import pytest
from helpers import tiny
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.report.pictures import (
    MARKERS,
    attention_panels,
    class_points,
    cosine_panels,
    draw_pictures,
    enlarge,
    example_grid,
    grad_cam_panels,
    label_points,
    load_panels,
)
from fednca.report.samples import Embedding, look
from fednca.runs import train

CLASSES = [f"class {c}" for c in range(4)]


def make_plane(seed):
    rng = np.random.default_rng(seed)
    return Embedding(rng.standard_normal((50, 2)), rng.integers(0, 4, 50), rng.integers(1, 4, 50))


def title(axes):
    return axes.get_title(loc="left") or axes.get_title()  # the style decides where it stands


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_every_point_has_the_colour_and_sign_of_its_class():
    planes = {"first": make_plane(0), "second": make_plane(1)}
    figure = class_points(planes, CLASSES)
    assert [title(axes) for axes in figure.axes] == ["first", "second"]
    assert texts(figure.legends[0]) == CLASSES
    looks = set()
    for axes, plane in zip(figure.axes, planes.values(), strict=True):
        for c, drawn in enumerate(axes.collections):
            np.testing.assert_array_equal(drawn.get_offsets(), plane.points[plane.classes == c])
            looks.add((c, tuple(drawn.get_facecolor()[0]), drawn.get_paths()[0].vertices.tobytes()))
        assert len(axes.get_xticks()) == 0
    assert len(looks) == 4  # the same in both panels
    assert len({colour for _, colour, _ in looks}) == 4


def test_many_classes_differ_in_colour_or_sign():
    classes = [str(c) for c in range(80)]
    plane = Embedding(np.zeros((80, 2)), np.arange(80), np.ones(80, int))
    handles = class_points({"one": plane}, classes).legends[0].legend_handles
    assert len({(handle.get_color(), handle.get_marker()) for handle in handles}) == 80


def test_points_are_told_apart_by_their_number_of_labels():
    plane = make_plane(2)
    figure = label_points({"only": plane})
    assert texts(figure.legends[0]) == ["1", "2", "3"]
    sizes = [len(drawn.get_offsets()) for drawn in figure.axes[0].collections]
    assert sizes == [int((plane.labels == n).sum()) for n in (1, 2, 3)]
    assert [handle.get_marker() for handle in figure.legends[0].legend_handles] == list(MARKERS[:3])


def test_the_squares_are_the_cosines():
    values = np.array([[1, -0.04, 0.5], [-0.04, 1, np.nan], [0.5, np.nan, 1]])
    figure = cosine_panels({"left": values, "right": -values}, CLASSES[:3])
    left = figure.axes[0]
    np.testing.assert_array_equal(left.images[0].get_array().filled(np.nan), values)
    assert left.images[0].get_clim() == (-1, 1)
    assert [label.get_text() for label in left.get_xticklabels()] == CLASSES[:3]
    assert [label.get_text() for label in left.get_yticklabels()] == CLASSES[:3]
    assert [text.get_text() for text in left.texts] == ["1.0", "0.0", "0.5", "0.0", "1.0", "0.5", "1.0"]
    assert title(left) == "left\nmean over pairs 0.23"
    assert len(cosine_panels({"one": np.eye(30)}, list(map(str, range(30)))).axes[0].texts) == 0


def test_a_mean_of_no_pairs_is_not_defined():
    assert title(cosine_panels({"one": np.ones((1, 1))}, CLASSES[:1]).axes[0]) == "one\nmean over pairs not defined"


def test_test_images_without_any_class_are_drawn_without_evidence(tmp_path):
    run = train(tiny(method__name="fednca-ml", train__rounds=1), tmp_path / "run")
    run.federation.dataset.test.labels[:] = 0
    names = {path.stem for path in draw_pictures([run], tmp_path / "figures", images=20)}
    assert {"cosines", "examples", "test-classes"} <= names
    assert not {name for name in names if name.startswith(("grad-cam", "attention", "tsne"))}


@pytest.fixture(scope="module")
def seen(runs):
    federation = runs[0].federation
    return {run.config.method.name: look(run, federation, np.arange(20), [7, 60]) for run in (runs[0], runs[2])}


def test_each_class_of_an_example_is_a_row_of_evidence(runs, seen):
    test, classes = runs[0].federation.dataset.test, runs[0].federation.dataset.classes
    raw, labels = test.images[[7, 60]], [np.flatnonzero(test.labels[row] == 1).tolist() for row in (7, 60)]
    rows = [(e, c) for e, own in enumerate(labels) for c in own]
    axes = np.reshape(grad_cam_panels(raw, labels, seen, classes).axes, (len(rows), 3))
    assert [a.get_title() for a in axes[0]] == ["image", "fedavg", "fednca-ml"]
    assert [a.get_ylabel() for a in axes[:, 0]] == [classes[c] for _, c in rows]
    for (first, *others), (e, c) in zip(axes, rows, strict=True):
        np.testing.assert_array_equal(first.images[0].get_array(), enlarge(raw[e]))
        for drawn, own in zip(others, seen.values(), strict=True):
            assert drawn.get_xlabel() == f"{own.probabilities[e, c]:.2f}"
            changed = not np.array_equal(drawn.images[0].get_array(), enlarge(raw[e]))
            assert changed == bool(own.grad_cam[e, c].any())

    attention = seen["fednca-ml"].attention.copy()
    attention[:, 1] /= 1000  # a head that looks nowhere in particular stays dark beside the others
    axes = np.reshape(attention_panels("it", raw, labels, attention, classes).axes, (len(rows), 5))
    assert [a.get_title() for a in axes[0]] == ["image", "head 1", "head 2", "head 3", "head 4"]
    changes = [[np.abs(a.images[0].get_array() - row[0].images[0].get_array()).mean() for a in row[1:]] for row in axes]
    assert all(row[1] < min(row[0], row[2], row[3]) for row in changes)


def test_examples_carry_the_names_of_their_classes():
    raw = np.zeros((3, 16, 16, 3), np.uint8)
    figure = example_grid(raw, [[0, 2], [], [1]], CLASSES)
    assert [title(axes) for axes in figure.axes] == [
        "class 0\nclass 2",
        "no class",
        "class 1",
    ]
    assert enlarge(raw[0]).shape == (160, 160, 3)
    assert enlarge(np.zeros((224, 224, 3), np.uint8)).shape == (224, 224, 3)


def test_all_figures_are_written_whole_and_the_same_each_time(runs, tmp_path):
    paths = draw_pictures(runs, tmp_path / "new", images=30)
    stems = ["cosines", "grad-cam", "examples", "tsne-classes", "tsne-labels", "attention-fednca-ml"]
    stems += ["clients-stacked", "clients-bubbles", "train-classes", "test-classes"]
    assert [path.name for path in paths] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    for path in paths[::2]:
        with Image.open(path) as picture:
            assert min(picture.size) >= 400
    content = [path.read_bytes() for path in paths]
    assert all(b"<svg" in text for text in content[1::2])
    assert [path.read_bytes() for path in draw_pictures(runs, tmp_path / "new", images=30)] == content


def test_panels_are_methods_or_the_seeds_of_one(runs, open_run, tmp_path):
    assert list(load_panels(runs)[1]) == ["fedavg", "fednca-ml"]
    assert list(load_panels(runs[:2])[1]) == ["fedavg, seed 0", "fedavg, seed 1"]
    assert list(load_panels([open_run])[1]) == ["fednca-ml (not finished)"]
    text = (runs[0].folder / "config.toml").read_text()
    for name, content, sentence in (
        ("other", text.replace("beta = 1.0", "beta = 2.0"), "was trained on other images than"),
        ("new", text.replace("fedavg", "fedprox"), "has no checkpoint yet"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(content)
        with pytest.raises(FedncaError, match=sentence):
            load_panels([runs[0], type(runs[0])(tmp_path / name)])
