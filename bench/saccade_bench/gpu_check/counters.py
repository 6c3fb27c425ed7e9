"""Stage `counters`: ncu's hardware counters of the most important kernels, for one call of each:
the attention of the largest image, of a prompt with a long prefix and of 64 decoding sequences, a
matrix product with FP8 weights, and the sampler.

The report is written to counters.txt. With --calls, this module is the process that ncu profiles.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial

import torch

from saccade.kernels.matrix import Fp8Matrix
from saccade.kernels.reference.fp8 import to_fp8
from saccade.kernels.reference.paged import plain_cache
from saccade.plugins.gpu.triton.fp8 import launch_fp8
from saccade.plugins.gpu.triton.paged import launch_paged
from saccade.plugins.gpu.triton.sample import launch_sample
from saccade.plugins.gpu.triton.segments import launch_segments
from saccade_bench.gpu_check.attention import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    TOWER_DIM,
    TOWER_HEADS,
    rows_of,
)
from saccade_bench.gpu_check.figures import FigureFile, stage_arguments
from saccade_bench.gpu_check.machine import ROOT

MODULE = "saccade_bench.gpu_check.counters"
KERNELS = "regex:_attend|_prefill|_decode|_product|_sample"
SECTIONS = ("SpeedOfLight", "Occupancy", "WarpStateStats")
MAX_LAUNCHES = "9"


def call_each(device: torch.device) -> None:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    tokens = 14_400
    q, k, v = noise(tokens, 3 * TOWER_HEADS, TOWER_DIM).chunk(3, dim=1)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    launch_segments(q, k, v, bounds, bounds, tokens, TOWER_DIM**-0.5)
    for new, keys in (([3650], [25_600]), ([1] * 64, [1024] * 64)):
        rows = rows_of(new, keys, device)
        slots = int(rows.page_table.max() + 1) * PAGE
        cache = plain_cache(noise(slots, KV_HEADS, DIM), noise(slots, KV_HEADS, DIM))
        launch_paged(noise(sum(new), HEADS, DIM), cache, rows, DIM**-0.5)
    weight = Fp8Matrix(to_fp8(noise(19_456, 2560)), torch.ones(19_456, 1, device=device), 2560)
    for count in (1, 64):
        launch_fp8(noise(count, 2560), weight)
        logits = torch.randn(count, 151_936, device=device)
        logits[:, :40] *= 8  # as with trained models, a few tokens are much likelier
        lines = torch.arange(count, device=device)
        table = torch.tensor([[1.0, 0.0, 0.95, 0.0]] * count, device=device)
        uniforms = torch.rand(count, dtype=torch.float64, device=device)
        launch_sample(logits, lines, table, uniforms)
    torch.cuda.synchronize()


def run_ncu(seconds: float, text: str) -> None:
    """Run ncu. Raises CalledProcessError or TimeoutExpired."""
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = ["ncu", "--clock-control", "none", *sections, "-k", KERNELS, "-c", MAX_LAUNCHES]
    calls = [sys.executable, "-m", MODULE, "--figures", text, "--calls"]
    subprocess.run([*command, "--log-file", text, *calls], cwd=ROOT, timeout=seconds, check=True)


def main() -> int:
    args = stage_arguments(__doc__)
    if args.calls:
        call_each(torch.device(args.device))
        return 0
    file = FigureFile(args.figures)
    if args.device == "cpu" or shutil.which("ncu") is None:
        print("ncu is not installed here, or there is no GPU")
        return 0
    text = args.figures.with_name("counters.txt")
    file.attempt("counters", partial(run_ncu, args.seconds, str(text)))
    print(text.read_text() if text.is_file() else "")
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
