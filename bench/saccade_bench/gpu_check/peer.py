"""Stage `peer`: the time that transformers takes for the shapes of stage `serving`, on the same GPU
and config with random weights: the first token of a prompt with a new image, and each later token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from saccade_bench.gpu_check.figures import Figure, FigureFile, run_stage
from saccade_bench.lab.checkpoint import make_checkpoint

SIZES = {"720p": (720, 1280), "1440p": (1440, 2560)}
"""Heights and widths in pixels."""
WORDS = 100
TOKENS = 32
REPEATS = 3


class Peer:
    """A transformers model, and prompts for it."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        self._config = AutoConfig.from_pretrained(folder)
        self._device = torch.device(device)
        half = torch.bfloat16 if device == "cuda" else torch.float32
        with self._device:
            model = AutoModelForImageTextToText.from_config(self._config, dtype=half)
        self._model: Any = model.eval()

    def prompt(self, height: int, width: int) -> dict[str, torch.Tensor]:
        """Return a prompt with an image of about this size in pixels, and `WORDS` text tokens."""
        config, vision = self._config, self._config.vision_config
        patch, merge = vision.patch_size, vision.spatial_merge_size
        rows, columns = (each // (patch * merge) * merge for each in (height, width))
        inputs = vision.in_channels * vision.temporal_patch_size * patch * patch
        shown = [config.image_token_id] * (rows * columns // merge**2)
        image = [config.vision_start_token_id, *shown, config.vision_end_token_id]
        tokens = torch.tensor([[*image, *range(1, 1 + WORDS)]], device=self._device)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == config.image_token_id).int(),
            "pixel_values": torch.randn(rows * columns, inputs, device=self._device),
            "image_grid_thw": torch.tensor([[1, rows, columns]], device=self._device),
        }

    def seconds(self, prompt: dict[str, torch.Tensor], tokens: int) -> float:
        """Return the minimum time of several runs that generate `tokens` tokens."""
        least = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            with torch.inference_mode():
                out = self._model.generate(
                    **prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )
            assert out.shape[1] == prompt["input_ids"].shape[1] + tokens
            least = min(least, time.perf_counter() - began)
        return least


def measure(args: Any, file: FigureFile) -> None:
    preset = "tiny-qwen3-vl" if args.quick else args.preset
    sizes = {"96p": (96, 160)} if args.quick else SIZES
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        peer = Peer(make_checkpoint(preset, Path(name) / "model"), args.device)
        for size, (height, width) in sizes.items():

            def work(size: str = size, height: int = height, width: int = width) -> None:
                prompt = peer.prompt(height, width)
                first, whole = peer.seconds(prompt, 1), peer.seconds(prompt, 1 + TOKENS)
                metric = f"transformers, {preset}, one new image at {size}"
                note = f"{prompt['input_ids'].shape[1]} tokens of prompt, no HTTP"
                file.add(Figure(f"{metric}, TTFT", 1e3 * first, "ms", note=note))
                each = 1e3 * (whole - first) / TOKENS
                file.add(Figure(f"{metric}, a token", each, "ms", note="batch 1"))

            file.attempt(f"transformers at {size}", work)


def main() -> int:
    return run_stage("peer", __doc__, measure)


if __name__ == "__main__":
    sys.exit(main())
