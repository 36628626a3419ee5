import csv
import sys

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from fednca.data.partition import dirichlet_presence
from fednca.data.sources.folder import Options, load, missing, prepare
from fednca.errors import FedncaError


def write(root, text, *, images=("a.png", "b.png", "c.png", "d.png"), folder="images", table="labels.csv"):
    """Write a table and tiny images below the root."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name in images:
        path = root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path)
    (root / table).write_text(text, encoding="utf-8")
    return root


def names(split):
    return [path.name for path in split.images.paths]


def by_name(dataset):
    """Map each image to its labels, whatever split it is in."""
    splits = [split for split in (dataset.train, dataset.val, dataset.test) if split is not None]
    return {name: row.tolist() for split in splits for name, row in zip(names(split), split.labels, strict=True)}


def test_one_column_per_class_with_splits(tmp_path):
    text = "image,cat,dog,split\na.png,1,0,train\nb.png,,1,test\nc.png,0,0,valid\nd.png,1,1,Train\n"
    dataset = load(Options(), write(tmp_path, text))
    assert dataset.classes == ("cat", "dog")
    assert (names(dataset.train), names(dataset.val), names(dataset.test)) == (["a.png", "d.png"], ["c.png"], ["b.png"])
    assert by_name(dataset) == {"a.png": [1, 0], "d.png": [1, 1], "c.png": [0, 0], "b.png": [-1, 1]}
    assert dataset.train.images.paths[0] == tmp_path / "images/a.png"
    assert dataset.train.groups is None
    assert dataset.sites == ()


def test_one_column_of_names_is_the_same_as_one_column_per_class(tmp_path):
    text = "file,found,split\na.png,dog;cat,train\nb.png,dog,test\nc.png,,val\nd.png,cat; dog,train\n"
    dataset = load(Options(label_column="found", separator=";"), write(tmp_path, text))
    assert dataset.classes == ("cat", "dog")
    assert by_name(dataset) == {"a.png": [1, 1], "b.png": [0, 1], "c.png": [0, 0], "d.png": [1, 1]}


@pytest.mark.parametrize("options", [{}, {"label_column": "found"}])
def test_classes_are_chosen_and_ordered_and_unknown_where_the_table_lacks_them(tmp_path, options):
    wide = "image,cat,dog,age,split\na.png,1,0,53,train\nb.png,0,1,4,test\n"
    narrow = "image,found,split\na.png,cat|age,train\nb.png,dog,test\n"
    root = write(tmp_path, narrow if options else wide)
    dataset = load(Options(classes=["dog", "fox", "cat"], **options), root)
    assert dataset.classes == ("dog", "fox", "cat")
    assert by_name(dataset) == {"a.png": [0, -1, 1], "b.png": [1, -1, 0]}


@pytest.mark.parametrize("header", ["Filenames,cat", "ID,cat", "PATH,cat", "scan,cat", "cat,image"])
def test_the_image_column_goes_by_its_name_else_it_is_the_first(tmp_path, header):
    cells = ("1,a.png", "0,b.png") if header == "cat,image" else ("a.png,1", "b.png,0")
    dataset = load(Options(), write(tmp_path, "\n".join([header, *cells])))
    assert dataset.classes == ("cat",)
    assert by_name(dataset) == {"a.png": [1], "b.png": [0]}


def test_every_column_can_be_named(tmp_path):
    text = "image,scan,who,where,part,cat,dog\nx,a.png,7,north,test,1,0\ny,b.png,8,south,train,0,1\n"
    root = write(tmp_path, text, folder="scans", table="my.csv")
    columns = {"image_column": "scan", "group_column": "who", "site_column": "where", "split_column": "part"}
    dataset = load(Options(table="my.csv", image_folder="scans", classes=["cat", "dog"], **columns), root)
    assert by_name(dataset) == {"a.png": [1, 0], "b.png": [0, 1]}
    assert dataset.sites == ("north", "south")
    assert dataset.train.sites.tolist() == [1]
    assert dataset.test.sites.tolist() == [0]
    assert dataset.train.groups.tolist() != dataset.test.groups.tolist()


def test_excels_mark_quotes_blank_lines_and_other_scripts_are_read(tmp_path):
    images = ("Röntgen/日本, 1.png", "b.png")
    text = '\ufeffimage,Pleura erguß\r\n"Röntgen/日本, 1.png",1\r\n\r\nb.png,0\r\n'
    dataset = load(Options(), write(tmp_path / "größe", text, images=images))
    assert dataset.classes == ("Pleura erguß",)
    assert by_name(dataset) == {"日本, 1.png": [1], "b.png": [0]}


def test_labels_are_read_as_pandas_writes_them_where_some_are_unknown(tmp_path):
    dataset = load(Options(), write(tmp_path, "image,cat,dog\na.png,1.0,\nb.png,,0.0\n"))
    assert by_name(dataset) == {"a.png": [1, -1], "b.png": [-1, 0]}


def test_without_an_images_folder_paths_start_at_the_root(tmp_path):
    dataset = load(Options(), write(tmp_path, "image,cat\nin/a.png,1\nin/b.png,0\n", folder="in"))
    assert {path.parent for path in dataset.train.images.paths} == {tmp_path / "in"}


def test_parquet_reads_as_the_same_csv(tmp_path):
    columns = {
        "image": ["a.png", "b.png", "c.png", "d.png"],
        "cat": [1.0, None, 0.0, float("nan")],
        "dog": [True, False, None, True],
        "patient": [3, 3, 5, 6],
    }
    text = "image,cat,dog,patient\na.png,1,1,3\nb.png,,0,3\nc.png,0,,5\nd.png,,1,6\n"
    expected = load(Options(), write(tmp_path / "csv", text))
    root = write(tmp_path / "parquet", "", table="unused.csv")
    parquet.write_table(pa.table(columns), root / "labels.parquet")
    assert missing(root) == []
    dataset = load(Options(), root)
    assert dataset.classes == expected.classes
    for split, twin in ((dataset.train, expected.train), (dataset.test, expected.test)):
        assert names(split) == names(twin)
        np.testing.assert_array_equal(split.labels, twin.labels)
        np.testing.assert_array_equal(split.groups, twin.groups)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    with pytest.raises(FedncaError, match=r"labels\.parquet' cannot be read"):
        load(Options(), write(tmp_path, "not parquet", table="labels.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    root = write(tmp_path, "not parquet", table="labels.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        FedncaError, match=r"labels\.parquet' needs the package 'pyarrow': .*, or save the table as CSV"
    ):
        load(Options(), root)


WIDE = "image,cat\n"


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "has no rows below its header"),
        ("image;cat\na.png;1,5\n", {}, "has one column, 'image;cat'; put commas between the columns"),
        ("image\tcat\na.png\t1\n", {}, "put commas between the columns"),
        (WIDE + "a.png,x\n", {}, "or choose the class columns with the option `classes`"),
        (WIDE, {}, "has no rows below its header"),
        (WIDE + "a.png,1\na.png,0\n", {}, "row 3 repeats the image 'a.png' of row 2"),
        (WIDE + "a.png,1\n./a.png,0\n", {}, "row 3 repeats the image './a.png' of row 2"),
        (WIDE + "a.png,1\n\nz.png,0\n", {}, r"row 4 names '.*images/z\.png', which is not there"),
        (WIDE + "a.png,1\nb.png,2\n", {}, "row 3 has '2' in column 'cat'; write 0, 1 or nothing"),
        (WIDE + "a.png,-1\n", {}, "row 2 has '-1' in column 'cat'"),
        (WIDE + "a.png,yes\n", {}, "row 2 has 'yes' in column 'cat'"),
        (WIDE + "a.png\n", {}, "row 2 has 1 cells for 2 columns"),
        (WIDE + ".,1\n", {}, r"row 2 has the image path '\.'; give a path below"),
        (WIDE + "../labels.csv,1\n", {}, r"row 2 has the image path '\.\./labels\.csv'; give a path below"),
        (WIDE + "x/../../labels.csv,1\n", {}, "row 2 has the image path 'x/../../labels.csv'"),
        (WIDE + "/etc/hosts,1\n", {}, "row 2 has the image path '/etc/hosts'"),
        (WIDE + ",1\n", {}, "row 2 has the image path ''"),
        (WIDE + "a.png,1\n", {"label_column": "labels"}, "label_column 'labels' is not in table .*; its columns are"),
        (WIDE + "a.png,1\n", {"image_column": "scan"}, "image_column 'scan' is not in table"),
        (WIDE + "a.png,1\n", {"split_column": "fold"}, "split_column 'fold' is not in table"),
        (WIDE + "a.png,1\n", {"group_column": "who"}, "group_column 'who' is not in table"),
        (WIDE + "a.png,1\n", {"classes": ["dog"]}, "has no class column among image, cat"),
        (WIDE + "a.png,1\n", {"classes": ["cat", "cat"]}, "classes cat, cat have a duplicate"),
        (WIDE + "a.png,1\n", {"image_folder": "scans"}, "image_folder '.*scans' is not there"),
        (WIDE + "a.png,1\n", {"table": "other.csv"}, r"table '.*other\.csv' is not there"),
        ("image,patient\na.png,1\n", {}, "has no class column among image, patient"),
        ("image,cat,cat\na.png,1,1\n", {}, "has two columns 'cat'"),
        ("image,cat,split\na.png,1,train\nb.png,1,dev\n", {}, "row 3 has split 'dev'; write one of train, val"),
        ("image,cat,split\na.png,1,test\n", {}, "has no image for training"),
        ("image,cat,site\na.png,1,north\nb.png,1,\n", {}, "row 3 has no site"),
        (
            "image,cat,Patient,split\na.png,1,p1,train\nb.png,1,p2,train\nc.png,1,p1,test\n",
            {},
            r"has Patient 'p1' in train \(row 2\) and in test \(row 4\)",
        ),
    ],
)
def test_a_mistake_in_the_table_is_one_sentence_with_its_place(tmp_path, text, options, sentence):
    with pytest.raises(FedncaError, match=sentence) as caught:
        load(Options(**options), write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_other_encodings_are_named(tmp_path):
    root = write(tmp_path, "")
    (root / "labels.csv").write_bytes("image,Erguß\na.png,1\n".encode("latin-1"))
    with pytest.raises(FedncaError, match=r"labels\.csv' is not UTF-8 \(byte 10\); save it as 'CSV UTF-8'"):
        load(Options(), root)


def test_a_folder_says_what_it_lacks(tmp_path):
    assert "labels.csv" in missing(tmp_path)[0]
    prepare(tmp_path, lambda what, done, total: None)
    with pytest.raises(FedncaError, match=r"table '.*labels\.csv' is not there; put it there, or name another"):
        load(Options(), tmp_path)
    write(tmp_path, "image,cat\na.png,1\n")
    assert missing(tmp_path) == []
    prepare(tmp_path, lambda what, done, total: None)
    with pytest.raises(FedncaError, match="has no root"):
        load(Options(), None)


def test_a_test_share_is_set_aside_by_seed_with_groups_whole_and_every_site_in_it(tmp_path):
    images = [f"{i}.png" for i in range(80)]
    rows = [f"{name},{i % 2},{i // 4},{'north' if i < 60 else 'south'}" for i, name in enumerate(images)]
    root = write(tmp_path, "\n".join(["image,cat,patient,site", *rows]), images=images)
    first, again, other = (load(Options(seed=seed, test_fraction=0.25), root) for seed in (1, 1, 2))
    assert names(first.test) == names(again.test) != names(other.test)
    assert sorted(names(first.train) + names(first.test)) == sorted(images)
    assert not set(first.train.groups) & set(first.test.groups)
    # A quarter of 60 images in groups of 4 is 12 (3 groups fit, 4 do not); of 20 it is 4.
    assert np.bincount(first.test.sites).tolist() == [12, 4]
    assert first.val is None


@pytest.mark.data
def test_real_chest_x_rays_keep_their_patients_on_one_side_and_with_one_client(data_folder):
    root = data_folder / "nih-sample"
    dataset = load(Options(), root)
    with (root / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    findings = {row["image"]: [int(row[name]) for name in dataset.classes] for row in rows}
    patients = {row["image"]: row["patient"] for row in rows}
    assert len(dataset.classes) == 14
    assert by_name(dataset) == findings

    counts = np.array([sum(own) for own in findings.values()])
    assert (len(counts), (counts == 0).sum(), (counts >= 2).sum()) == (4999, 2754, 824)
    train, test = ({patients[name] for name in names(split)} for split in (dataset.train, dataset.test))
    assert not train & test
    assert len(dataset.test) / 4999 == pytest.approx(0.2, abs=0.01)

    split = dataset.train
    owners = np.array([patients[name] for name in names(split)])
    dealt = dirichlet_presence(split.labels, 10, 0.5, 0.5, 0, groups=split.groups)
    held = [set(owners[rows]) for rows in dealt.clients]
    assert sum(map(len, held)) == len(set().union(*held)) > 500


@pytest.mark.data
def test_real_scenes_are_read_whole(data_folder):
    dataset = load(Options(), data_folder / "scenes")
    assert dataset.classes == ("desert", "mountains", "sea", "sunset", "trees")
    counts = np.concatenate([dataset.train.labels, dataset.test.labels]).sum(axis=1)
    assert (len(counts), (counts >= 2).sum(), (counts == 0).sum()) == (2000, 457, 0)
