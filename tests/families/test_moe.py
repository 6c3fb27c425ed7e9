"""Experts: the answers are transformers', whichever way the checkpoint keeps them and however many
ranks share them; an expert without rows is not touched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec
from saccade.kernels import moe
from saccade.kernels.experts import stack_experts
from saccade.kernels.linear import linear
from saccade.kernels.moe import Experts, expert_mlp, route
from saccade.nn.moe import MoEShape, SparseMLP
from saccade.parallel import Shard
from saccade.runtime.dummy import DummyWeights
from tests.checkpoints import Reference
from tests.families.forwarding import CPU, Session, load
from tests.families.test_parity import LOGITS, pixels, prompt
from tests.parallel.crew import shards, together

MOE = "qwen3_vl_moe"
SHAPE = MoEShape(hidden=64, width=40, experts=8, top=2, act="silu")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with an expert's matrix, in the order in which they are made."""
    rows: list[int] = []

    def count(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr(moe, "linear", count)
    return rows


def test_one_row_touches_its_own_experts_and_no_others(touched: list[int]) -> None:
    layer = SparseMLP(DummyWeights(torch.float32, CPU), "mlp", SHAPE, Shard(0, 1))
    layer(torch.randn(1, 64))
    assert touched == [1] * SHAPE.top * 2, "gate and up, then down, of two experts"
    touched.clear()
    layer(torch.randn(5, 64))
    assert sum(touched) == 2 * 5 * SHAPE.top, "each row once for each of its experts: no padding"
    assert len(touched) <= 2 * SHAPE.experts and min(touched) > 0


def test_a_decoding_step_of_a_model_touches_so_many_experts_a_layer(
    reference: Callable[..., Reference], touched: list[int]
) -> None:
    theirs = reference(MOE)
    session = Session(load(theirs.folder), prompt(theirs, 0), [], page_size=16)
    session.prefill()
    touched.clear()
    session.decode(41)
    assert touched == [1] * 2 * 2 * 2, "two of three layers have experts (mlp_only_layers: [1])"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype) -> None:
    """What a GPU computes, here on a CPU; some experts have no rows."""
    torch.manual_seed(0)
    x = torch.randn(9, 64, dtype=dtype)
    up, down = torch.randn(8, 80, 64, dtype=dtype) / 8, torch.randn(8, 64, 40, dtype=dtype) / 6
    logits = torch.randn(9, 8, dtype=dtype)
    logits[:, 3] = -9
    routes = route(logits, 2)
    each = expert_mlp(x, routes, Experts(list(up), list(down)), "silu")
    stacked = Experts(stack_experts([*up]), stack_experts([*down]))
    grouped = expert_mlp(x, routes, stacked, "silu")
    torch.testing.assert_close(grouped, each, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
    slow = torch.zeros_like(x, dtype=torch.float64)
    for row, (chosen, shares) in enumerate(zip(*routes)):
        for expert, share in zip(chosen.tolist(), shares.tolist()):
            gate, value = (up[expert].double() @ x[row].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * value
            slow[row] += share * (down[expert].double() @ inner)
    torch.testing.assert_close(
        each.double(), slow, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0
    )


@pytest.mark.parametrize("count", [0, 2])
def test_logits_equal_the_reference(reference: Callable[..., Reference], count: int) -> None:
    theirs = reference(MOE)
    images = pixels(theirs, count)
    session = Session(load(theirs.folder), prompt(theirs, count), images, page_size=16)
    torch.testing.assert_close(session.prefill(7), theirs.logits(session.tokens, images), **LOGITS)


def set_apart(source: Path, folder: Path) -> Path:
    """The checkpoint with three matrices for each expert."""
    shutil.copytree(source, folder)
    found: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj") or ".experts." not in name:
            found[name] = value
            continue
        base, kind = name.rsplit(".", 1)
        for number, matrix in enumerate(value):
            if kind == "down_proj":
                found[f"{base}.{number}.down_proj.weight"] = matrix.t().contiguous()
                continue
            for each, half in zip(("gate", "up"), matrix.t().chunk(2)):
                found[f"{base}.{number}.{each}_proj.weight"] = half.contiguous()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", ["fused", "apart"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_fused_or_apart_are_cut_among_ranks(
    checkpoint: Callable[..., Path], tmp_path: Path, layout: str, size: int
) -> None:
    """Of each expert a rank has a slice; the sum over ranks is the whole layer's answer."""
    from saccade.families.qwen_vl.net import canonical_name
    from saccade.runtime.weights import CheckpointWeights

    source = checkpoint(MOE)
    folder = source if layout == "fused" else set_apart(source, tmp_path / "apart")
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    name = "language_model.layers.0.mlp"

    def build(folder: Path, shard: Shard) -> SparseMLP:
        with CheckpointWeights(folder, canonical_name, torch.float32, CPU, progress=False) as found:
            return SparseMLP(found, name, SHAPE, shard)

    whole = build(source, Shard(0, 1))(x)
    ranks = together(lambda shard: build(folder, shard)(x), shards(size))
    for mine in ranks:
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=0)


def test_eight_requests_answer_as_transformers(tmp_path: Path) -> None:
    from tests.engine import test_parity as parity
    from tests.engine.harness import Harness

    model = parity.load(MOE, tmp_path)
    harness = Harness(model.net, chunk_tokens=64)
    for _ in range(2):  # cold, then from the prefix cache
        parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))


def test_figures_that_cannot_be_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(MOE), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok must be from 1 to 8"):
        load_spec(folder)


def test_ranks_must_divide_an_experts_width(checkpoint: Callable[..., Path]) -> None:
    cuts = load_spec(checkpoint(MOE)).cuts
    assert cuts.obstacles(4) == () and cuts.obstacles(16)[-1] == "40 values of an expert"
