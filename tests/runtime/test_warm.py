"""What requests launch was compiled before: each launch is named by what Triton would compile it
for, and nothing has a name that the start did not give.

Nothing is computed: kernels are replaced by what notes their launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.config import EncoderConfig
from saccade.core.family import KVSpec
from saccade.core.types import AdapterRef, Caching, Request
from saccade.kernels import device as placement
from saccade.nn.low_rank import LANGUAGE, Factors
from saccade.nn.protocol import FamilyNet
from saccade.parallel import UNSHARDED
from saccade.plugins.changes.adapters import AdapterTable, open_table
from saccade.plugins.gpu import triton as triton_kernels
from saccade.plugins.models.deepseek_vl2.spec import DeepseekSpec
from saccade.plugins.models.gemma3.spec import Gemma3Spec
from saccade.plugins.models.gemma4.spec import Gemma4Spec
from saccade.plugins.models.lfm2_vl.spec import Lfm2Spec
from saccade.plugins.models.minicpm.spec import MiniCPMSpec
from saccade.runtime.weights import checkpoint_weights as weights
from saccade.runtime.worker import Worker
from saccade_bench.lab.qwen import tell_grid
from tests.families.forwarding import load
from tests.fixtures.families.gemma4 import EXPERTS
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import make_checkpoint, picture
from tests.packing import PACKED, quantise_packed
from tests.quantising import FORMATS, SCALES_BY_ROWS, quantise

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from saccade.plugins.gpu.triton.ops import TritonOps

MODULES = [each.name for each in iter_modules(triton_kernels.__path__)]
DRAWN = 7


class Noted:
    """In place of a kernel: what each launch would be compiled for."""

    def __init__(self, kernel: Any, names: dict[str, set[str]]) -> None:
        # The interpreter's stand-in for a kernel keeps what the decorator was told.
        options = {} if isinstance(kernel, JITFunction) else kernel.kwargs
        self._kernel = (
            kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **options)
        )
        backend = make_backend(GPUTarget("cuda", 90, 32))
        binder = create_function_from_signature(
            self._kernel.signature, self._kernel.params, backend
        )
        self._binder: Callable[..., Any] = binder
        self._names = names[kernel.fn.__name__]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            bound, specialised, options = self._binder(*args, **kwargs)
            self._names.add(f"{specialised} {options}")
            if "tokens" in bound and isinstance(bound["tokens"], torch.Tensor):
                bound["tokens"].fill_(DRAWN)
            if "experts" in bound:  # whose numbers are looked up
                bound["experts"].zero_()

        return launch


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """By kernel, what launches would be compiled for."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in MODULES:
        module = import_module(f"saccade.plugins.gpu.triton.{each}")
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, KernelInterface):
                monkeypatch.setattr(module, name, Noted(kernel, found))
    set_threads()
    yield found


def kinds(kept: KVSpec) -> set[tuple[tuple[int, ...], int | None, bool]]:
    """Layers whose attention differs: shape of the cache, window, and whether images see themselves
    whole.
    """
    return {
        ((each.heads, each.dim), each.window, each.both_ways)
        for each in kept.attention.values()
        if each.owns
    }


def traffic(over: Harness, seed: int) -> list[Request]:
    """Prompts of many lengths, pictures of many sizes, every way to draw."""
    rng = np.random.default_rng(seed)
    spec: Any = over.net.spec
    mark = spec.placeholder.marks[0]
    sides: tuple[int, int] | None = None  # of images that all have one size
    if isinstance(spec, Gemma3Spec):
        sides = (spec.vision.side,) * 2
    elif isinstance(spec, Gemma4Spec):
        factor = 1
    elif isinstance(spec, DeepseekSpec):
        sides = (2 * spec.images.side, spec.images.side)
    elif isinstance(spec, MiniCPMSpec | Lfm2Spec):
        factor = spec.images.unit
    else:
        factor = spec.images.factor
    asked = []
    for at in range(int(rng.integers(1, 12))):
        tokens = [int(each) for each in rng.integers(5, 60, rng.integers(1, 40))]
        shown = []
        if at % 3 == 0:
            h, w = (int(each) for each in rng.integers(1, 9, 2))
            if isinstance(spec, Gemma4Spec):
                h, w = spec.recipe(h, w, spec.pixel_bounds).canvas
            h, w = sides or (h * factor, w * factor)
            pixels = np.ascontiguousarray(picture(h, w, seed=at))
            if isinstance(spec, MiniCPMSpec | Lfm2Spec):
                tell_grid(pixels, (h // factor, w // factor))
            tokens.insert(len(tokens) // 2, mark)
            shown = [over.image(pixels, f"{seed} {at}")]
        way: dict[str, Any] = {} if at % 2 else {"temperature": 1.0, "top_p": 0.9, "top_k": 5}
        if at % 4 == 1:
            way = {"repetition_penalty": 1.1, "min_tokens": 1, "logit_bias": ((9, 1.0),)}
        length = int(rng.integers(1, 6))
        asked.append(over.request(str(at), tokens, shown, max_tokens=length, seed=at, **way))
    return asked


def check(net: FamilyNet, names: dict[str, set[str]], attention: Any = "triton") -> None:
    """What traffic launches was launched at the start: of attention a kernel for each size of
    heads and of windows, of prompts also with images that see themselves.
    """
    kept = net.spec.kv_spec()
    layers = kinds(kept)
    shapes = {shape for shape, *_ in layers}
    sizes: dict[str, Any] = {"max_running": 12, "page_size": 4, "chunk_tokens": 24, "kv_pages": 600}
    over = Harness(net, encoder=EncoderConfig(attention), context_length=512, **sizes)
    known = {name: set(each) for name, each in names.items()}
    assert len(known["_prefill"]) == sum(1 + both for *_, both in layers)
    ways = 1 + (1 + net.spec.position_axes) % 2  # slots, behind positions, may begin at odd places
    assert len(known["_rope_and_cache"]) == (0 if kept.latent else ways * len(shapes))
    assert len(known["_sample"]) == 2, "with masks and without"
    assert len(known["_edit"]) == 2 and len(known["_count"]) == 1
    assert len(known["_share"]) == len(known["_decode"]) == len(known["_merge"]) == len(layers)
    for seed in range(3):
        over.run(traffic(over, seed))
    for name, each in names.items():
        assert each <= known.get(name, set()), f"{name} is compiled within a request"


@pytest.mark.first
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
def test_no_request_compiles_a_kernel(
    family: str,
    checkpoint: Callable[..., Path],
    names: dict[str, set[str]],
    attention: Any,
) -> None:
    check(load(checkpoint(family), TritonOps()), names, attention)
    linear_attention = family in ("qwen3_5", "qwen3_5_moe")
    assert bool(names["_conv"]) == bool(names["_scan"]) == linear_attention


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_convolutions_alone(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    check(load(checkpoint("lfm2_vl"), TritonOps()), names)
    assert names["_conv"] and not names["_scan"]


@pytest.mark.more
@pytest.mark.parametrize("name", ["hunyuan_vl", "dots_ocr", "kimi_vl"])
def test_no_request_compiles_a_kernel_for_other_turns(
    name: str, checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    """Before a norm; by rows and columns in turn."""
    check(load(checkpoint(name), TritonOps()), names)


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_windows(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    check(load(checkpoint("gemma3"), TritonOps()), names)


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_patches_that_become_one(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    check(load(checkpoint("minicpmv4_6"), TritonOps()), names)


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_heads_of_two_sizes(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    """And for layers that see another's keys."""
    check(load(checkpoint("gemma4"), TritonOps()), names)
    assert len(names["_decode"]) == 2 and len(names["_prefill"]) == 3


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_experts_beside_mlps(
    tmp_path: Path, names: dict[str, set[str]]
) -> None:
    folder = make_checkpoint(tmp_path, "gemma4", text=EXPERTS)
    check(load(folder, TritonOps()), names)
    assert all(names[each] for each in ("_route", "_place", "_up", "_down", "_sum"))


@pytest.mark.more
def test_no_request_compiles_a_kernel_for_latents(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    check(load(checkpoint("deepseek_vl_v2"), TritonOps()), names)
    assert names["_rotate"], "queries and the shared key"


@pytest.mark.first
@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=SCALES_BY_ROWS)])
def test_no_request_compiles_a_product_in_fp8(
    checkpoint: Callable[..., Path],
    names: dict[str, set[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scaled: bool,
) -> None:
    """Of few rows, or of many, which become 8 bits first or do not."""
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    monkeypatch.setattr(placement, "multiplies_fp8", lambda *_: scaled)
    folder, _ = quantise(checkpoint("qwen3_vl"), FORMATS["fp8 channels"], tmp_path)
    check(load(folder, TritonOps()), names)
    assert names["_few"], "of few rows"
    assert scaled or names["_product"], "of many, where PyTorch does not multiply them"
    for kernel in ("_quantise", "_add_norm_scaled", "_gate_scaled"):
        assert bool(names[kernel]) == scaled


@pytest.mark.parametrize("name", ["awq", "gptq_v2 desc_act"])
def test_no_request_compiles_a_product_in_int4(
    checkpoint: Callable[..., Path],
    names: dict[str, set[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Of few rows, of some or of many."""
    monkeypatch.setattr(weights, "has_int4", lambda *_: True)
    module = import_module("saccade.plugins.gpu.triton.int4")
    for kind, rows in (("FEW", 3), ("SOME", 9)):  # so that a chunk has many
        cuts = [cut._replace(rows=rows) for cut in getattr(module, kind)]
        monkeypatch.setattr(module, kind, cuts)
    folder, _ = quantise_packed(checkpoint("qwen3_vl"), PACKED[name], tmp_path)
    check(load(folder, TritonOps()), names)
    assert len(names["_few"]) >= 2 and names["_many"]


def test_no_request_compiles_a_product_of_experts(
    checkpoint: Callable[..., Path], names: dict[str, set[str]]
) -> None:
    check(load(checkpoint("qwen3_vl_moe"), TritonOps()), names)
    assert all(names[each] for each in ("_route", "_place", "_up", "_down", "_sum"))


def test_no_adapter_compiles_a_kernel(
    checkpoint: Callable[..., Path],
    names: dict[str, set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded when the server runs, of the language model and of the tower, in mixed batches."""
    monkeypatch.setattr(AdapterTable, "check", lambda *_: None)  # they come by no folder
    net = load(checkpoint("qwen3_vl"), TritonOps())
    sizes: dict[str, Any] = {"max_running": 12, "page_size": 4, "chunk_tokens": 24, "kv_pages": 600}
    over = Harness(net, encoder=EncoderConfig("triton"), context_length=512, **sizes)
    assert isinstance(over.worker, Worker)
    over.worker.adapters = open_table(net, torch.empty(0), UNSHARDED)
    known = {name: set(each) for name, each in names.items()}
    assert known["_shrink"] and known["_expand"]
    found = {
        name: Factors(torch.ones(3, inputs), torch.ones(outputs, 3), 1.0)
        for name, (outputs, inputs) in net.adapters.modules.items()
    }
    for each in names.values():
        each.clear()
    refs = [AdapterRef(), AdapterRef(1, "a", True), AdapterRef(2, "b")]
    for ref in refs[1:]:
        some = {name: found[name] for name in found if ref.tower or name.startswith(LANGUAGE)}
        net.adapters.put(ref.number, some, torch.empty(0))
    asked = traffic(over, 0) + traffic(over, 1)
    asked = [
        replace(each, id=str(at), caching=Caching(adapter=refs[at % 3]))
        for at, each in enumerate(asked)
    ]
    over.run(asked)
    assert names["_shrink"] and names["_expand"]
    for name, each in names.items():
        assert each <= known.get(name, set()), f"{name} is compiled within a request"
