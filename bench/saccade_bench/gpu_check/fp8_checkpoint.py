"""Write a checkpoint of a preset with random weights in FP8, for stage `serving-fp8`. It is a
separate process, so that the server finds the GPU's memory free.

Weights are generated and quantized on the GPU, because a CPU takes minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from saccade_bench.lab.checkpoint import make_checkpoint, make_folder, write_weights
from saccade_bench.lab.quantise import quantise_checkpoint


def main(preset: str, out: str, device: str) -> None:
    """Write `preset` to the folder `out`."""
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        whole, folder, place = Path(name) / "model", Path(out), torch.device(device)
        make_checkpoint(preset, whole)
        if not any(whole.glob("*.safetensors")):
            write_weights(whole, 0, torch.bfloat16, device=place)
        make_folder(folder)
        quantise_checkpoint(whole, folder, place)


if __name__ == "__main__":
    main(*sys.argv[1:])
