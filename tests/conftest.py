import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import tiny

# Ctrl-C reaches the processes that tests start, also where whoever started the tests ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread: the networks of the tests are too small to share, and a loaded machine would make them wait.
torch.set_num_threads(1)

CIFAR10 = Path(os.environ.get("FEDNCA_CIFAR10", ""))
DATA = Path(os.environ.get("FEDNCA_DATA", Path(__file__).parents[2] / "shared/data"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Keep the tests out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def config(tmp_path):
    """The path of a file with the settings of a run that takes a second."""
    path = tmp_path / "tiny.toml"
    path.write_text(tiny(train__rounds=2).to_toml())
    return str(path)


@pytest.fixture
def data_folder():
    """The folder of real data, for tests marked `data`."""
    return DATA


@pytest.fixture
def cifar10_folder():
    """The folder of the real CIFAR-10, for tests marked `cifar10`."""
    return CIFAR10


def pytest_collection_modifyitems(config, items):
    """Leave out tests of real data and of CUDA where there is none."""
    missing = {
        "data": not DATA.is_dir(),
        "cifar10": "FEDNCA_CIFAR10" not in os.environ,
        "gpu": not torch.cuda.is_available(),
        "browser": not Path(os.environ.get("CHROMIUM", "/usr/bin/chromium")).is_file(),
    }
    left_out = [item for item in items if any(missing[mark] for mark in missing if item.get_closest_marker(mark))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
