"""What start-up sets aside of a GPU's memory is what computing takes: the peak of live tensors,
found on tensors without memory, Triton's launches left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from saccade.core.config import GIB, EncoderConfig, Hardware
from saccade.core.family import FamilySpec
from saccade.core.options import EngineOptions, ModelOptions
from saccade.engine.claims import (
    chunk_bytes,
    embedding_bytes_per_token,
    scoring_bytes,
    step_graph_bytes,
    tower_bytes,
)
from saccade.engine.sizing import kv_page_bytes, memory_budget, resolve
from saccade.families.registry import family_model, load_spec
from saccade.kernels import device as placement
from saccade.kernels import triton as triton_kernels
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.segments import Segments
from saccade.kernels.triton.ops import TritonOps
from saccade.nn.protocol import Batch, Cut, FamilyNet, Pack
from saccade.nn.weights import Part
from saccade.parallel import WHOLE
from saccade.runtime.attention import attention_for
from saccade.runtime.encoder import drain
from saccade.runtime.memory import allocate_caches, keys_and_values
from saccade.runtime.states import StateMemory
from saccade_bench.lab.checkpoint import make_checkpoint

META = torch.device("meta")
BF16 = torch.bfloat16
CONTEXT_BYTES = GIB // 2
"""Of CUDA and its libraries."""
MODELS = ("qwen3-vl-8b", "qwen3-vl-4b", "qwen3-vl-30b-a3b", "qwen3.5-9b")
CARDS = {
    "qwen3-vl-8b": 79.19,
    "qwen3-vl-4b": 23.5,
    "qwen3-vl-30b-a3b": 79.19,
    "qwen3.5-9b": 23.5,
}
"""GiB that a card of 80 or 24 GB says it has."""


class NoKernel:
    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class Peak(TorchDispatchMode):
    """The most bytes that were alive at a time, of tensors made within."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._now = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._now += storage.nbytes()
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            self._now -= self._live.pop(key)[1]
        self.bytes = max(self.bytes, self._now)
        return out


@dataclass
class NoWeights:
    """Of the right shapes."""

    device: torch.device = META
    dtype: torch.dtype = BF16
    nbytes: int = field(default=0)
    ops: Ops = field(default_factory=TritonOps)

    def load(self, *parts: Part) -> torch.Tensor:
        shape = (sum(part.wanted[0] for part in parts), *parts[0].wanted[1:])
        made = torch.empty(shape, dtype=self.dtype, device=META)
        self.nbytes += made.nbytes
        return made

    load_matrix = load

    def load_experts(self, *_: object) -> None:
        return None

    def has(self, _name: str) -> bool:
        return True

    def fits(self, _part: Part, /) -> bool:
        return True

    def matrix(self, weight: torch.Tensor, _name: str) -> torch.Tensor:
        return weight


@dataclass
class Model:
    name: str
    spec: FamilySpec
    net: FamilyNet
    weights: int


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        for entry in iter_modules(triton_kernels.__path__):
            module = import_module(f"saccade.kernels.triton.{entry.name}")
            for name, each in list(vars(module).items()):
                if isinstance(each, KernelInterface):
                    patch.setattr(module, name, NoKernel())
        patch.setattr(placement, "generation", lambda _: 90)
        folder = make_checkpoint(request.param, tmp_path_factory.mktemp("claims") / "model")
        spec, weights = load_spec(folder), NoWeights()
        net = family_model(spec).build(weights, WHOLE, WHOLE)
        yield Model(request.param, spec, net, weights.nbytes)


@torch.inference_mode()
def tower_peak(model: Model, patches: int) -> int:
    vision = model.net.vision
    rows = torch.empty((patches, vision.hidden), dtype=BF16, device=META)
    places = torch.empty((vision.axes, patches), dtype=torch.int64, device=META)
    whole = slice(0, patches)
    bounds = torch.empty(2, dtype=torch.int32, device=META)
    cuts = tuple((Cut(whole, whole, Segments(bounds, patches)),) for _ in vision.longest_segments)
    with Peak() as peak:
        drain(vision.blocks(Pack(rows, places, cuts, "triton")))
    return peak.bytes + rows.nbytes


@torch.inference_mode()
def chunk_peak(model: Model, tokens: int) -> int:
    spec, net = model.spec, model.net
    kept = spec.kv_spec(1)
    states = StateMemory(kept, 4, BF16, META)
    caches = keys_and_values(allocate_caches(kept, 1 << 10, 16, BF16, META))
    attention = attention_for(caches, 16, states.layers, dtype=BF16, graphs=True, ops=net.ops)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    images = tokens * 7 // 8
    batch = Batch(
        tokens=empty(tokens),
        positions=empty(3, tokens),
        out_slots=empty(tokens),
        slots=empty(1),
        page_table=empty(256, 1024, dtype=torch.int32),
        q_starts=empty(2, dtype=torch.int32),
        kv_lengths=empty(1, dtype=torch.int32),
        singles=0,
        splice_rows=empty(images),
        embeddings=empty(images, spec.embedding_width, dtype=BF16),
        sample_rows=empty(1),
    )
    with Peak() as peak:
        attention.plan(batch)
        net.logits(net.forward(batch, attention).index_select(0, batch.sample_rows))
    return peak.bytes


def test_the_towers_peak_is_what_is_claimed(model: Model) -> None:
    for patches in (3584, 16_384):
        claimed = tower_bytes(model.spec, patches, EncoderConfig(), "bfloat16")
        assert tower_peak(model, patches) <= claimed <= 1.3 * tower_peak(model, patches)


def test_a_chunks_peak_is_what_is_claimed(model: Model) -> None:
    for tokens in (1024, 8192):
        found, claimed = chunk_peak(model, tokens), chunk_bytes(model.spec, tokens, "bfloat16")
        # What is made of the last token alone.
        assert found <= claimed + (1 << 20) <= 2 * found


def test_all_that_is_claimed_fits_the_card(model: Model) -> None:
    """With pages, the largest image beside a pack, and a chunk; nothing was counted twice so that
    much is left over.
    """
    spec, total = model.spec, int(CARDS[model.name] * GIB)
    used = model.weights + CONTEXT_BYTES
    card = Hardware("cuda", "", total, total - used, 64 * GIB, arch=90)
    config = resolve(ModelOptions(), EngineOptions(), spec, "bfloat16", card)
    kept = spec.kv_spec(1)
    states = (config.max_running + config.snapshots.count) * kept.state_bytes("bfloat16")
    parts = {
        "weights": used,
        "pages": config.kv_pages * kv_page_bytes(spec, config.page_size, "bfloat16") + states,
        "embeddings": config.embeddings.device_bytes,
        "graphs": step_graph_bytes(config.graphs, spec, "bfloat16"),
        "scores": scoring_bytes(spec, config.chunk_tokens),
        "a chunk": chunk_peak(model, config.chunk_tokens),
        "a pack": tower_peak(model, config.encode_patches),
        "the tower's graphs": 2 * tower_peak(model, max(config.encoder.graph_sizes)),
    }
    assert sum(parts.values()) <= total, parts
    assert parts["pages"] >= 0.7 * memory_budget(card, 0.85), "what is set aside costs pages little"
    image = spec.largest_image.tokens * embedding_bytes_per_token(spec, "bfloat16")
    assert parts["embeddings"] >= image, "the largest image can be shown"
    assert config.kv_tokens >= 20_000, "and be told of"
