"""What `saccade size` says of a model is what a real server of it says and takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from saccade.core.config import MIB
from saccade.plugins.model_router.process_memory import tree_bytes
from saccade.plugins.size.report import SizeInput, measure
from saccade_bench.fixtures.server import serving
from saccade_bench.lab.checkpoint import make_checkpoint, write_weights

pytestmark = pytest.mark.more

MARGIN = 256 * MIB
"""Between the estimate and PSS. Libraries differ by machine, packed matrices share pieces of 18
MiB, and a start that compiles kernels takes some 100 MiB more.
"""


@pytest.mark.parametrize("preset", ["tiny-qwen3-vl", "small-qwen3.5", "small-qwen3-vl"])
def test_a_server_takes_what_was_said(preset: str, tmp_path: Path) -> None:
    folder = make_checkpoint(preset, tmp_path / preset)
    write_weights(folder, 0, torch.bfloat16)
    limits = ("--max-total-tokens", "8192", "--embedding-cache-device-mb", "64")
    asked = SizeInput(str(folder), device="cpu", limits=(None, None, 8192), embedding_mb=64)
    sizes = measure(asked).estimate
    lines = {line.name: line for line in sizes.lines}
    with serving(folder, tmp_path, *limits) as server:
        taken, log = tree_bytes(server.process.pid), server.log.read_text()
    said = re.search(r"grows by .*: (\d+) of KV .* (\d+) of embeddings .* (\d+) of pixels", log)
    assert said is not None, log
    kinds = ("KV cache", "image embeddings", "pixels")
    assert [int(number) for number in said.groups()] == [
        pytest.approx(lines[kind].full / MIB, abs=1) for kind in kinds
    ]
    loaded = sum(line.needed for name, line in lines.items() if name.startswith(("prog", "weig")))
    assert abs(taken - loaded) < MARGIN, f"{taken / MIB:.0f} MiB, not {loaded / MIB:.0f}"
