"""Executes plans on one rank. A worker makes no scheduling decisions.

Small decode steps are captured at the first step of their size, and then replayed (`Ops.record`),
because at batch size 1 Python takes more time than the matrix products. A captured step reads the
batch at a fixed address, and writes states and logits to memory that the next replay overwrites.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import Change, Changed, Plan, Row, RowExtra, StepResult
from saccade.kernels.device import send
from saccade.kernels.reference.ops import Captured
from saccade.nn.protocol import Batch, FamilyNet
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins import builder
from saccade.runtime.attention import NO_STATES, PagedAttention, attention_for
from saccade.runtime.batch import Batcher, Frame, PageTable
from saccade.runtime.inflight_step import MaskSource, Step
from saccade.runtime.memory import DTYPES, allocate_caches, keys_and_values, return_free
from saccade.runtime.row_parts import Draws, StatePart, find_state_part
from saccade.runtime.sampling.sampler import NO_TOKEN, Sampler, finite_rows, quieten
from saccade.runtime.start import Origin, Start
from saccade.runtime.vision.images import ImageExecutor
from saccade.runtime.vision.positions import PositionCache

if TYPE_CHECKING:
    from saccade.runtime.changes import LoadNet, ModelChanges, SlotAdapters
    from saccade.runtime.graphs import StepGraphs
    from saccade.runtime.states import StateMemory
    from saccade.runtime.tiers import PageMemory


MAX_ROWS = 8
"""The maximum batch size of a captured step. In larger batches Python's overhead is hidden, and
each captured size takes memory.
"""


class ReplayedSteps:
    """Captures and replays decode steps of the language model, by (rows, sampled tokens).

    `replays` counts the steps that were replayed.
    """

    def __init__(self, net: FamilyNet, attention: PagedAttention) -> None:
        self._net = net
        self._attention = attention
        self._made: dict[tuple[int, int], Captured | None] = {}
        self.replays = 0

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...] | None:
        """Compute a decode step, or return None without computing if it cannot be captured.

        Returns states [T, hidden] and logits [D, V] float32, without the logits if no row samples.
        """
        rows, draws = len(batch.slots), len(batch.sample_rows)
        if rows > MAX_ROWS or batch.adapters or not self._attention.repeats(batch):
            return None
        if (rows, draws) not in self._made:
            self._attention.plan(batch)
            made = self._made[rows, draws] = self._net.ops.record(lambda: self._compute(batch))
        elif (made := self._made[rows, draws]) is not None:
            if self._net.head is not None:
                self._attention.plan(batch)  # the draft head runs after this step
            made.replay()
            self.replays += 1
        return None if made is None else made.results

    def _compute(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        states = self._net.forward(batch, self._attention)
        if not len(batch.sample_rows):
            return (states,)
        drawn = states  # if all rows sample, the states are in this order already
        if len(batch.sample_rows) < len(states):
            drawn = states.index_select(0, batch.sample_rows)
        return states, self._net.logits(drawn)


NOT_LOADED = "an adapter that is not loaded"
NO_STATE = "the model keeps no states"
logger = logging.getLogger("saccade")


class Worker:
    """Executes plans with one rank's network, KV pages, embeddings and slots. Rank 0 samples all
    tokens.

    source: has the function that loads `net` again from another directory, the current directory,
        and the vision encoder's digest. If it is None, the weights cannot be changed.
    """

    def __init__(
        self,
        net: FamilyNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard = UNSHARDED,
        mode: EncoderMode = "weights",
        metrics: Metrics | None = None,
        source: tuple[LoadNet, Path, str] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.net = net
        self.config = config
        self.source = source
        self.everyone = everyone = shard.everyone
        spec, size = net.spec, config.page_size
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        kept = spec.kv_spec(shard.size).with_dtype(config.kv.dtype)
        caches = allocate_caches(kept, config.kv_pages, size, dtype, device)
        self.states: StateMemory | None = None
        if kept.state_bytes(config.dtype):
            from saccade.runtime.states import StateMemory  # only for models with linear attention

            lines = config.max_running + config.snapshots.lines
            self.states = StateMemory(kept, lines, dtype, device)
        self.caches = [each for layer in caches for each in layer.values()]
        self._kv_pages = config.kv_pages
        self._drafts = bool(config.snapshots.between)  # whether the draft head runs
        self._metrics = metrics = metrics or Metrics()
        sizes = config.graphs
        self._attention = attention_for(
            keys_and_values(caches),
            size,
            NO_STATES if self.states is None else self.states.layers,
            dtype=dtype,
            scales=config.kv.scales,
            backend=config.kv.attention,
            graphs=bool(sizes.count),
            ops=net.ops,
            kept=kept,
        )
        self.adapters: SlotAdapters | None = None  # created when an adapter is loaded
        self._changes: ModelChanges | None = None  # created by the first change
        self.pages: PageMemory | None = None
        if build := builder(lambda plugin: plugin.caches.page_memory, config):
            self.pages = build(caches, size, self.states, everyone, config.kv.pages)
        known = PositionCache(spec, net.vision, metrics, config.encoder.position_cache_bytes)
        self.images = ImageExecutor(net, config, arena, everyone, mode, known)
        like = self.images.like
        table = PageTable(config.max_running, 1 + config.context_length // size, device)
        self._batcher = Batcher(known, config.max_running, config.chunk_tokens, table, size)
        self._state_parts: dict[type[RowExtra], StatePart[Any]] = {}  # created when first requested
        self._sampler = (
            None
            if everyone.rank
            else Sampler(spec.vocab_size, config.max_running, spec.eos_token_ids, device, net.ops)
        )
        self.batch_invariant, self.prepared = False, ""
        """As in `messages.Started`."""
        # A captured step cannot exchange messages with other ranks.
        self._records = shard.size == 1 and self._attention.steady
        if net.ops.prepare is not None:
            start = Start(
                net,
                config,
                self._attention,
                self._batcher,
                self.images.encoder,
                self._sampler,
                self.images.embeddings,
                like,
                everyone.size,
                self._records,
                origin,
            )
            self.batch_invariant, self.prepared = resolve_name(net.ops.prepare)(start)
        self.recorded = self._record()
        self._graphs: StepGraphs | None = None
        if sizes.count:
            from saccade.runtime.graphs import find_step_graphs  # only for GPUs

            steps = net, self._attention, self._batcher
            self._graphs = find_step_graphs()(*steps, sizes, like, metrics)

    def _record(self) -> ReplayedSteps | None:
        if not self._records:
            return None
        return ReplayedSteps(self.net, self._attention)

    @property
    def kept(self) -> tuple[tuple[bytes, int], ...]:
        """The (hash, number of bytes) of each KV page that an earlier run left on disk, oldest
        first.
        """
        return self.pages.found if self.pages is not None else ()

    def close(self) -> None:
        """Finish all writes to disk and release the graphs.

        Call this before ranks disconnect, because CUDA graphs use the captured collectives.
        """
        self._graphs = None
        self.images.close()
        if self.pages is not None:
            self.pages.close()

    @torch.inference_mode()
    def begin_step(self, plan: Plan, masks: MaskSource | None = None) -> Step:
        """Start a step, and return it.

        Plans must be started in order, but the next one can be started before the result of this
        one is read. On a CPU all work is done on return. On a GPU it is launched.

        masks: called if a row is `masked`, after everything before sampling was launched. It may
            block, and read the results of earlier steps.
        """
        images = self.images if plan.images or self.images.active else None
        step = images.begin_step(plan, self.pages) if images is not None else Step(plan, self.pages)
        if plan.adapt:
            step.adapted(self.images.adapt() or self._capture_next())
            return step
        if plan.change is not None:
            step.changed(self._change(plan.change))
        for slot in plan.close:
            self._batcher.close(slot)
            if self.adapters is not None:
                self.adapters.close(slot)
            if self._sampler:
                self._sampler.close(slot)
        for opened in plan.open:
            self._batcher.open(opened)
            if opened.adapter:
                assert self.adapters is not None, NOT_LOADED
                self.adapters.open(opened.slot, opened.adapter)
            if self._sampler:
                self._sampler.open(opened)
        if plan.pages:
            assert self.pages is not None, "there are no other tiers for KV pages"
            self.pages.move(plan.pages)
        if plan.restore:
            assert self.states is not None, NO_STATE
            self.states.copy(plan.restore)
        for encode in plan.encode:
            if encode.adapter:
                assert self.adapters is not None, NOT_LOADED
                self.adapters.check(encode.adapter)
        if images is not None:
            images.encode(plan, step)
        if plan.rows and plan.steps:
            left = [masks] if masks is not None and _masked(plan) else []
            try:
                self._forward(plan, step, (lambda: left.pop()()) if left else None)
            except torch.OutOfMemoryError:
                if self.everyone.size > 1:
                    raise  # the other ranks continue with the step
                logger.exception("a step has no memory; its requests end")
                for mask in left:  # receive the masks, since the next plan's masks follow them
                    mask()
                step.exhausted()
        if plan.snapshot:
            assert self.states is not None, NO_STATE
            self.states.copy(plan.snapshot)
        if plan.save:
            self.images.save(plan)
        if plan.unused is not None:
            freed = return_free(self.caches, self._kv_pages, plan.unused)
            self._metrics.inc("saccade_memory_released_bytes_total", freed, what="kv")
        return step

    def _capture_next(self) -> bool:
        """Capture a graph of the language model that was deferred. Return True if there are
        more.
        """
        return self._graphs is not None and self._graphs.capture_next()

    def _change(self, change: Change) -> Changed:
        """Apply a change to the model, and return the outcome.

        The plugin that implements changes is imported by the first change.
        """
        if self._changes is None:
            build = builder(lambda plugin: plugin.runtime.changes)
            if build is None:
                return Changed("no installed plugin changes a running model")
            self._changes = build(self)
        return self._changes.make(change)

    def use(self, net: FamilyNet) -> None:
        """Replace the network with `net`, and drop everything that depends on the old one."""
        self.net = net
        self._state_parts.clear()
        self.adapters = None
        self.images.encoder.replace(net)

    def record_again(self) -> None:
        """Drop the captured steps because weights or KV pages may have new addresses."""
        self.recorded = self._record()

    @property
    def captures(self) -> bool:
        """True if CUDA graphs were captured. Graphs contain the addresses of KV pages."""
        return self._graphs is not None

    def execute(self, plan: Plan, masks: MaskSource | None = None) -> StepResult:
        """Run one step, wait for it, and return its result."""
        return self.begin_step(plan, masks).result()

    def _forward(self, plan: Plan, step: Step, masks: MaskSource | None) -> None:
        rows, frame = plan.rows, None
        adapters = self.adapters.rows(rows) if self.adapters is not None else ()
        if self._graphs and not adapters:
            decoding = self._batcher.count_decoding(rows)
            frame = self._graphs.frame(decoding, len(rows), plan.num_tokens)
        batch, draws = self._batcher.build(plan, self.images.embeddings, frame)
        if adapters:
            batch = replace(batch, adapters=adapters)
        extras = any(row.extras for row in rows)
        logits: torch.Tensor | None = None
        if self._graphs and frame:
            states = self._graphs.run(frame, batch.embeddings)  # [tokens of `frame`, hidden]
        elif self.recorded and not extras and (found := self.recorded.run(batch)) is not None:
            states, *rest = found
            logits = rest[0] if rest else None
        else:
            self._attention.plan(batch)
            states = self.net.forward(batch, self._attention)  # [T, hidden]
        if extras:
            self._report_extras(rows, frame, states, step)
        if not all(row.sample for row in rows):
            # A NaN or infinity anywhere in a sequence propagates to its last token's state.
            finite = finite_rows(states.index_select(0, batch.q_starts[1:].long() - 1))  # [R]
            step.check(finite, self._batcher.places(rows, frame))
        drawn = draws.slots
        if draws.rows:
            if logits is None:
                logits = self.net.logits(states.index_select(0, batch.sample_rows))  # [D, V]
            drawn = self._sample(logits, draws, _masked(plan), masks, step)
        if self.net.head is not None and self._drafts:
            # only for models with a draft head
            from saccade.runtime.sampling.head import HeadDrafter

            drafter = HeadDrafter(self.net.head, self._attention, self._batcher)
            step.add_drafts(drafter(rows, batch, self.net.normed(states), drawn))

    def _report_extras(
        self, rows: Sequence[Row], frame: Frame | None, states: torch.Tensor, step: Step
    ) -> None:
        """Compute the extras of the rows, and start copying them to the host.

        frame: the shape that the step is padded to, or None.
        states: the hidden states of the step.
        """
        for kind, asking in self._batcher.asking(rows, frame).items():
            if kind not in self._state_parts:
                self._state_parts[kind] = find_state_part(kind)(self.net, not self.everyone.rank)
            if (outcome := self._state_parts[kind](states, asking)) is not None:
                step.copy_outcome(outcome)

    def _sample(
        self,
        logits: torch.Tensor,
        draws: Draws,
        masked: Sequence[int],
        masks: MaskSource | None,
        step: Step,
    ) -> torch.Tensor:
        """Sample on rank 0, and return the tokens [D] on all ranks.

        masked: the indices of rows with masks.
        """
        report = None
        if self._sampler is None:
            tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
            drawn = tokens  # rank 0 samples
        else:
            allowed = None
            if masked:
                assert masks is not None, "a row's mask follows, but nobody has it"
                words = masks()
                allowed = None if words is None else send(words, logits.device)
            finite = quieten(logits)
            tokens, report = self._sampler(logits, draws, allowed, masked)
            drawn = tokens if finite is None else torch.where(finite, tokens, NO_TOKEN)
        tokens = self.everyone.broadcast(tokens)
        self._batcher.keep_tokens(draws, tokens)
        step.draw(drawn)
        if report is not None:
            step.copy_outcome(report)
        return tokens


def _masked(plan: Plan) -> list[int]:
    drawing = [row for row in plan.rows if row.sample]
    return [index for index, row in enumerate(drawing) if row.masked]
