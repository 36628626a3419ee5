import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text
from scipy.spatial.distance import jensenshannon

from fednca.base.errors import FedncaError
from fednca.data.facts import client_names, partition_report
from fednca.data.federation import build_federation
from fednca.data.partition import ELSEWHERE, NOWHERE
from fednca.data.sources import folder
from fednca.data.types import Dataset, Split
from fednca.report.figures import bubbles, class_bars, draw_partition, group_tail, readable, stacked_bars
from fednca.report.partition import write_report
from fednca.report.tables import partition_table

SETTINGS = {"clients": 4, "beta": 0.5, "gamma": 0.5, "seed": 0, "min_samples": 5}
PICTURES = ("clients-stacked", "clients-bubbles", "train-classes", "test-classes")


def make_split(seed, images, classes, *, sites=None):
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 1.2 / classes).astype(np.int8)
    where = None if sites is None else rng.integers(0, sites, images)
    return Split(np.zeros((images, 1, 1, 3), np.uint8), labels, None, where)


def make_federation(classes=6, sites=(), **changes):
    names = tuple(f"class_{c}" for c in range(classes))
    train, val = (make_split(seed, 400, classes, sites=len(sites) or None) for seed in (0, 1))
    dataset = Dataset("toy", names, train, val, make_split(2, 80, classes), sites)
    return build_federation(dataset, **SETTINGS | changes)


def test_the_report_counts_as_a_loop_over_the_images_does():
    federation = make_federation()
    report = partition_report(federation, {"beta": 0.5, "clients": 99})
    labels, dealt = federation.dataset.train.labels, federation.train.partition
    for k, client in enumerate(report["clients"]):
        assert client["images"] == len(dealt.clients[k])
        for c, name in enumerate(report["classes"]):
            assert client["positives"][name] == sum(labels[row, c] == 1 for row in dealt.clients[k])
            assert (name in client["allowed_classes"]) == dealt.classes[k, c]
    held = sum(client["images"] for client in report["clients"])
    assert held + sum(report["left_out"].values()) == report["images"]["train"] == 400
    assert report["left_out"][NOWHERE] > 0
    assert report["left_out"][ELSEWHERE] == 0
    assert report["all_zero"]["train"] == pytest.approx(np.mean([not row.any() for row in labels]))
    assert report["positives"]["test"]["class_2"] == federation.dataset.test.labels[:, 2].sum()
    assert report["settings"] == {"beta": 0.5, "clients": 4, "unmatched": "drop"}


def test_the_distances_are_scipys_over_what_the_clients_see():
    federation = make_federation(unmatched="mask")
    report = partition_report(federation)
    seen = [federation.train.client(k)[1] for k in range(4)]
    shares = [(own == 1).sum(axis=0) for own in seen]
    expected = np.mean([jensenshannon(p, q, base=2) for p, q in combinations(shares, 2)])
    assert report["label_distance"] == pytest.approx(expected)
    assert report["missing_classes"] == np.mean([(own == 0).sum() for own in shares])
    assert 0 < report["cooccurrence_distance"] <= 1


def test_what_is_not_defined_is_null_and_the_file_is_strict_json(tmp_path):
    report = write_report(make_federation(clients=1, gamma=1.0), tmp_path / "new" / "folder")
    assert report["label_distance"] is None
    text = (tmp_path / "new" / "folder" / "partition.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == report


@pytest.mark.parametrize("classes", [2, 6, 80])
def test_all_pictures_are_written_whole_and_the_same_each_time(tmp_path, classes):
    federation = make_federation(classes, gamma=0.75)
    before = dict(mpl.rcParams)
    paths = draw_partition(federation, tmp_path)
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths[::2]:
        with Image.open(path) as picture:
            width, height = picture.size
            colours = picture.convert("RGB").getcolors(1 << 20)
        assert min(width, height) >= 400
        assert len(colours) > 5
    content = [path.read_bytes() for path in paths]
    assert all(b"<svg" in text for text in content[1::2])
    assert [path.read_bytes() for path in draw_partition(federation, tmp_path)] == content
    assert dict(mpl.rcParams) == before


def test_bars_and_bubbles_have_the_sizes_of_the_counts():
    federation = make_federation()
    report = partition_report(federation)
    counts = np.array([list(client["positives"].values()) for client in report["clients"]])
    bars = stacked_bars(federation).axes[0].containers
    np.testing.assert_array_equal([[bar.get_height() for bar in segment] for segment in bars], counts.T)
    np.testing.assert_array_equal([bar.get_y() for bar in bars[-1]], counts[:, :-1].sum(axis=1))

    drawn = bubbles(federation).axes[0].collections[0]
    place = {(int(k), int(c)): size for (c, k), size in zip(drawn.get_offsets(), drawn.get_sizes(), strict=True)}
    assert set(place) == set(zip(*np.nonzero(counts), strict=True))
    areas = np.array([place[key] for key in place])
    images = np.array([counts[key] for key in place])
    np.testing.assert_allclose(areas / areas.max(), images / images.max())

    labels = federation.dataset.train.labels
    held, unseen = class_bars("train", federation.dataset.classes, labels, counts.sum(axis=0)).axes[0].containers
    total = [low.get_height() + high.get_height() for low, high in zip(held, unseen, strict=True)]
    np.testing.assert_array_equal(total, (labels == 1).sum(axis=0))


def test_the_rarest_of_many_classes_are_one_segment():
    counts = np.array([[5, 1, 0, 9, 2], [5, 0, 3, 0, 2]])
    segments, names = group_tail(counts, list("abcde"), 4)
    assert names == ["a", "d", "e", "other 2 classes"]
    np.testing.assert_array_equal(segments, [[5, 9, 2, 1], [5, 0, 2, 3]])
    assert group_tail(counts, list("abcde"), 5)[1] == list("abcde")


def test_an_image_that_cannot_be_read_counts_once_where_validation_is_held_out():
    broken = replace(make_split(0, 300, 4), unreadable=((3, "a.png", "cut short"),))
    dataset = Dataset("toy", tuple("abcd"), broken, None, make_split(1, 40, 4))
    federation = build_federation(dataset, clients=3, beta=1.0, gamma=0.75, seed=0, min_samples=5)
    assert partition_report(federation)["unreadable"] == {"train": 1, "val": 0, "test": 0}


def test_clients_are_named_after_their_sites():
    sites = ("north", "south")
    assert client_names(make_federation(sites=sites, kind="natural")) == ["north", "south"]
    assert client_names(make_federation(sites=sites, clients=2, gamma=1.0)) == ["0", "1"]
    table = partition_table(make_federation(sites=("north", "[south]"), kind="natural"))
    assert [Text.from_markup(column.header).plain for column in table.columns] == ["client", "north", "[south]", "all"]
    assert client_names(make_federation()) == ["0", "1", "2", "3"]


def test_long_names_of_classes_leave_the_counts_whole():
    federation = make_federation(clients=10)
    names = tuple(f"class_{c} of the lesions of the upper skin" for c in range(6))
    console = Console(width=70, file=StringIO())
    console.print(partition_table(replace(federation, dataset=replace(federation.dataset, classes=names))))
    (shown,) = [line for line in console.file.getvalue().splitlines() if line.startswith(" images")]
    sizes = [len(rows) for rows in federation.train.partition.clients]
    assert shown.split()[1:] == [str(size) for size in [*sizes, sum(sizes)]]


def test_names_are_cut_and_may_hold_dollars(tmp_path):
    assert readable(["x" * 40]) == ["x" * 25 + "…"]
    dataset = make_federation(2).dataset
    odd = Dataset("toy", ("$\\frac$ {", "_" + "long_name" * 9), dataset.train, dataset.val, dataset.test)
    assert len(draw_partition(build_federation(odd, **SETTINGS | {"gamma": 1.0}), tmp_path)) == 8


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(FedncaError, match=r"cannot write '.*file/sub'"):
        write_report(make_federation(), tmp_path / "file" / "sub")


def test_nobody_loads_matplotlib_before_there_is_something_to_draw():
    code = "import sys, fednca.report.partition, fednca.report.tables; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.data
def test_real_chest_x_rays_are_reported_with_their_share_without_a_finding(data_folder, tmp_path):
    dataset = folder.load(folder.Options(), data_folder / "nih-sample")
    report = write_report(build_federation(dataset, **SETTINGS | {"clients": 10}), tmp_path)
    images, shares = report["images"], report["all_zero"]
    without = np.concatenate([split.labels for split in (dataset.train, dataset.test)]).any(axis=1)
    assert images["train"] + images["val"] + images["test"] == len(without) == 4999
    assert shares["train"] == pytest.approx(2754 / 4999, abs=0.05)
    assert report["left_out"][ELSEWHERE] > 0
    assert sum(path.suffix == ".png" for path in tmp_path.iterdir()) == 4
