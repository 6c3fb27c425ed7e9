"""Attention of other packages, called as they want it. Where they are not installed, stand-ins with
their signatures compute what their documentation says: FlashAttention-3 as of commit 01afd16 of its
repository (`hopper/flash_attn_interface.py`), FlashInfer 0.7.2 (`flashinfer/decode.py`). Where they
are, tests/gpu compares them with Triton's kernels.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from saccade.core.config import Hardware
from saccade.core.errors import ConfigError
from saccade.core.settings import CudaSettings
from saccade.engine.sizing import pick_tower_attention
from saccade.kernels.language_attention import possible
from saccade.kernels.reference.paged import (
    AttentionBackend,
    PagedCache,
    PagedRows,
    PagedShape,
    paged_attention_reference,
    plain_cache,
)
from saccade.kernels.reference.segments import Segments, sdpa_segments
from saccade.plugins.gpu import backend
from saccade.plugins.gpu.libraries import installed
from saccade.plugins.gpu.tower_attention import TOWERS
from saccade.plugins.gpu.triton.language_attention import ATTENTION
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.runtime import attention as runtime_attention
from saccade.runtime.attention import attention_for, pick_attention

pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)
LIBRARIES: tuple[str, ...] = ("fa3", "flashinfer")
PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


# ---- stand-ins


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Lines of the table, lengths and beginnings are int32, a line for each row."""
    assert causal and k is None and v is None and max_seqlen_q is not None
    _, page, heads, dim = k_cache.shape
    rows = len(cache_seqlens)
    assert page_table.shape[0] == rows == len(cu_seqlens_q) - 1 and cu_seqlens_q[0] == 0
    assert {each.dtype for each in (page_table, cache_seqlens, cu_seqlens_q)} == {torch.int32}
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_q[-1]) == len(q)
    there = PagedRows(cu_seqlens_q, cache_seqlens, torch.arange(rows), page_table, page, 0)
    kept = plain_cache(k_cache.view(-1, heads, dim), v_cache.view(-1, heads, dim))
    return paged_attention_reference(q, kept, there, softmax_scale or dim**-0.5)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Heads are multiples of 8."""
    assert not causal and q.shape[-1] % 8 == 0 and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
    segments = Segments(cu_seqlens_q, max_seqlen_q)
    return sdpa_segments(q, k, v, segments, softmax_scale or q.shape[-1] ** -0.5)


class BatchDecodeWithPagedKVCacheWrapper:
    planned: list[tuple[int, ...]]
    """Rows of each plan that was made, of all wrappers."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph
        assert not float_workspace_buffer.any(), "zeros, for its first use"

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        assert {each.dtype for each in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(indices) == int(indptr[-1]) and len(indptr) == len(last_page_len) + 1
        assert ((last_page_len > 0) & (last_page_len <= page_size) | (indptr.diff() == 0)).all()
        self._facts = indptr, indices, last_page_len
        self._shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._dtypes = q_data_type, kv_data_type
        self._scale = sm_scale or head_dim**-0.5
        BatchDecodeWithPagedKVCacheWrapper.planned.append(tuple(last_page_len.tolist()))

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor:
        bounds, indices, last = self._facts
        heads, kv_heads, dim, page = self._shape
        k, v = paged_kv_cache
        assert q.shape == (len(last), heads, dim) and k.shape[1:] == (page, kv_heads, dim)
        assert (q.dtype, k.dtype) == self._dtypes
        pages = bounds.diff()
        table = torch.zeros((len(last), int(pages.max())), dtype=torch.int32)
        for row, mine in enumerate(indices.split(pages.tolist())):
            table[row, : len(mine)] = mine
        ones = torch.arange(len(last) + 1, dtype=torch.int32)
        lengths = ((pages - 1) * page + last).int()
        there = PagedRows(ones, lengths, torch.arange(len(last)), table, page, 0)
        kept = plain_cache(
            k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim), k_scale or 1.0, v_scale or 1.0
        )
        out.copy_(paged_attention_reference(q, kept, there, self._scale))
        return out


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the packages, installed or not."""
    fa3, flashinfer = ModuleType("flash_attn_interface"), ModuleType("flashinfer")
    vars(fa3).update(
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )
    name = "BatchDecodeWithPagedKVCacheWrapper"
    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "planned", [], raising=False)
    vars(flashinfer)[name] = BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(installed, "find_fa3", lambda: "flash_attn_interface")
    installed.load_fa3.cache_clear()
    yield
    installed.load_fa3.cache_clear()


# ---- what is asked of them


def step(
    lengths: Sequence[tuple[int, int]], kept: torch.dtype
) -> tuple[torch.Tensor, PagedCache, PagedRows]:
    """Queries, a cache and rows of (tokens, keys), on pages and lines in no order."""
    random = torch.Generator().manual_seed(0)
    pages = [-(-keys // PAGE) for _, keys in lengths]
    order = 1 + torch.randperm(sum(pages), generator=random)
    table = torch.full((len(lengths) + 2, max(pages) + 1), 10**6, dtype=torch.int32)
    lines = torch.randperm(len(table), generator=random)[: len(lengths)]
    for line, mine in zip(lines, order.split(pages)):
        table[line, : len(mine)] = mine.int()
    slots = (1 + sum(pages)) * PAGE
    k, v = (torch.randn(slots, KV_HEADS, DIM, generator=random).to(kept) for _ in range(2))
    scales = (1.0, 1.0) if kept == torch.float16 else (0.5, 2.0)
    starts = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0).int()
    totals = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    singles = [tokens for tokens, _ in lengths].count(1)
    fused = torch.randn(int(starts[-1]), HEADS + 3, DIM, generator=random).half()
    rows = PagedRows(starts, totals, lines, table, PAGE, singles)
    return fused[:, :HEADS], plain_cache(k, v, *scales), rows


def made(name: str, kept: torch.dtype = torch.float16) -> AttentionBackend:
    return ATTENTION[name].make(PagedShape(KV_HEADS, DIM, PAGE, kept, torch.float16))


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 9), (1, 1), (5, 20), (3, 3), (4, 8)],
        [(1, 8), (1, 13)],
        [(7, 7), (2, 30)],
    ],
    ids=["mixed", "decode", "prompts"],
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_see_what_they_see_by_the_reference(
    standing_in: None, name: str, lengths: list[tuple[int, int]]
) -> None:
    q, cache, rows = step(lengths, torch.float16)
    ours = made(name)
    wanted = paged_attention_reference(q, cache, rows, DIM**-0.5)
    for _ in range(2):  # as many steps
        ours.plan(rows)
        for _ in range(2):  # as many layers
            torch.testing.assert_close(ours(q, cache), wanted, atol=2e-3, rtol=0.0)
    if name == "flashinfer":
        steps = 2 if rows.singles else 0
        assert len(BatchDecodeWithPagedKVCacheWrapper.planned) == steps, "once a step"


def test_flashinfer_reads_a_cache_of_eight_bits(standing_in: None) -> None:
    q, cache, rows = step([(1, 9), (1, 5)], torch.float8_e4m3fn)
    ours = made("flashinfer", torch.float8_e4m3fn)
    ours.plan(rows)
    wanted = paged_attention_reference(q, cache, rows, DIM**-0.5)
    torch.testing.assert_close(ours(q, cache), wanted, atol=2e-3, rtol=0.0)


@pytest.mark.parametrize("dim", [16, 36, 72])
def test_segments_of_the_tower_by_fa3(standing_in: None, dim: int) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 30, 2, dim, generator=random).unbind()
    segments = Segments(torch.tensor([0, 12, 12, 30], dtype=torch.int32), 18)
    ours = TOWERS["fa3"](q, k, v, segments, dim**-0.5)
    wanted = sdpa_segments(q, k, v, segments, dim**-0.5)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("package", "name", "recorded"),
    [
        ("flash_attn_interface", "flash_attn_with_kvcache", flash_attn_with_kvcache),
        ("flash_attn_interface", "flash_attn_varlen_func", flash_attn_varlen_func),
    ],
)
def test_installed_packages_have_the_recorded_parameters(
    package: str, name: str, recorded: Any
) -> None:
    """Those that we give, at least."""
    there = inspect.signature(getattr(pytest.importorskip(package), name)).parameters
    given = {"softmax_scale", "causal", "cu_seqlens_q", "max_seqlen_q"}
    assert given <= {*there} and given <= {*inspect.signature(recorded).parameters}


# ---- who takes them


@pytest.mark.parametrize("there", [False, True])
def test_auto_takes_neither(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Before they were measured."""
    monkeypatch.setattr("saccade.kernels.device.generation", lambda _: 90)
    table = dict(ATTENTION)
    for name in LIBRARIES:
        table[name] = replace(table[name], find=object if there else lambda: None)
    ops = TritonOps()
    monkeypatch.setattr(ops, "attention", table)
    names = possible(table, CUDA, torch.bfloat16)
    assert names == (("triton", *LIBRARIES) if there else ("triton",))
    assert possible(table, CUDA, torch.float32) == ("triton",), "they know 16 bits alone"
    for graphs in (False, True):
        assert pick_attention("auto", ops, CUDA, torch.bfloat16, graphs=graphs) == "triton"
    for name in LIBRARIES if there else ():
        assert pick_attention(name, ops, CUDA, torch.bfloat16) == name
    if there:
        with pytest.raises(ConfigError, match="flashinfer: its steps cannot be captured"):
            pick_attention("flashinfer", ops, CUDA, torch.bfloat16, graphs=True)


@pytest.mark.parametrize(
    ("name", "package", "how"),
    [
        ("fa3", "FlashAttention-3", "scripts/install.py kernels"),
        ("flashinfer", "flashinfer", "scripts/install.py flashinfer-python"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_how_to_come_by_it(
    name: str, package: str, how: str
) -> None:
    if ATTENTION[name].installed:
        pytest.skip("it is installed")
    with pytest.raises(
        ConfigError, match=f"--attention-backend {name}: {package} is not inst.*{how}"
    ):
        pick_attention(name, TritonOps(), CUDA, torch.bfloat16)


def test_fa3_reads_no_cache_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_attention, "pick_attention", lambda *_, **__: "fa3")
    keys = torch.zeros((8, KV_HEADS, DIM), dtype=torch.float8_e4m3fn)
    with pytest.raises(
        ConfigError, match="fa3: it does not support an 8-bit cache; use --kv-cache-dtype"
    ):
        attention_for({0: (keys, keys)}, PAGE, dtype=torch.bfloat16, ops=TritonOps())


@pytest.mark.parametrize("arch", [80, 90])
def test_the_tower_by_fa3_wants_a_hopper_and_the_package(
    monkeypatch: pytest.MonkeyPatch, arch: int
) -> None:
    wanted = CudaSettings(mm_attention_backend="fa3").mm_attention_backend
    card = Hardware("cuda", "", 1, 1, arch=arch)
    monkeypatch.setattr(backend, "find_fa3", lambda: "sgl_kernel")
    if arch == 90:
        assert pick_tower_attention(wanted, "cuda", card.arch, half=True) == "fa3"
        monkeypatch.setattr(backend, "find_fa3", lambda: None)
    with pytest.raises(ConfigError, match="fa3: it needs a GPU of compute capability"):
        pick_tower_attention(wanted, "cuda", card.arch, half=True)
    with pytest.raises(ConfigError, match="fa3: it needs a dtype of 16 bits"):
        pick_tower_attention(wanted, "cuda", 90, half=False)


@pytest.mark.parametrize(
    ("measured", "package", "arch", "half", "picked"),
    [
        ({}, "kernels", 90, True, "triton"),
        ({14_400: 1.2, 3584: 1.1}, "kernels", 90, True, "fa3"),
        ({14_400: 1.2, 3584: 0.9}, "kernels", 90, True, "triton"),
        ({14_400: 1.2}, None, 90, True, "triton"),
        ({14_400: 1.2}, "kernels", 100, True, "triton"),
        ({14_400: 1.2}, "kernels", 90, False, "triton"),
    ],
    ids=["not measured", "faster", "slower once", "not installed", "Blackwell", "32 bits"],
)
def test_the_tower_takes_fa3_by_default_where_it_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
    measured: dict[int, float],
    package: str | None,
    arch: int,
    half: bool,
    picked: str,
) -> None:
    monkeypatch.setattr(backend, "find_fa3", lambda: package)
    monkeypatch.setattr(backend, "FA3_SPEEDUP", measured)
    assert pick_tower_attention("auto", "cuda", arch, half=half) == picked


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Adds a package to those that can be imported, whose functions say which module has them."""
    monkeypatch.syspath_prepend(tmp_path)
    names = {"flash_attn_interface", "sgl_kernel", "kernels"}

    def forget() -> None:
        for name in [each for each in sys.modules if each.split(".")[0] in names]:
            del sys.modules[name]
        installed.load_fa3.cache_clear()

    def add(module: str, text: str = "def flash_attn_varlen_func(): return __name__") -> None:
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        invalidate_caches()
        forget()

    forget()
    yield add
    forget()


def test_fa3_is_taken_from_whichever_package_has_it(packages: Callable[..., None]) -> None:
    if installed.find_fa3() is not None:
        pytest.skip("FlashAttention-3 is installed")
    fetched = "class Build:\n    @staticmethod\n    def flash_attn_varlen_func(): return 'fetched'"
    packages("kernels", f"{fetched}\ndef get_kernel(name, version): return Build")
    assert installed.load_fa3("flash_attn_varlen_func")() == "fetched"
    packages("sgl_kernel.other")  # a release without FlashAttention-3
    assert installed.find_fa3() == "kernels"
    packages("sgl_kernel.flash_attn")
    assert installed.load_fa3("flash_attn_varlen_func")() == "sgl_kernel.flash_attn"
    packages("flash_attn_interface")
    assert installed.load_fa3("flash_attn_varlen_func")() == "flash_attn_interface"


def test_fa3_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_fa3", lambda: None)
    installed.load_fa3.cache_clear()
    with pytest.raises(ImportError, match=r"is not installed: .*install\.py kernels"):
        installed.load_fa3("flash_attn_varlen_func")
