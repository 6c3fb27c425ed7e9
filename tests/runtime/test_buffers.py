"""A worker's memory on a GPU, as a server on a card of 80 or 24 GB would have it: each buffer is
claimed by somebody, and no step takes more than is claimed. On tensors without memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from saccade.core.arena import Arena
from saccade.core.config import (
    POSITION_CACHE_BYTES,
    EncoderConfig,
    EngineConfig,
    StepGraphSizes,
)
from saccade.core.plan import Encode, Move, Open, PixelSlot, Plan, Row, Splice, StateCopy
from saccade.core.types import Image, ImageKey, SamplingParams
from saccade.engine.memory_estimate import (
    DECODE_SPLIT_TOKENS,
    DECODE_SPLITS,
    decode_bytes,
    drawing_bytes,
    edit_bytes,
    graph_buffer_bytes,
    step_bytes,
    table_bytes,
    tower_buffer_bytes,
    tower_bytes,
)
from saccade.engine.sizing import kv_page_bytes
from saccade.kernels.reference.paged import PagedRows, plain_cache
from saccade.plugins.gpu.cuda.pack_graphs import PackBuffers
from saccade.plugins.gpu.cuda.step_graphs import StepMemory
from saccade.plugins.gpu.slot_edits import SlotEdits
from saccade.plugins.gpu.triton.paged_decode import (
    MAX_KV_SPLITS,
    MIN_SPLIT_KEYS,
    launch_decode,
    share_keys,
)
from saccade.runtime import batch
from saccade.runtime.inflight_step import MaskSource
from saccade.runtime.memory import allocate_caches
from saccade.runtime.states import StateMemory
from saccade.runtime.worker import Worker
from saccade_bench.lab.qwen import qwen
from tests.helpers.breadth import broad
from tests.helpers.weightless import (
    BF16,
    CARDS,
    META,
    Model,
    Peak,
    bounds,
    decide,
    named,
    weightless,
)

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

ALWAYS = ("qwen3.5-9b",)
"""The others are slow."""


ASKED = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    min_tokens=4,
    logit_bias=((3, 1.0),),
    logprobs=20,
)


@dataclass
class Made:
    """A worker as a server on the model's card would have it, and what its device holds for it."""

    model: Model
    config: EngineConfig
    worker: Worker
    arena: Arena
    device: Peak

    def peak(self, plan: Plan, masks: MaskSource | None = None) -> int:
        """Bytes that the step takes at most beside what was there before."""
        self.device.kept()
        before = self.device.bytes = self.device.now
        self.worker.begin_step(plan, masks)
        return self.device.bytes - before


@pytest.fixture(
    scope="module",
    params=broad([name for name in CARDS if name.startswith("qwen")], keep=ALWAYS),
)
def made(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Made]:
    with weightless(request.param, tmp_path_factory.mktemp("buffers") / "model") as model:
        config, _ = decide(model)
        arena = Arena.create(1 << 26)
        # One graph of each kind stands for all: they share their memory.
        every = config.graphs
        graphs = StepGraphSizes(every.rows[-1:], every.mixed_rows[-1:], every.mixed_tokens[-1:])
        tower = replace(config.encoder, graph_sizes=config.encoder.graph_sizes[-1:])
        hosts = replace(config.embeddings, host_bytes=1 << 20)
        there: Any = {"device": "meta", "embeddings": hosts, "graphs": graphs, "encoder": tower}
        config = replace(config, **there)
        with Peak() as device:
            hands = Worker(model.net, config, arena)
            yield Made(model, config, hands, arena, device)
        hands.close()
        arena.close()


BATCH = batch.__name__.removeprefix("saccade.")


def claims(made: Made) -> dict[str, int]:
    """What is kept for good, by who keeps it."""
    spec, config, steps = made.model.spec, made.config, bounds(made.config)
    kept = spec.kv_spec(1)
    page = kv_page_bytes(spec, config.page_size, "bfloat16")
    lines = config.max_running + config.snapshots.lines
    return {
        named(allocate_caches): config.kv_pages * page,
        named(StateMemory): lines * (kept.state_bytes("bfloat16") + 4096),
        named(StepMemory): graph_buffer_bytes(config.graphs, spec, "bfloat16"),
        named(PackBuffers): tower_buffer_bytes(spec, config.encoder, "bfloat16"),
        named(SlotEdits): edit_bytes(spec, config.max_running),
        BATCH: table_bytes(steps),
    }


SMALL = 1 << 20
"""Bytes that nobody need claim by name: a line a slot, bounds of segments, places of one step."""


def test_every_buffer_of_a_worker_is_claimed_by_somebody(made: Made) -> None:
    found, claimed = Counter[str](), claims(made)
    for name, nbytes in made.device.kept().items():
        found[BATCH if name.startswith(f"{BATCH}.") else name] += nbytes
    unclaimed = {name: n for name, n in found.items() if name not in claimed and n > SMALL}
    assert not unclaimed
    for name, most in claimed.items():
        assert found[name] <= most <= 1.1 * found[name] + 2 * SMALL, name


def prompts(config: EngineConfig, length: int, sampling: SamplingParams) -> Plan:
    """Of so many tokens each for every slot."""
    tokens = tuple(range(5, 5 + length))
    slots = range(config.max_running)
    opened = [Open(slot, tokens, length, (), (), sampling, ()) for slot in slots]
    rows = [Row(slot, 0, length, (1 + slot,), sample=True) for slot in slots]
    return Plan(1, open=tuple(opened), rows=tuple(rows))


def test_steps_take_no_more_than_is_claimed_and_leave_nothing(made: Made) -> None:
    """Every row with penalties, biases, log-probabilities and a mask."""
    spec, config, steps = made.model.spec, made.config, bounds(made.config)
    before = made.device.kept()
    claimed = step_bytes(spec, steps, "bfloat16")
    assert made.peak(prompts(config, 3, ASKED)) <= claimed
    slots = range(config.max_running)
    rows = tuple(Row(slot, 3, 1, (), sample=True, masked=True) for slot in slots)
    words = np.full((len(slots), -(-spec.vocab_size // 32)), -1, np.int32)
    drawn = made.peak(Plan(2, rows=rows), lambda: words)
    states = config.max_running * spec.hidden_size * 2
    assert 0.8 * drawn <= drawing_bytes(spec, config.max_running) + states
    assert drawn <= min(claimed, drawing_bytes(spec, config.max_running) + states)
    made.worker.begin_step(Plan(3, close=tuple(slots)))
    left = {name: n for name, n in made.device.kept().items() if n > before.get(name, 0) + SMALL}
    assert not left


def test_states_go_to_and_from_snapshots_without_memory_between(made: Made) -> None:
    """Of all slots at once, where a model keeps states: each has tens of megabytes."""
    running, snapshots = made.config.max_running, made.config.snapshots.count
    copies = [StateCopy(running + at, at) for at in range(min(running, snapshots))]
    back = [StateCopy(each.target, each.source) for each in copies]
    assert made.peak(Plan(1, restore=tuple(copies), snapshot=tuple(back))) <= SMALL


def test_decoding_takes_what_is_claimed_for_pieces_of_keys(made: Made) -> None:
    """Beside a prompt that no graph holds."""
    spec, steps = made.model.spec, bounds(made.config)
    assert (DECODE_SPLITS, DECODE_SPLIT_TOKENS) == (MAX_KV_SPLITS, MIN_SPLIT_KEYS)
    heads, kv_heads = spec.cuts.heads, spec.cuts.kv_heads
    dim = next(
        cache.shape[1] for layer in spec.kv_spec().layers for cache in layer if cache.name == "k"
    )
    rows = steps.rows

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    table = integers(rows, 1 + steps.context // steps.page_size)
    paged = PagedRows(
        integers(rows + 1), integers(rows), integers(rows, dtype=torch.int64), table, 16, rows
    )
    keys = torch.empty((1 << 10, kv_heads, dim), dtype=BF16, device=META)
    cache = plain_cache(keys, torch.empty_like(keys))
    q = torch.empty((rows, heads, dim), dtype=BF16, device=META)
    out = torch.empty_like(q)
    work = replace(paged, work=share_keys(paged, kv_heads))
    with Peak() as peak:
        launch_decode(q, cache, work, 0.1, out)
    claimed = decode_bytes(spec, steps)
    assert peak.bytes <= claimed <= 1.02 * peak.bytes


def test_images_are_encoded_and_shown_within_what_is_claimed(made: Made) -> None:
    spec, config, steps = made.model.spec, made.config, bounds(made.config)
    ours = qwen(spec)
    side = 32 * ours.images.factor
    grid = ours.images.grid(side, side)
    patches, tokens = spec.num_patches(grid), spec.num_tokens(grid)
    keys = [ImageKey(bytes([at]) * 32, bytes(16)) for at in range(config.encode_patches // patches)]
    slots = [PixelSlot(0, side, side)] * len(keys)
    encodes = [Encode(key, grid, patches, slot) for key, slot in zip(keys, slots)]
    embeddings = len(keys) * tokens * spec.embedding_width * 2
    pack = made.peak(Plan(1, encode=tuple(encodes)))
    none = EncoderConfig()
    positions = POSITION_CACHE_BYTES
    assert (
        pack <= tower_bytes(spec, config.encode_patches, none, "bfloat16") + embeddings + positions
    )
    each = [Image(key, grid, tokens, patches, (side, side)) for key in keys]
    shown = [word for _ in keys for word in (ours.image_token_id, 7)]
    shown += [5] * (config.chunk_tokens - len(keys) * (tokens + 1))
    whole, spans = spec.expand_prompt(shown, each)
    length = config.chunk_tokens
    assert len(whole) == length
    pages = tuple(range(1, 1 + -(-length // config.page_size)))
    opened = Open(0, whole, len(whole), spans, tuple(each), SamplingParams(), ())
    splices = [Splice(span.start, tokens, key, 0) for span, key in zip(spans, keys)]
    row = Row(0, 0, length, pages, sample=False)
    took = made.peak(Plan(2, open=(opened,), rows=(row,), splices=tuple(splices)))
    claimed = step_bytes(spec, steps, "bfloat16")
    assert took <= claimed <= 2 * took
    drop = tuple(Move(key, "device", None, tokens) for key in keys)
    made.worker.begin_step(Plan(3, close=(0,), moves=drop))
