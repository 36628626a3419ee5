"""Run one row in its own process: `python -m peers.one ROW CONFIG THREADS FOLDER [--synthetic]`.

It writes `outcome.json` to the folder and, if the row has any, the final `weights.safetensors`.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from fednca.base.errors import FedncaError
from fednca.config import load_config
from peers.rows import ROWS
from peers.work import load_work, synthetic_work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("row")
    parser.add_argument("config", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synthetic", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = load_config(given.config)
    work = synthetic_work(config) if given.synthetic else load_work(config)
    load_before = os.getloadavg()[0]
    try:
        outcome = ROWS[given.row].run(work)
    except FedncaError as error:
        answer = {"left_out": str(error)}
    else:
        steps, images = work.count()
        answer = {"seconds": outcome.seconds, "steps": steps, "images": images, "load_before": load_before}
        if work.device.type == "cuda":
            answer["memory"] = torch.cuda.max_memory_reserved(work.device)
        if outcome.weights is not None:
            weights = {name: tensor.cpu().contiguous() for name, tensor in outcome.weights.items()}
            save_file(weights, given.folder / "weights.safetensors")
    (given.folder / "outcome.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
