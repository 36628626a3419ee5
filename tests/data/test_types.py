import numpy as np
import pytest

from fednca.base.errors import FedncaError
from fednca.data.types import Dataset, Split

IMAGES = np.zeros((4, 2, 2, 3), np.uint8)
LABELS = np.zeros((4, 5), np.int8)


def test_a_split_counts_its_images():
    assert len(Split(IMAGES, LABELS, np.arange(4))) == 4


@pytest.mark.parametrize(
    ("images", "labels", "groups", "sentence"),
    [
        (IMAGES[..., 0], LABELS, None, r"images are uint8 of shape \(4, 2, 2\)"),
        (IMAGES.astype(float), LABELS, None, "images are float64"),
        (IMAGES, LABELS[:3], None, r"labels are int8 of shape \(3, 5\); give int8 of shape \(4, classes\)"),
        (IMAGES, LABELS + 2, None, "labels run from 2 to 2"),
        (IMAGES, LABELS.tolist(), None, "labels are a list; give a NumPy array"),
        (IMAGES, LABELS, np.arange(3), r"groups are int64 of shape \(3,\)"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(images, labels, groups, sentence):
    with pytest.raises(FedncaError, match=sentence):
        Split(images, labels, groups)


def test_a_dataset_refuses_label_columns_that_are_not_its_classes():
    split = Split(IMAGES, LABELS)
    with pytest.raises(FedncaError, match="toy train has 5 label columns for 2 classes"):
        Dataset("toy", ("cat", "dog"), split, None, split)


def test_a_dataset_refuses_two_classes_of_one_name_and_a_missing_split():
    split = Split(IMAGES, LABELS)
    with pytest.raises(FedncaError, match="toy has two classes of the name 'cat'; rename one"):
        Dataset("toy", ("cat", "dog", "cat", "owl", "fox"), split, None, split)
    with pytest.raises(FedncaError, match="toy test is a NoneType"):
        Dataset("toy", ("cat", "dog", "cow", "owl", "fox"), split, None, None)
