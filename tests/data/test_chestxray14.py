import csv

import numpy as np
import pytest

from fednca.data.sources.chestxray14 import (
    ARCHIVES,
    CLASSES,
    NO_FINDING,
    Options,
    load,
    missing,
    prepare,
    read_entries,
    read_long_tail,
)
from fednca.errors import FedncaError

HEADERS = {  # NIH's own table, whose two titles with a comma stand over two fields each
    "Data_Entry_2017.csv": "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,"
    "View Position,OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],",
    "Data_Entry_2017_v2020.csv": "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Sex,"
    "View Position,OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]",
}
ENTRIES = {  # image → findings
    "00000001_000.png": "Cardiomegaly",
    "00000001_001.png": "Cardiomegaly|Emphysema",
    "00000002_000.png": "No Finding",
    "00000003_000.png": "Hernia|Pleural_Thickening",
    "00000004_000.png": "Mass",
    "00000005_000.png": "No Finding",
}
LISTS = {
    "train_val_list.txt": ["00000003_000.png", "00000001_000.png", "00000001_001.png", "00000002_000.png"],
    "test_list.txt": ["00000004_000.png", "00000005_000.png"],
}
LONG_TAIL = {
    "train": ["00000001_000.png", "00000001_001.png"],
    "val": ["00000002_000.png"],
    "test": ["00000003_000.png"],
}


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def write_entries(path, entries=ENTRIES):
    rows = [f"{name},{found},0,{int(name[:8])},058Y,M,PA,2682,2749,0.143,0.143" for name, found in entries.items()]
    path.write_text("\n".join([HEADERS.get(path.name, HEADERS["Data_Entry_2017.csv"]), *rows]) + "\n")


def write_long_tail(path, names, thickening="Pleural_Thickening"):
    """Write the 14 columns out of order, with 'No Finding' and one of the five added findings among them."""
    columns = [*reversed(CLASSES), "Pneumomediastinum", NO_FINDING]
    lines = [",".join(["id", *columns, "subj_id"]).replace("Pleural_Thickening", thickening)]
    for name in names:
        cells = [str(int(column in ENTRIES[name].split("|"))) for column in columns]
        lines.append(",".join([name, *cells, str(int(name[:8]))]))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def root(tmp_path):
    write_entries(tmp_path / "Data_Entry_2017_v2020.csv")
    for name, images in LISTS.items():
        (tmp_path / name).write_text("\n".join(images) + "\n")
    for number, name in enumerate(ENTRIES):
        folder = tmp_path / f"images_{number % 2 + 1:03}/images"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return tmp_path


def named(split, classes=CLASSES) -> dict[str, set[str]]:
    names = [path.name for path in split.images.paths]
    return {n: {classes[c] for c in np.flatnonzero(row)} for n, row in zip(names, split.labels, strict=True)}


def expected(names: list[str]) -> dict[str, set[str]]:
    return {name: set(ENTRIES[name].split("|")) - {NO_FINDING} for name in names}


@pytest.mark.parametrize("table", HEADERS)
def test_both_vintages_give_the_lists_their_labels_and_patients(root, table):
    (root / "Data_Entry_2017_v2020.csv").unlink()
    write_entries(root / table)
    dataset = load(Options(), root)
    assert dataset.classes == CLASSES
    assert dataset.val is None
    assert list(named(dataset.train).items()) == list(expected(LISTS["train_val_list.txt"]).items())
    assert named(dataset.test) == expected(LISTS["test_list.txt"])
    assert dataset.train.groups.tolist() == [3, 1, 1, 2]
    assert all(path.is_file() for path in (*dataset.train.images.paths, *dataset.test.images.paths))


@pytest.mark.parametrize("folder", ["images", "."])
def test_images_may_lie_in_one_folder(root, folder):
    (root / folder).mkdir(exist_ok=True)
    for path in root.glob("images_*/images/*.png"):
        path.rename(root / folder / path.name)
    dataset = load(Options(), root)
    assert {path.parent for path in dataset.train.images.paths} == {root / folder}


def test_no_finding_is_a_fifteenth_class_when_asked_for(root):
    dataset = load(Options(no_finding=True), root)
    assert dataset.classes == (*CLASSES, "No Finding")
    found = named(dataset.train, dataset.classes)
    assert found == {name: set(ENTRIES[name].split("|")) for name in LISTS["train_val_list.txt"]}


@pytest.mark.parametrize("folder", [".", "PruneCXR"])
@pytest.mark.parametrize("thickening", ["Pleural_Thickening", "Pleural Thickening"])
def test_the_miccai_tables_come_first_where_they_are(root, folder, thickening):
    for part, names in LONG_TAIL.items():
        write_long_tail(root / folder / f"miccai2023_nih-cxr-lt_labels_{part}.csv", names, thickening)
    dataset = load(Options(), root)
    for split, part in ((dataset.train, "train"), (dataset.val, "val"), (dataset.test, "test")):
        assert named(split) == expected(LONG_TAIL[part])
    assert dataset.train.groups.tolist() == [1, 1]
    assert load(Options(no_finding=True), root).val.labels[0].tolist() == [0] * 14 + [1]


def test_one_miccai_table_asks_for_the_others(root):
    write_long_tail(root / "miccai2023_nih-cxr-lt_labels_train.csv", LONG_TAIL["train"])
    others = [root / f"miccai2023_nih-cxr-lt_labels_{part}.csv" for part in ("val", "test")]
    assert missing(root) == [f"'{path}' (beside the others)" for path in others]
    with pytest.raises(FedncaError, match=r"lacks '.*labels_val\.csv' \(beside the others\), '.*labels_test\.csv'"):
        load(Options(), root)


@pytest.mark.parametrize("name", ["Data_Entry_2017_v2020.csv", "train_val_list.txt", "test_list.txt"])
def test_a_missing_table_is_to_be_fetched_by_hand(root, name):
    (root / name).unlink()
    assert missing(root) == [f"'{root / name}' (from nihcc.app.box.com/v/ChestXray-NIHCC)"]
    with pytest.raises(FedncaError, match=rf"chestxray14 lacks '.*{name}'"):
        load(Options(), root)
    with pytest.raises(FedncaError, match=rf"chestxray14 lacks '.*{name}' .* put them there by hand"):
        prepare(root, silent)


def test_missing_images_fail_or_are_left_out(root):
    for name in ("00000001_001.png", "00000003_000.png"):
        next(root.glob(f"images_*/images/{name}")).unlink()
    assert len(missing(root)) == 1
    assert missing(root)[0].startswith("2 of 6 images, such as '")
    with pytest.raises(FedncaError, match=r"2 of 4 train images are not below '.*', the first is '00000003_000\.png'"):
        load(Options(), root)
    dataset = load(Options(missing_images="skip"), root)
    assert named(dataset.train) == expected(["00000001_000.png", "00000002_000.png"])
    assert dataset.train.groups.tolist() == [1, 2]


def test_a_split_without_any_image_fails_even_then(root):
    for name in LISTS["test_list.txt"]:
        next(root.glob(f"images_*/images/{name}")).unlink()
    with pytest.raises(FedncaError, match=r"2 of 2 test images are not below"):
        load(Options(missing_images="skip"), root)


def test_archives_whose_folders_stand_are_not_downloaded_again(root):
    next(root.glob("images_*/images/00000004_000.png")).unlink()
    for archive in ARCHIVES:
        (root / archive.folder).mkdir(exist_ok=True)
    with pytest.raises(
        FedncaError, match=r"lacks 1 of 6 images, such as '.*00000004_000\.png' \(of images_\*\.tar\.gz\)"
    ):
        prepare(root, silent)


def test_a_patient_on_both_sides_is_refused(root):
    (root / "test_list.txt").write_text("00000001_001.png\n")
    (root / "train_val_list.txt").write_text("00000001_000.png\n")
    with pytest.raises(FedncaError, match="patient 1 is in both train and test"):
        load(Options(), root)


def test_a_listed_image_without_an_entry_is_named(root):
    (root / "test_list.txt").write_text("00009999_000.png\n")
    with pytest.raises(
        FedncaError, match=r"test_list\.txt' names '00009999_000\.png', which the table of entries lacks"
    ):
        load(Options(), root)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["00000001_000.png,Mass|Unicorn,0,1"], "line 2 has the unknown finding 'Unicorn'"),
        (["00000001_000.png,,0,1"], "line 2 has the unknown finding ''"),
        (["00000001_000.png,Mass,0,1", "", "00000002_000.png,Mass"], "line 4 has only 2 fields"),
        (["00000001_000.png,Mass,0,one"], "line 2 has the patient 'one'"),
        (["a.png,Mass,0,1", "a.png,Mass,0,1"], r"line 3 repeats the image 'a\.png'; remove"),
        ([], "has no rows"),
    ],
)
def test_a_malformed_entry_is_named_with_its_line(tmp_path, lines, sentence):
    path = tmp_path / "Data_Entry_2017.csv"
    path.write_text("\n".join(["Image Index,Finding Labels,Follow-up #,Patient ID", *lines]))
    with pytest.raises(FedncaError, match=rf"Data_Entry_2017\.csv' {sentence}"):
        read_entries(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no column 'Image Index'"),
        (b"Image Index,Patient ID\n", "has no column 'Finding Labels'"),
        (b"\x89PNG\r\n\x1a\n\xff", "cannot be read"),
        (b"Image Index,Finding Labels,Patient ID\n" + b"x" * 200_000 + b",Mass,1\n", "line 2 cannot be read"),
    ],
)
def test_a_file_that_is_no_such_table_is_named(tmp_path, content, sentence):
    path = tmp_path / "Data_Entry_2017.csv"
    path.write_bytes(content)
    with pytest.raises(FedncaError, match=rf"Data_Entry_2017\.csv' {sentence}"):
        read_entries(path)


@pytest.mark.parametrize("value", ["2", "", "-1", "yes"])
def test_another_value_than_zero_and_one_is_named_with_its_line(tmp_path, value):
    path = tmp_path / "labels.csv"
    write_long_tail(path, ["00000001_000.png", "00000002_000.png"])
    first, *rows, last = path.read_text().splitlines()
    path.write_text("\n".join([first, *rows, last.replace("png,0", f"png,{value}", 1)]))
    with pytest.raises(FedncaError, match=rf"labels\.csv' line 3 has '{value}' for Hernia; give 0 or 1"):
        read_long_tail(path)


def test_malformed_tables_are_told_by_loading_and_do_not_count_as_missing(root):
    (root / "Data_Entry_2017_v2020.csv").write_text("nothing\n")
    assert missing(root) == []
    with pytest.raises(FedncaError, match="has no column 'Image Index'"):
        load(Options(), root)


def reference_sample(data_folder) -> dict[str, tuple[int, set[str]]]:
    """Read the labels of the sample of 4,999 images: stem → (patient, diseases)."""
    with (data_folder / "nih-sample/labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {row["image"][:12]: (int(row["patient"]), {c for c in CLASSES if row[c] == "1"}) for row in rows}


@pytest.mark.data
def test_the_real_files_in_their_official_layout_agree_with_the_sample(data_folder):
    reference = reference_sample(data_folder)
    dataset = load(Options(), data_folder / "nih-layout")
    assert (len(dataset.train), len(dataset.test)) == (7, 3)
    for split in (dataset.train, dataset.test):
        for (name, diseases), patient in zip(named(split).items(), split.groups, strict=True):
            assert (patient, diseases) == reference[name[:12]]


@pytest.mark.data
def test_the_real_sample_keeps_its_labels_and_patients(data_folder, tmp_path):
    """Write the sample's labels as NIH does, deal its patients to the lists, and read all that again."""
    reference = reference_sample(data_folder)
    entries = {f"{stem}.jpg": "|".join(sorted(found)) or NO_FINDING for stem, (_, found) in reference.items()}
    write_entries(tmp_path / "Data_Entry_2017.csv", entries)
    (tmp_path / "images").symlink_to(data_folder / "nih-sample/images")
    for name, lowest in (("train_val_list.txt", 0), ("test_list.txt", 8)):
        own = [image for image in entries if (int(image[:8]) % 10 >= 8) == (lowest == 8)]
        (tmp_path / name).write_text("\n".join(own))
    dataset = load(Options(), tmp_path)
    assert len(dataset.train) + len(dataset.test) == 4999
    assert not set(dataset.train.groups) & set(dataset.test.groups)
    labels = np.concatenate([dataset.train.labels, dataset.test.labels]).sum(axis=1)
    assert (np.count_nonzero(labels == 0), np.count_nonzero(labels >= 2)) == (2754, 824)
    for split in (dataset.train, dataset.test):
        for (name, diseases), patient in zip(named(split).items(), split.groups, strict=True):
            assert (patient, diseases) == reference[name[:12]]
