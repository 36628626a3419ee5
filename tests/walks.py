"""Print the modules that an image crosses from its file to a logit, and a weight in a round of the eager engine.

    python tests/walks.py

A module is crossed where one of its functions holds the thing in a variable: the file's path, pixels, the map or the
logits of the image; the weight itself, named tensors that contain it, or what carries those.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from helpers import TINY, tiny
from PIL import Image

import fednca
from fednca.config import load_config
from fednca.data.load import federate
from fednca.engines.contract import Trained
from fednca.engines.eager import EagerEngine
from fednca.engines.model import build_model
from fednca.engines.workplace import build_workplace
from fednca.methods import create_method
from fednca.methods.contract import Server, Update
from fednca.runs.checkpoint import State
from fednca.runs.rounds import play_rounds
from fednca.runs.training import first_state

ROOT = Path(fednca.__file__).parent
SIDE, WEIGHT = 17, "backbone.net.layer1.0.conv1.weight"  # a side that nothing else has


@contextmanager
def crossed(holds: Callable[[object], bool]):
    """Give the list of modules, in order, in which some function's variable holds a thing while the block runs."""
    modules: dict[str, None] = {}

    def look(frame: FrameType, event: str, value: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event in {"call", "return"} and ROOT in path.parents and any(map(holds, [value, *frame.f_locals.values()])):
            modules[str(path.relative_to(ROOT).with_suffix(""))] = None

    sys.setprofile(look)
    try:
        yield modules
    finally:
        sys.setprofile(None)


def walk_of_an_image(folder: Path) -> list[str]:
    """Read, store and score images of a folder with a table of labels."""
    (folder / "images").mkdir()
    rows = ["image,split,cat,dog"]
    rng = np.random.default_rng(0)
    for number in range(60):
        name = f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(folder / "images" / name)
        rows.append(f"{name},{('train', 'train', 'train', 'val', 'test')[number % 5]},{number % 2},{number % 3 % 2}")
    (folder / "labels.csv").write_text("\n".join(rows))
    own = {name: value for name, value in TINY.items() if name != "data.options"}
    changes = {"data.name": "folder", "data.root": str(folder), "data.cache": str(folder / "cache")}
    changes |= {"data.image_size": SIDE, "partition.gamma": 1.0, "partition.min_samples": 2}
    config = load_config("demo", own | changes)

    def holds(value: object) -> bool:
        if isinstance(value, Path):
            return value.suffix == ".png"
        if not isinstance(value, np.ndarray | torch.Tensor):
            return False
        shape = tuple(value.shape)
        pixels = len(shape) > 2 and shape.count(SIDE) > 1
        feature_map, logits = len(shape) == 4 and shape[1] == 64, shape == (12, 2)
        return pixels or (isinstance(value, torch.Tensor) and (feature_map or (logits and value.is_floating_point())))

    method = create_method(config)
    with crossed(holds) as modules:
        federation = federate(config)
        model = build_model(config, method, federation.dataset.classes, pretrained="none")
        place = build_workplace(config, method, federation, model, torch.device("cpu"))
        EagerEngine(place).predict(model.state_dict(), place.test, 256)
    return list(modules)


def walk_of_a_weight() -> list[str]:
    """Play one round of the eager engine."""
    config = tiny(method__name="fedavg", train__rounds=1)
    method, federation = create_method(config), federate(config)
    model = build_model(config, method, federation.dataset.classes, pretrained="none")
    place = build_workplace(config, method, federation, model, torch.device("cpu"))
    state, engine = first_state(method, model, len(place.train)), EagerEngine(place)
    shape = state.server.weights[WEIGHT].shape

    def holds(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            return value.shape == shape
        if isinstance(value, Server | Update | Trained | State):
            return True
        return isinstance(value, Mapping) and WEIGHT in value

    with crossed(holds) as modules:
        list(play_rounds(config, method, engine, state, lambda number, trained: None))
    return list(modules)


def main() -> None:
    """Print both walks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        image = walk_of_an_image(Path(temporary))
    for what, modules in (("image, from file to logit", image), ("weight, in an eager round", walk_of_a_weight())):
        sys.stdout.write(f"{what}: {len(modules)} modules\n  {' → '.join(modules)}\n")


if __name__ == "__main__":
    main()
