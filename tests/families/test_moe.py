"""Experts: the answers are transformers', whichever way the checkpoint keeps them and however many
ranks share them; an expert without rows is not touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.config import QuantizationMode
from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec
from saccade.kernels.matrix import DenseMatrix, Fp8Experts
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference import moe
from saccade.kernels.reference.moe import Experts, Routes, route
from saccade.kernels.reference.ops import Ops
from saccade.nn.moe import MoEShape, SparseMLP
from saccade.parallel import Shard
from saccade.runtime.weights import checkpoint_weights as weights
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.dummy import DummyWeights
from saccade.runtime.weights.quant_policy import LoadTally, QuantPolicy
from tests.families.conftest import Refused
from tests.families.forwarding import CPU, LOGITS, Session, load, prompt
from tests.fixtures.rank_group import shards, together
from tests.fixtures.tiny import Reference, make_checkpoint
from tests.helpers.processor import HAS_BACKEND, needs_int8
from tests.quantising import FORMATS, quantise

MOE = "qwen3_vl_moe"
SHAPE = MoEShape(hidden=64, width=40, experts=8, top=2, act="silu")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with an expert's matrix, in the order in which they are made."""
    rows: list[int] = []

    real = moe.expert_mlp

    def counting(
        x: torch.Tensor, shares: Any, visits: Any, experts: Any, product: Any, gate: Any
    ) -> torch.Tensor:
        def count(some: torch.Tensor, matrix: Any) -> Any:
            rows.append(len(some))
            return product(some, matrix)

        return real(x, shares, visits, experts, count, gate)

    monkeypatch.setattr(moe, "expert_mlp", counting)
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
    each = Ops().expert_mlp(
        x, routes, Experts([*map(DenseMatrix, up)], [*map(DenseMatrix, down)]), "silu"
    )
    grouped = Ops().stacked_mlp(x, *routes, up, down)
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


HALVES = pick_ops(CPU, torch.bfloat16)
FEW_ROWS = 32
"""Of `plugins/cpu/ops.py`, which needs Numba."""
needs_numba = pytest.mark.skipif(not HAS_BACKEND, reason="Numba is not installed")


def layer_of(hidden: int, width: int, experts: int) -> Experts:
    torch.manual_seed(0)
    sizes = (2 * width, hidden), (hidden, width)
    ups, downs = (
        [DenseMatrix((torch.randn(size) / 8).bfloat16()).ready(HALVES) for _ in range(experts)]
        for size in sizes
    )
    return Experts(ups, downs, HALVES.locate(ups, downs))


@needs_numba
@pytest.mark.parametrize("rows", [1, 7, FEW_ROWS])
def test_a_few_rows_compiled_are_the_products_one_by_one(rows: int) -> None:
    """bfloat16 rounds to 2 ** -8 of a value; first: this rank has the experts from there on."""
    layer = layer_of(128, 64, 6)
    if layer.places is None:
        pytest.skip("this processor multiplies no bfloat16")
    x, routes = torch.randn(rows, 128).bfloat16(), route(torch.randn(rows, 9).bfloat16(), 3)
    for first in (0, 3):
        made = HALVES.expert_mlp(x, routes, layer, "silu", first).float()
        each = HALVES.expert_mlp(x, routes, layer._replace(places=None), "silu", first).float()
        torch.testing.assert_close(made, each, atol=0.03 * float(each.abs().max()), rtol=0.02)


@needs_numba
def test_compiled_products_read_the_experts_that_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.plugins.cpu.ops import X86Ops

    layer = layer_of(128, 64, 6)
    if layer.places is None:
        pytest.skip("this processor multiplies no bfloat16")
    seen: list[Sequence[tuple[int, int]]] = []
    from saccade.plugins.cpu.moe import compiled_experts as real

    def count(*given: Any) -> torch.Tensor:
        seen.append(given[3])
        return real(*given)

    monkeypatch.setattr(X86Ops, "few_experts", staticmethod(count))
    x = torch.randn(FEW_ROWS + 1, 128).bfloat16()
    routes = route(torch.randn(FEW_ROWS + 1, 6).bfloat16(), 2)
    HALVES.expert_mlp(x[:1], Routes(routes.experts[:1], routes.shares[:1]), layer, "silu")
    assert seen == [[(expert, 1) for expert in sorted(routes.experts[0].tolist())]]
    HALVES.expert_mlp(x, routes, layer, "silu")
    assert len(seen) == 1, "more rows are products of their own"


@needs_numba
def test_matrices_in_an_unknown_layout_are_left_to_their_products() -> None:
    assert layer_of(64, 40, 2).places is None, "40 values of an expert are no panel"
    assert layer_of(60, 64, 2).places is None, "nor are 60 of a row"
    assert layer_of(64, 16, 4).places is None, "a gate and what it gates share no panel"


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
@pytest.mark.parametrize(("size", "runs"), [(1, 1), (2, 1), (4, 1), (1, 2), (4, 4), (4, 2), (2, 4)])
def test_experts_fused_or_apart_are_cut_among_ranks(
    checkpoint: Callable[..., Path], tmp_path: Path, layout: str, size: int, runs: int
) -> None:
    """A rank has a slice of each expert, or some experts, or a slice of some; the sum over ranks is
    the whole layer's answer.
    """
    from saccade.families.qwen_vl.net import QwenVLModel
    from saccade.runtime.weights.checkpoint_weights import CheckpointWeights

    source = checkpoint(MOE)
    folder = source if layout == "fused" else set_apart(source, tmp_path / "apart")
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    name = "language_model.layers.0.mlp"

    def build(folder: Path, shard: Shard) -> SparseMLP:
        with CheckpointWeights(folder, QwenVLModel.canonical_name, torch.float32, CPU) as found:
            return SparseMLP(found, name, SHAPE, shard)

    whole = build(source, Shard(0, 1))(x)
    rank_group = [shard.spread(size, runs) for shard in shards(max(size, runs))]
    for mine in together(lambda shard: build(folder, shard)(x), rank_group):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=0)


def logits(folder: Path, mode: QuantizationMode, size: int = 1) -> tuple[torch.Tensor, str]:
    """Of a text, and what start-up says of quantised matrices; of several ranks the first's."""
    tally, spec = LoadTally(), load_spec(folder)

    def work(shard: Shard) -> torch.Tensor:
        net = load_net(
            spec,
            folder,
            dtype=torch.float32,
            device=CPU,
            shard=shard.spread(1, size),
            quantization=mode,
            tally=tally if shard.rank == 0 else None,
        )
        return Session(net, [5, 6, 7, 8, 9], [], page_size=16).prefill()

    return together(work, shards(size))[0], tally.line(torch.float32)


def turn(source: Path, folder: Path) -> Path:
    """The checkpoint with the matrices of all experts turned about."""
    shutil.copytree(source, folder)
    found = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FUSED = [
    pytest.param(
        *(family, turned),
        id=f"{family}{'-turned' if turned else ''}",
        marks=[pytest.mark.slow] if turned == (family == MOE) else [],
    )
    for family in (MOE, "qwen3_5_moe")
    for turned in (False, True)
]
"""Families, each as its checkpoints are on the hub and with its experts turned about."""


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("width", [40, 64, 32], ids=["oblong", "square down", "square up"])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_fused_experts_are_read_either_way(tmp_path: Path, family: str, width: int) -> None:
    """Also where one of the two tensors is square and fits both ways."""
    source = make_checkpoint(tmp_path / "usual", family, text={"moe_intermediate_size": width})
    usual, _ = logits(source, "none")
    folder = turn(source, tmp_path / "turned")
    assert torch.equal(logits(folder, "none")[0], usual)
    torch.testing.assert_close(logits(folder, "none", size=2)[0], usual, **LOGITS)


def test_fused_experts_that_fit_neither_way_are_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One of the two tensors is turned about, the other is not."""
    folder = turn(checkpoint(MOE), tmp_path / "half")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj is \[8, 80, "
    ):
        logits(folder, "none")


@pytest.mark.more
@pytest.mark.parametrize(("family", "turned"), FUSED)
def test_fused_experts_in_fp8_answer_as_their_twin(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    turned: bool,
) -> None:
    """Block scales of tensors of all experts; no block ends where gates do, nor where a rank's
    experts do.
    """
    source = turn(checkpoint(family), tmp_path / "turned") if turned else checkpoint(family)
    quantised, twin = quantise(source, FORMATS["fp8 blocks"], tmp_path)
    whole, _ = logits(twin, "none")
    made, line = logits(quantised, "none")
    assert torch.equal(made, whole) and "converted to float32 at load" in line
    shared, _ = logits(quantised, "none", size=4)
    torch.testing.assert_close(shared, whole, **LOGITS)
    # The CPU stands in for a GPU whose products take FP8.
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    kinds: set[object] = set()

    class Stacking(Ops):
        stacks = True

        def stacked_mlp(self, *given: Any) -> torch.Tensor:
            kinds.update(map(type, given[3:5]))
            return super().stacked_mlp(*given)

    monkeypatch.setattr(weights, "pick_ops", lambda *_: Stacking())
    block = {"weight_block_size": [16, 16]}
    sixteen = replace(FORMATS["fp8 blocks"], block=(16, 16))
    sixteen = replace(sixteen, settings={**sixteen.settings, **block})
    quantised, twin = quantise(source, sixteen, tmp_path / "sixteen")
    kept, line = logits(quantised, "auto")
    assert kinds == {Fp8Experts} and "in fp8, as the checkpoint has them" in line
    torch.testing.assert_close(kept, logits(twin, "none")[0], **LOGITS)
    torch.testing.assert_close(logits(quantised, "auto", size=2)[0], kept, **LOGITS)


def test_fused_experts_without_their_scales_are_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, _ = quantise(checkpoint(MOE), FORMATS["fp8 blocks"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj_scale_inv"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"no file has the tensor {name}, the scales of"):
        logits(folder, "none")


@needs_int8
@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_int8_are_near_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, turned: bool
) -> None:
    """Where no row goes to other experts: one that does has another answer."""
    folder = turn(checkpoint(MOE), tmp_path / "turned") if turned else checkpoint(MOE)
    whole, _ = logits(folder, "none")
    made, line = logits(folder, "int8")
    assert "matrices of the language model in int8, made at load" in line
    assert torch.nn.functional.cosine_similarity(made, whole).min() > 0.998
    shared, _ = logits(folder, "int8", size=2)
    torch.testing.assert_close(shared, made, **LOGITS)


@needs_int8
@pytest.mark.parametrize("outputs_first", [False, True])
def test_a_layer_of_experts_in_int8_is_near_itself(outputs_first: bool) -> None:
    shape = replace(SHAPE, outputs_first=outputs_first)
    tally = LoadTally()
    policy = QuantPolicy(lambda name: ".experts." in name, made="int8", native=True, tally=tally)
    kinds = DummyWeights(torch.float32, CPU), DummyWeights(torch.float32, CPU, policy=policy)
    layers = [SparseMLP(kind, "mlp", shape, Shard()) for kind in kinds]
    x = torch.randn(32, SHAPE.hidden, generator=torch.Generator().manual_seed(3))
    whole, made = (layer(x) for layer in layers)
    assert tally.kinds["int8"].count == 2 * SHAPE.experts
    assert torch.nn.functional.cosine_similarity(made, whole).min() > 0.9995


def test_figures_that_cannot_be_are_refused(refused: Refused) -> None:
    words = "num_experts_per_tok must be from 1 to 8"
    refused(MOE, "config.json", words, text_config={"num_experts_per_tok": 9})


def test_ranks_must_divide_an_experts_width(checkpoint: Callable[..., Path]) -> None:
    cuts = load_spec(checkpoint(MOE)).cuts
    assert cuts.obstacles(4) == () and cuts.obstacles(16)[-1] == "40 values of an expert"
