"""Text tables: files matched by name or order, the random stand-in, and CLIP behind a stand-in package."""

import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.testing import assert_close

from fednca.errors import FedncaError
from fednca.models.text import text_table

VOC = ["aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"]
VOC += ["diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"]
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def raw():
    return np.random.default_rng(0).normal(size=(4, 6))


def unit(rows):
    return np.stack([row / np.sqrt((row**2).sum()) for row in np.asarray(rows, dtype=np.float64)])


def test_rows_of_a_file_are_found_by_name(raw, tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, names=np.array(["Cat", "dining table", "couch", "car"]), table=raw.astype(np.float32))
    table, name = text_table(["sofa", "cat", "diningtable", "Automobile", "COUCH"], 6, str(path))
    np.testing.assert_allclose(table, unit(raw)[[2, 0, 1, 3, 2]], atol=1e-6)
    assert table.dtype == torch.float32
    assert name == "file own.npz"


def test_an_exact_name_comes_before_an_alias(raw, tmp_path):
    np.savez(tmp_path / "t.npz", names=np.array(["sofa", "couch", "car", "automobile"]), table=raw)
    table, _ = text_table(["couch", "sofa", "automobile", "car"], 6, str(tmp_path / "t.npz"))
    np.testing.assert_allclose(table, unit(raw)[[1, 0, 3, 2]], atol=1e-6)


@pytest.mark.parametrize("kind", ["npz", "npy", "safetensors"])
def test_a_file_without_names_is_taken_in_order(kind, raw, tmp_path):
    path = tmp_path / f"t.{kind}"
    save = {"npz": lambda: np.savez(path, table=raw), "npy": lambda: np.save(path, raw)}
    save.get(kind, lambda: save_file({"embeddings": raw}, path))()
    np.testing.assert_allclose(text_table(list("abcd"), 6, str(path))[0], unit(raw), atol=1e-6)
    with pytest.raises(FedncaError, match="has 4 rows and no names for 3 classes"):
        text_table(list("abc"), 6, str(path))


def test_missing_names_are_listed(raw, tmp_path):
    np.savez(tmp_path / "t.npz", names=np.array(list("abcd")), table=raw)
    with pytest.raises(FedncaError, match=r"t.npz' has no row for zebra, melanoma; add them"):
        text_table(["a", "zebra", "melanoma"], 6, str(tmp_path / "t.npz"))


def test_a_wider_space_keeps_all_angles_and_a_narrower_one_is_an_orthogonal_projection(raw, tmp_path):
    path = str(tmp_path / "t.npy")
    np.save(path, raw)
    wide, _ = text_table(list("abcd"), 50, path)
    np.testing.assert_allclose(wide @ wide.T, unit(raw) @ unit(raw).T, atol=1e-6)

    # identity rows show the projection itself: PPᵀ is a projector, up to the lengths its rows had before scaling to 1
    np.save(path, np.eye(6))
    narrow, _ = text_table(list("abcdef"), 3, path)
    assert_close(narrow.norm(dim=1), torch.ones(6))
    gram = narrow.double() @ narrow.double().T
    lengths = np.sqrt(
        np.linalg.solve(gram.numpy() ** 2, np.ones(6))
    )  # P = PP: p_ii = Σ_j p_ij², p_ij = l_i l_j gram_ij
    projector = gram.numpy() * np.outer(lengths, lengths)
    np.testing.assert_allclose(projector @ projector, projector, atol=1e-5)

    assert torch.equal(text_table(list("abcdef"), 3, path)[0], narrow)
    assert not torch.allclose(text_table(list("abcdef"), 3, path, seed=1)[0], narrow, atol=0.1)


def test_the_stand_in_is_orthonormal_seeded_and_named():
    table, name = text_table(VOC, 32, "random")
    np.testing.assert_allclose(table @ table.T, np.eye(20), atol=1e-6)
    assert name == "random orthonormal stand-in"
    assert torch.equal(table, text_table(VOC, 32, "random")[0])
    assert not torch.allclose(table, text_table(VOC, 32, "random", seed=1)[0], atol=0.1)
    with pytest.raises(FedncaError, match="20 orthonormal vectors do not fit in 16 dimensions"):
        text_table(VOC, 16, "random")


def write_broken(folder, kind):
    path = folder / "t.npz"
    if kind == "not a zip":
        path.write_bytes(b"nonsense")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickled":
        np.savez(path, names=np.array(["a", None]), table=np.ones((2, 3)))
    elif kind == "keys":
        np.savez(path, one=np.ones((2, 3)), two=np.ones((2, 3)))
    elif kind == "shape":
        np.savez(path, table=np.ones(3))
    elif kind == "words":
        np.savez(path, table=np.array([["a"], ["b"]]))
    elif kind == "names":
        np.savez(path, names=np.array(["a"]), table=np.ones((2, 3)))
    elif kind == "zero":
        np.savez(path, table=np.eye(2, 3) * [[1], [0]])
    elif kind == "nan":
        np.savez(path, table=np.full((2, 3), np.nan))
    elif kind == "safetensors":
        path = folder / "t.safetensors"
        path.write_bytes(b"nonsense")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("absent", r"cannot be read \(.*\); give another text table"),
        ("not a zip", r"cannot be read \(.*\); give another text table"),
        ("empty", r"cannot be read \(.*\); give another text table"),
        ("pickled", r"cannot be read \(.*\); give another text table"),
        ("safetensors", r"cannot be read \(.*\); give another text table"),
        ("keys", r"has no array 'table' \(found: one, two\)"),
        ("shape", r"is float64 of shape \(3,\); give a matrix"),
        ("words", "is <U.* of shape .*; give a matrix"),
        ("names", "names 1 of its 2 rows"),
        ("zero", "zero or not finite"),
        ("nan", "zero or not finite"),
    ],
)
def test_a_broken_file_is_one_sentence(kind, sentence, tmp_path):
    with pytest.raises(FedncaError, match=sentence):
        text_table(["a", "b"], 3, write_broken(tmp_path, kind))


FAKE = """
import torch

def create_model(architecture, pretrained):
    torch.rand(10)  # building a network draws from the global generator
    assert (architecture, pretrained) == ("ViT-B-32-quickgelu", "openai")
    return Tower()

def get_tokenizer(architecture):
    return lambda prompts: prompts

class Tower(torch.nn.Module):
    def encode_text(self, prompts):
        return torch.tensor([[float(len(prompt)), float(prompt.count("a")), 1.0] for prompt in prompts])
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package in open_clip's place, and the cache into a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        sys.modules.pop("open_clip", None)
        (tmp_path / "open_clip.py").write_text(text)

    yield write
    sys.modules.pop("open_clip", None)


def test_auto_is_clip_where_it_is_installed_and_is_computed_once(install):
    install(FAKE)
    torch.manual_seed(0)
    expected_draw = torch.rand(3)
    torch.manual_seed(0)
    table, name = text_table(["cat", "hair_drier"], 3)
    assert torch.equal(torch.rand(3), expected_draw)
    # "The photo contains cat." has 23 letters, 2 of them an a; "The photo contains hair drier." has 30, also 2
    np.testing.assert_allclose(table, unit([[23, 2, 1], [30, 2, 1]]), atol=1e-6)
    assert name == "CLIP ViT-B/32"

    install("def create_model(*_, **__): raise AssertionError('computed twice')")
    assert torch.equal(text_table(["cat", "hair_drier"], 3)[0], table)


def test_weights_that_cannot_be_fetched_are_one_sentence_and_no_stand_in(install):
    install("def create_model(*_, **__): raise ConnectionError('no route to host')")
    with pytest.raises(FedncaError, match=r"CLIP's weights 'openai' could not be loaded \(no route to host\)"):
        text_table(["cat"], 3)


def test_without_open_clip_auto_is_the_stand_in_and_clip_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert text_table(["cat"], 3)[1] == "random orthonormal stand-in"
    with pytest.raises(
        FedncaError, match=r"'clip' needs the package 'open_clip': pip install 'fednca\[clip\]', or use random"
    ):
        text_table(["cat"], 3, "clip")


@pytest.mark.data
def test_real_clip_tables_serve_voc_cifar_and_coco(data_folder):
    folder = data_folder / "clip"
    voc, name = text_table(VOC, 512, str(folder / "voc20.npz"))
    assert name == "file voc20.npz"
    np.testing.assert_allclose(voc, unit(np.load(folder / "voc20.npz")["table"]), atol=1e-6)
    cifar, _ = text_table(CIFAR10, 512, str(folder / "cifar10.npz"))
    np.testing.assert_allclose(cifar, unit(np.load(folder / "cifar10.npz")["table"]), atol=1e-6)
    # COCO's table knows all of VOC's classes, under its own words
    assert_close(text_table(VOC, 512, str(folder / "coco80.npz"))[0], voc, rtol=0, atol=1e-3)
    with pytest.raises(FedncaError, match="has no row for deer, frog, ship"):
        text_table(CIFAR10, 512, str(folder / "voc20.npz"))
