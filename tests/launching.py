"""`python -m tests.launching`: a whole worker of each family, every kernel launched as on a GPU
down to a stand-in for libcuda (`saccade_bench.lab.aot_launch`): warm-up, steps as of graphs,
prompts, images, drawn tokens, caches of 8 bits.

Nothing is computed: each token is the same. What is asked is that no launch is refused, and that
kernels are compiled abreast before the first request.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton

from saccade.core.config import EncoderConfig, KVConfig, KVDtype, StepGraphSizes
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.plugins.gpu.triton import sample as sample_gpu
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.runtime import worker
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.aot_launch import digest_of, once, stubbed
from tests.families.every import SEEING
from tests.fixtures import tiny
from tests.fixtures.harness import Harness, set_threads
from tests.helpers.shown import shown_canvas

DRAWN = 7
"""What every row draws: nothing computes it."""


def traffic(over: Harness) -> list[Request]:
    """Prompts of several lengths, an image, tokens drawn and taken."""
    rng = np.random.default_rng(0)
    spec: Any = over.net.spec
    asked = []
    for at in range(7):
        tokens = [int(each) for each in rng.integers(5, 60, rng.integers(1, 60))]
        shown = []
        if at == 0:
            pixels, mark = shown_canvas(spec)
            tokens.insert(len(tokens) // 2, mark)
            shown = [over.image(pixels, "one")]
        way: dict[str, Any] = {} if at % 2 else {"temperature": 1.0, "top_p": 0.9, "top_k": 5}
        asked.append(over.request(str(at), tokens, shown, max_tokens=5, seed=at, **way))
    return asked


def run(family: str, kept: KVDtype) -> list[str]:
    """What went wrong with a family whose cache has that format."""
    drawn = sample_gpu.launch_sample

    def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        return drawn(*args, **kwargs).fill_(DRAWN)

    def finite(rows: torch.Tensor) -> torch.Tensor:
        """Nothing is computed here: what memory holds may be no number."""
        return torch.ones(len(rows), dtype=torch.bool)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        tiny.make_checkpoint(folder, family)
        cpu = torch.device("cpu")
        net = load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=cpu, ops=TritonOps())
        unit = net.spec.patch_unit
        towers = tuple(-(-size // unit) * unit for size in (64, 1024))
        alone: list[str] = []

        def compiled(*, repr: str, **_: Any) -> None:
            if not threading.current_thread().name.startswith("compile"):
                alone.append(repr)

        try:
            with (
                patch.object(triton.knobs.runtime, "jit_post_compile_hook", compiled),
                patch.object(sample_gpu, "launch_sample", draw),
                patch.object(worker, "finite_rows", finite),
                patch.object(worker, "quieten", finite),
            ):
                sizes: dict[str, Any] = {"max_running": 12, "page_size": 4, "chunk_tokens": 64}
                over = Harness(
                    net,
                    dtype="bfloat16",
                    context_length=512,
                    kv_pages=600,
                    encoder=EncoderConfig("triton", towers),
                    graphs=StepGraphSizes((1, 4, 12), (0, 4), (8, 32)),
                    kv=KVConfig(kept),
                    **sizes,
                )
                asked = traffic(over)
                outcomes = over.run(asked)
        except Exception as error:  # whatever Triton or the launcher raises is the outcome
            return [f"{family}: {type(error).__name__}: {str(error)[:400]}"]
    return [f"{family}: {name} is compiled where it is launched" for name in alone] + [
        f"{family}: request {id} ended after {len(each.tokens)} tokens: {each.error}"
        for id, each in outcomes.items()
        if each.error or len(each.tokens) != 5
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a launch fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.launching", description=__doc__)
    parser.add_argument("families", nargs="*", default=SEEING)
    args = parser.parse_args(argv)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as saccade_bench.lab.aot

    def work() -> list[str]:
        bad = []
        set_threads()
        with stubbed() as stub:
            for family in args.families:
                before = stub.launches
                bad += run(family, "fp8_e4m3" if family == "qwen3_vl" else "auto")
                print(f"{family}: {stub.launches - before} launches")
        return bad

    return once(digest_of(["saccade", "bench/saccade_bench/lab", "tests"], *args.families), work)


if __name__ == "__main__":
    sys.exit(main())
