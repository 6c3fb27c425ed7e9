"""Numba's kernels for bfloat16 on a CPU beside what PyTorch makes of the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("numba")
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import PagedRows, paged_attention_reference, plain_cache
from saccade.kernels.reference.rotary import Pairs, Rotation, rotary_tables
from saccade.plugins.cpu import disk_cache
from saccade.plugins.cpu.kernel import SHARED_VALUES
from saccade.plugins.cpu.long_attention import softmax_to_bfloat16
from saccade.plugins.cpu.numba_call import BLOCK_KEYS
from saccade.plugins.cpu.paged import decode_paged
from tests.helpers.processor import HAS_BACKEND, threads

if not HAS_BACKEND:
    pytest.skip("only for x86-64", allow_module_level=True)
OURS, PLAIN = pick_ops(torch.device("cpu"), torch.bfloat16), Ops()
STEP = 2.0**-8
"""Between a number and the next in bfloat16, at most, in parts of it."""
PAGES, PAGE = 64, 16


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def near(ours: torch.Tensor, wanted: torch.Tensor, steps: int = 1) -> bool:
    return torch.allclose(ours.float(), wanted.float(), rtol=steps * STEP, atol=steps * 1e-5)


class Case:
    """Sequences of these lengths, each on pages anywhere, of which one token decodes."""

    def __init__(self, lengths: list[int], kv_heads: int, group: int, dim: int) -> None:
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).int()
        counts = [-(-length // PAGE) for length in lengths]
        table = torch.full((len(lengths) + 2, max(counts)), 1 << 30, dtype=torch.int32)
        for line, pages in enumerate(order.split([*counts, PAGES - sum(counts)])[:-1]):
            table[line + 1, : len(pages)] = pages
        self.rows = PagedRows(
            torch.arange(len(lengths) + 1, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.arange(len(lengths)) + 1,
            table,
            PAGE,
            len(lengths),
        )
        shape = (PAGES * PAGE, kv_heads, dim)
        self.cache = plain_cache(noise(*shape), noise(*shape, seed=1))
        self.q = noise(len(lengths), kv_heads * group, dim, seed=2) * 2
        self.scale = dim**-0.5

    def attend(self, rows: slice = slice(None)) -> torch.Tensor:
        q = self.q[rows]
        mine = PagedRows(
            self.rows.q_starts,
            self.rows.kv_lengths[rows],
            self.rows.lines[rows],
            self.rows.page_table,
            PAGE,
            len(q),
        )
        return decode_paged(q, self.cache, mine, self.scale)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"), [(2, 3, 16), pytest.param(8, 2, 128, marks=pytest.mark.slow)]
)
def test_a_token_attends_to_its_own_sequence(kv_heads: int, group: int, dim: int) -> None:
    case = Case([1, 3, BLOCK_KEYS, BLOCK_KEYS + 1, 2 * BLOCK_KEYS + 31], kv_heads, group, dim)
    wanted = paged_attention_reference(case.q.float(), case.cache, case.rows, case.scale)
    assert near(case.attend(), wanted, 2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_rows_bits_depend_on_no_other_row_nor_on_threads(count: int) -> None:
    case = Case([300, 7, 130], 2, 3, 16)
    together = case.attend()
    with threads(count):
        alone = torch.cat([case.attend(slice(row, row + 1)) for row in range(3)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("dim", "turned", "pairs", "normed"), [(16, 16, "halves", True), (72, 40, "neighbours", False)]
)
def test_queries_and_keys_are_turned_and_cached(
    dim: int, turned: int, pairs: Pairs, normed: bool
) -> None:
    tokens, heads, kv_heads = 5, 6, 2
    qkv, slots = noise(tokens, heads + 2 * kv_heads, dim), torch.tensor([3, 9, 1, 7, 30])
    weight = 1 + 0.1 * noise(heads + kv_heads, dim, seed=1)
    norm = QKNorm(weight, 1e-6) if normed else None
    angles = 10 * noise(tokens, turned // 2, seed=2).float()
    rotation = Rotation(*rotary_tables(angles, pairs), pairs=pairs)

    def work(ops: Ops) -> torch.Tensor:
        empty = torch.zeros(32, kv_heads, dim).bfloat16()
        cache = plain_cache(empty, empty.clone())
        q = ops.rope_and_cache(qkv.clone(), kv_heads, rotation, norm, cache, slots)
        return torch.cat([each.flatten() for each in (q, cache.keys, cache.values)])

    wanted, ours = work(PLAIN), work(OURS)
    # A norm that is rounded otherwise moves a sum of two turned values by a step of either, and
    # they may be near 4.
    assert torch.allclose(ours.float(), wanted.float(), rtol=STEP, atol=8 * STEP)
    assert near(ours[-32 * kv_heads * dim :], wanted[-32 * kv_heads * dim :])  # as they are


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stream_is_added_to_and_normalised(dtype: torch.dtype) -> None:
    """By weights of either dtype, in the same order of sums for one row as for many."""
    x, delta, weight = noise(70, 200), noise(70, 200, seed=1), noise(200, seed=2).to(dtype)
    ours, wanted = (torch.cat(ops.add_rms_norm(x, delta, weight, 1e-6)) for ops in (OURS, PLAIN))
    assert near(ours, wanted, 2)
    assert torch.equal(ours[:70], x + delta)
    assert torch.equal(OURS.rms_norm(ours[:70], weight, 1e-6), ours[70:])
    alone = [OURS.rms_norm(ours[at : at + 1], weight, 1e-6) for at in range(70)]
    assert torch.equal(torch.cat(alone), ours[70:])


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_rows_are_normalised_by_mean_and_variance(offset: float) -> None:
    x, delta = noise(7, 200) + offset, noise(7, 200, seed=1)
    weight, bias = noise(200, seed=2), noise(200, seed=3)
    total, normed = OURS.add_layer_norm(x, delta, weight, bias, 1e-6)
    assert torch.equal(total, x + delta)
    wanted = F.layer_norm(total.double(), (200,), weight.double(), bias.double(), 1e-6)
    assert torch.allclose(normed.double(), wanted, rtol=STEP, atol=1e-5)  # rounded once
    assert torch.equal(OURS.layer_norm(total, weight, bias, 1e-6), normed)


@pytest.mark.parametrize(("frames", "patch", "merge"), [(1, 14, 2), (2, 16, 2), (1, 16, 1)])
def test_bytes_of_patches_are_centred(frames: int, patch: int, merge: int) -> None:
    size = (frames, 2 * patch * merge, 3 * patch * merge, 3)
    pixels = torch.randint(256, size, generator=torch.Generator().manual_seed(0)).byte()
    pixels[0, 0, :2] = torch.tensor([0, 255, 128])
    ours, wanted = (o.centre_patches(pixels, patch, merge, torch.bfloat16) for o in (OURS, PLAIN))
    assert torch.equal(ours, wanted) and ours.float().abs().max() == 128


def test_heads_are_turned_where_they_lie() -> None:
    tokens, heads, dim = 5, 6, 72
    rotation = Rotation(*rotary_tables(10 * noise(tokens, dim // 2, seed=2).float()))
    qkv = noise(tokens, heads + 3, dim)
    ours, wanted = qkv.clone(), qkv.clone()
    OURS.rotate_(rotation, ours[:, :heads])
    PLAIN.rotate_(rotation, wanted[:, :heads])
    assert torch.allclose(ours.float(), wanted.float(), rtol=STEP, atol=1e-5)
    assert torch.equal(ours[:, heads:], qkv[:, heads:]) and not torch.equal(ours, qkv)


@pytest.mark.parametrize("act", ["gelu_tanh", "quick_gelu"])
def test_an_activation_is_one_pass(act: Activation) -> None:
    x = 4 * noise(3, 5001)
    x[0, :4] = torch.tensor([torch.inf, 0.0, 200.0, -200.0])
    ours, wanted = OURS.activate(x, act), PLAIN.activate(x.double(), act)
    assert torch.allclose(ours.double(), wanted, rtol=STEP + 1e-6, atol=1e-6)  # rounded once


def test_a_gate_is_applied() -> None:
    gate_up = noise(3, 10_000) * 4
    gate_up[0, :4] = torch.tensor([torch.inf, -torch.inf, 200.0, -200.0])
    ours, wanted = (ops.gate(gate_up, "silu") for ops in (OURS, PLAIN))
    assert near(ours[:, 4:], wanted[:, 4:])
    assert near(ours[0, [0, 2, 3]], wanted[0, [0, 2, 3]])  # PyTorch makes NaN of -inf


def test_threads_change_no_bit() -> None:
    gate_up = noise(SHARED_VALUES // 1024, 4096)
    with threads(1):
        alone = OURS.gate(gate_up, "silu")
    with threads(3):
        assert torch.equal(OURS.gate(gate_up, "silu"), alone)


def test_only_bfloat16_is_compiled_for() -> None:
    assert OURS.name == "x86"
    assert pick_ops(torch.device("cpu"), torch.float32).name == Ops.name


LATER = """
import sys
import torch
from saccade.plugins.cpu import disk_cache
from saccade.plugins.cpu import attention, resize, vnni
from saccade.plugins.cpu.ops import X86Ops

if X86Ops().takes_int4:
    vnni.function("product_8")
if resize.vector_bytes():
    resize.functions()
if kind := attention.best_isa():
    attention.functions(64, kind, torch.bfloat16)
print(X86Ops().gate(torch.full((2, 64), 1.5, dtype=torch.bfloat16), "silu").tolist()[1][5])
print(len(disk_cache.USED_FILES.made), "numba" in sys.modules, "llvmlite" in sys.modules)
"""


@pytest.mark.more
def test_a_later_process_takes_kernels_from_disk_without_a_compiler(tmp_path: Path) -> None:
    def run() -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", LATER]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return told.stdout.split()

    first = run()
    count = int(first[1])
    assert count > 0 and first[2:] == ["True", "True"]
    later = [first[0], "0", "False", "False"]
    assert run() == later
    folder = tmp_path / "saccade" / "code"
    kept = [path for path in folder.iterdir() if path.name != disk_cache.LOCK_FILE]
    assert len(kept) == count
    for each in kept:
        whole = each.read_bytes()
        torn = bytes(byte ^ 255 for byte in whole[200:208])
        each.write_bytes(whole[:200] + torn + whole[208:])
    assert run() == first, "what is torn is compiled again"
    assert run() == later


@pytest.mark.parametrize("keys", [1, 7, 300])
def test_weights_are_a_softmax_rounded_once(keys: int) -> None:
    scores = 8 * torch.randn(21, keys, generator=torch.Generator().manual_seed(keys))
    scores[3:, keys // 2 + 1 :] = -torch.inf
    wanted = scores.softmax(-1)
    weights = softmax_to_bfloat16(scores)
    assert weights.dtype == torch.bfloat16 and near(weights, wanted)
    assert not (weights[3:, keys // 2 + 1 :] > 1e-37).any(), "what is masked counts nothing"
