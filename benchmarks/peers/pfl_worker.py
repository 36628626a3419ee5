"""One pfl worker: `torchrun ... -m peers.pfl_worker FOLDER`, with a folder that `parcel` wrote."""

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from peers import parcel, pfl_peer


def main() -> None:
    folder = sys.argv[1]
    torch.set_num_threads(1)
    outcome = pfl_peer.run(parcel.load(folder))
    ended = time.perf_counter()
    if os.environ["RANK"] == "0":
        weights = {name: tensor.contiguous() for name, tensor in outcome.weights.items()}
        save_file(weights, Path(folder) / "final.safetensors")
        (Path(folder) / "ended.txt").write_text(str(ended))


if __name__ == "__main__":
    main()
