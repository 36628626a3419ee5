import numpy as np
import pytest
from PIL import Image

from fednca.data.types import FileImages


@pytest.fixture
def files(tmp_path):
    """Forty images of forty shapes, in a folder with a name that is not ASCII."""
    folder, rng = tmp_path / "Bilder für ü", np.random.default_rng(0)
    folder.mkdir()
    paths = tuple(folder / f"{i:02}.{'jpg' if i % 2 else 'png'}" for i in range(40))
    for i, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (5 + i, 30 - i // 2, 3), dtype=np.uint8)).save(path)
    return FileImages(paths)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"
