"""Executes plans on one rank.

Decides nothing. Knows requests, queues and caches only as plans describe them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig, StepGraphSizes
from saccade.core.metrics import Metrics
from saccade.core.plan import Change, Changed, Memory, Plan, Row, RowExtra, StepResult
from saccade.nn.net import without_weights
from saccade.nn.protocol import FamilyNet
from saccade.nn.transfer import send
from saccade.parallel import WHOLE, Shard
from saccade.runtime.adapters import NOT_LOADED, AdapterTable, open_table
from saccade.runtime.agreement import UNDERSTOOD, agree
from saccade.runtime.attention import attention_for
from saccade.runtime.batch import Batcher, Frame, PageTable
from saccade.runtime.begun_step import MaskSource, Step
from saccade.runtime.cuda.step_graphs import StepGraphs, StepMemory
from saccade.runtime.cuda.warm import compile_few, rows_are_batch_invariant, warm_up
from saccade.runtime.memory import DTYPES, allocate_caches, keys_and_values
from saccade.runtime.recorded_steps import RecordedSteps
from saccade.runtime.row_parts import Draws, StatePart
from saccade.runtime.sampling.finite import NO_TOKEN, finite_rows, quieten
from saccade.runtime.sampling.head import HeadDrafter
from saccade.runtime.sampling.sampler import Sampler
from saccade.runtime.sampling.scores import STATE_PARTS
from saccade.runtime.sleep import GivenBack, let_go, return_free
from saccade.runtime.start_facts import describe_steps, find_facts
from saccade.runtime.states import StateMemory
from saccade.runtime.tiers.page_memory import PageMemory
from saccade.runtime.vision.images import ImageExecutor, begin_captures
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.vision.streams import FIRST
from saccade.runtime.weights.renewal import LoadNet, Renewal

logger = logging.getLogger("saccade")


class Worker:
    """Holds one rank's network, KV pages, embeddings and slots.

    The first rank draws every token, for all ranks. source: the loader of a network like `net` from
    another folder, the present folder, and the vision tower's digest. Where it is `None`, the
    weights stay. words: those of `describe_network`.
    """

    def __init__(
        self,
        net: FamilyNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard = WHOLE,
        mode: EncoderMode = "weights",
        metrics: Metrics | None = None,
        source: tuple[LoadNet, Path, str] | None = None,
        words: str = "",
    ) -> None:
        self._net = net
        self._shard = everyone = shard.everyone
        spec, size = net.spec, config.page_size
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        kept = spec.kv_spec(shard.size).with_dtype(config.kv.dtype)
        caches = allocate_caches(kept, config.kv_pages, size, dtype, device)
        self.states = StateMemory(kept, config.max_running + config.snapshots.lines, dtype, device)
        self._caches = [each for layer in caches for each in layer.values()]
        self._kv_pages = config.kv_pages
        self._memory = GivenBack([*self._caches, self.states.lines])
        self._drafts = bool(config.snapshots.between)  # drafts are wanted, and kept on CPUs alone
        self._metrics = metrics = metrics or Metrics()
        sizes = config.graphs
        self._attention = attention_for(
            keys_and_values(caches),
            size,
            self.states.layers,
            dtype=dtype,
            scales=config.kv.scales,
            backend=config.kv.attention,
            graphs=bool(sizes.count),
            ops=net.ops,
            kept=kept,
        )
        self._adapters: AdapterTable | None = None  # made with the first that is loaded
        self.pages: PageMemory | None = None
        if config.kv.pages:
            self.pages = PageMemory(caches, size, self.states, everyone, config.kv.pages)
        known = PositionCache(spec, net.vision, metrics)
        self.images = ImageExecutor(net, config, arena, everyone, mode, known)
        like = self.images.like
        table = PageTable(config.max_running, 1 + config.context_length // size, device)
        self._batcher = Batcher(known, config.max_running, config.chunk_tokens, table, size)
        self._state_parts: dict[type[RowExtra], StatePart[Any]] = {}  # those asked for so far
        self._sampler = (
            None
            if everyone.rank
            else Sampler(spec.vocab_size, config.max_running, spec.eos_token_ids, device, net.ops)
        )
        if net.ops.compiles == "everything":
            encoder = self.images.encoder
            warm = net, self._attention, self._batcher, encoder, self._sampler, like
            warm_up(*warm, ranks=everyone.size)
        self.batch_invariant, self.prepared = False, ""
        """As in `Begun`, where it is known."""
        if net.ops.compiles == "decode":
            words = words and f"{words}\n{describe_steps(config)}"
            self.batch_invariant, self.prepared = find_facts(words, partial(self._find_out, config))
        self.recorded = RecordedSteps(net, self._attention) if self._records else None
        self._renewal = Renewal(*source, config, everyone) if source else None
        self._graphs = self._capture(sizes, metrics) if sizes.count else None

    @property
    def _records(self) -> bool:
        """Return True if steps of a few rows are recorded: other ranks would wait for messages."""
        return self._shard.size == 1 and self._attention.steady

    def _find_out(self, config: EngineConfig) -> bool:
        encoder, records = self.images.encoder, self._records
        compile_few(self._net, self._attention, self._batcher, encoder, records=records)
        shown = self.images.embeddings
        return rows_are_batch_invariant(self._net, self._attention, self._batcher, shown, config)

    @property
    def kept(self) -> tuple[tuple[bytes, int], ...]:
        """KV pages left on disk by an earlier run: (name, bytes), the oldest first."""
        return self.pages.found if self.pages is not None else ()

    @torch.inference_mode()
    def _capture(self, sizes: StepGraphSizes, metrics: Metrics) -> StepGraphs:
        like = self.images.like
        memory = StepMemory(self._net, self._attention, self._batcher, sizes, like)
        return StepGraphs(memory, sizes, begin_captures(like, FIRST), metrics)

    def close(self) -> None:
        """Finish all writing and release the graphs.

        Call before ranks part: a graph holds on to its captured collectives.
        """
        self._graphs = None
        self.images.close()
        if self.pages is not None:
            self.pages.close()

    @torch.inference_mode()
    def begin_step(self, plan: Plan, masks: MaskSource | None = None) -> Step:
        """Begin a step, in the plan's order.

        On a CPU all is done on return. On a GPU all is launched. A second plan may be begun before
        the first one's result is read.

        masks: called where a row is `masked`, after all other launches. It may block, and read the
        results of earlier steps.
        """
        images = self.images if plan.images or self.images.active else None
        step = images.begin_step(plan, self.pages) if images is not None else Step(plan, self.pages)
        if plan.adapt:
            return step
        if plan.change is not None:
            step.changed(self._change(plan.change))
        for slot in plan.close:
            self._batcher.close(slot)
            if self._adapters is not None:
                self._adapters.close(slot)
            if self._sampler:
                self._sampler.close(slot)
        for opened in plan.open:
            self._batcher.open(opened)
            if opened.adapter:
                assert self._adapters is not None, NOT_LOADED
                self._adapters.open(opened.slot, opened.adapter)
            if self._sampler:
                self._sampler.open(opened)
        if plan.pages:
            assert self.pages is not None, "there are no other tiers for KV pages"
            self.pages.move(plan.pages)
        if plan.restore:
            self.states.copy(plan.restore)
        for encode in plan.encode:
            if encode.adapter:
                assert self._adapters is not None, NOT_LOADED
                self._adapters.check(encode.adapter)
        if images is not None:
            images.encode(plan, step)
        if plan.rows and plan.steps:
            left = [masks] if masks is not None and _masked(plan) else []
            try:
                self._forward(plan, step, (lambda: left.pop()()) if left else None)
            except torch.OutOfMemoryError:
                if self._shard.size > 1:
                    raise  # other ranks compute on
                logger.exception("a step has no memory; its requests end")
                for mask in left:  # those of the next plan come behind them
                    mask()
                step.exhausted()
        if plan.snapshot:
            self.states.copy(plan.snapshot)
        if plan.save:
            self.images.save(plan)
        if plan.unused is not None:
            freed = return_free(self._caches, self._kv_pages, plan.unused)
            self._metrics.inc("saccade_memory_given_back_bytes_total", freed, what="kv")
        return step

    def _change(self, change: Change) -> Changed:
        """Make the change on every rank, or on none."""
        match change.kind:
            case "weights":
                made = self._renew(Path(change.folder))
            case "may sleep":
                return replace(self._sleep(change, trial=True), asleep=self._memory.asleep)
            case "sleep":
                made = self._sleep(change)
            case "wake":
                made = self._wake(change.memory)
            case _ if "weights" in self._memory.asleep:
                made = Changed("the model sleeps: wake it first (POST /wake_up)")
            case _:
                if self._adapters is None:
                    self._adapters = open_table(self._net, self.images.like, self._shard)
                made = self._adapters.make(change)
        if "adapter" not in change.kind:
            let_go(self.images.like)
        if self.recorded is not None:  # weights and pages may lie elsewhere
            self.recorded = RecordedSteps(self._net, self._attention)
        return replace(made, asleep=self._memory.asleep)

    def _renew(self, folder: Path | None = None) -> Changed:
        """Switch to the weights in `folder`. `None` means the old ones."""
        if self._renewal is None:
            return Changed("this server's weights cannot change")
        if why := self._keeps_weights():
            return Changed(why)
        folder = folder or self._renewal.folder
        made = self._renewal.load_network(folder, self._net, self.images.like)
        if made.net is None:
            return Changed(made.error)
        self._renewal = replace(self._renewal, folder=folder, digest=made.digest)
        self._use(made.net)
        self._memory.take_back("weights")
        return Changed(tower=made.tower)

    def _keeps_weights(self) -> str:
        """Return the reason why the weights must stay, or "" if they may go."""
        if self._renewal is None:
            return "this server's weights cannot change"
        graphs = self._graphs is not None or self.images.encoder.captures
        adapters = self._adapters is not None and not self._adapters.empty
        return self._renewal.refuses(graphs=graphs, adapters=adapters)

    def _use(self, net: FamilyNet) -> None:
        """Replace the network by `net`, and drop what belongs to the old one."""
        self._net = net
        self._state_parts.clear()
        self._adapters = None
        self.images.encoder.replace(net)

    def _sleep(self, change: Change, trial: bool = False) -> Changed:
        on_device = self.images.like.is_cuda
        memory = [
            each for each in change.memory if each == "kv_cache" or on_device or not change.lightly
        ]
        if "weights" in memory and (why := self._keeps_weights()):
            return Changed(why)
        if self._graphs is not None:
            return Changed("CUDA graphs hold on to KV pages: start with --disable-cuda-graph")
        if trial:
            return Changed()
        if on_device:
            torch.cuda.synchronize()  # what is copied beside steps
        for each in memory:
            if each == "weights":
                self._use(without_weights(self._net.spec, self._net.ops))
            self._memory.give_back(each)
        return Changed()

    def _wake(self, memory: Sequence[Memory]) -> Changed:
        made, wanted = Changed(), set(memory) & set(self._memory.asleep)
        if "weights" in wanted:
            made = self._renew()
        if made.error or "kv_cache" not in wanted:
            return made
        error = ""
        try:
            self._memory.take_back("kv_cache")
        except (RuntimeError, MemoryError) as refused:  # torch has no class of its own on a CPU
            error = f"there is no memory for the KV cache: {str(refused)[:200]}"
        if not agree("" if error else UNDERSTOOD, self.images.like, self._shard):
            self._memory.give_back("kv_cache")
            error = error or "there is no memory for another rank's KV cache"
        return replace(made, error=error)

    def execute(self, plan: Plan, masks: MaskSource | None = None) -> StepResult:
        """Run one step and return its result."""
        return self.begin_step(plan, masks).result()

    def _forward(self, plan: Plan, step: Step, masks: MaskSource | None) -> None:
        rows, frame = plan.rows, None
        adapters = self._adapters.rows(rows) if self._adapters is not None else ()
        if self._graphs and not adapters:
            decoding = self._batcher.count_decoding(rows)
            frame = self._graphs.frame(decoding, len(rows), plan.num_tokens)
        batch, draws = self._batcher.build(plan, self.images.embeddings, frame)
        if adapters:
            batch = replace(batch, adapters=adapters)
        extras = any(row.extras for row in rows)
        logits: torch.Tensor | None = None
        if self._graphs and frame:
            states = self._graphs.run(frame, batch.embeddings)  # [tokens of the frame, hidden]
        elif self.recorded and not extras and (found := self.recorded.run(batch)) is not None:
            states, *rest = found
            logits = rest[0] if rest else None
        else:
            self._attention.plan(batch)
            states = self._net.forward(batch, self._attention)  # [T, hidden]
        if extras:
            self._tell_extras(rows, frame, states, step)
        if not all(row.sample for row in rows):
            # Whatever is no number in a sequence reaches the state of its last token.
            finite = finite_rows(states.index_select(0, batch.q_starts[1:].long() - 1))  # [R]
            step.check(finite, self._batcher.places(rows, frame))
        drawn = draws.slots
        if draws.rows:
            if logits is None:
                logits = self._net.logits(states.index_select(0, batch.sample_rows))  # [D, V]
            drawn = self._draw(logits, draws, _masked(plan), masks, step)
        if self._net.head is not None and self._drafts:
            drafter = HeadDrafter(self._net.head, self._attention, self._batcher)
            step.add_drafts(drafter(rows, batch, self._net.normed(states), drawn))

    def _tell_extras(
        self, rows: Sequence[Row], frame: Frame | None, states: torch.Tensor, step: Step
    ) -> None:
        """Compute what rows ask for from `states`, the step's batch padded to `frame`."""
        for kind, asking in self._batcher.asking(rows, frame).items():
            if kind not in self._state_parts:
                self._state_parts[kind] = STATE_PARTS[kind](self._net, not self._shard.rank)
            if (outcome := self._state_parts[kind](states, asking)) is not None:
                step.copy_outcome(outcome)

    def _draw(
        self,
        logits: torch.Tensor,
        draws: Draws,
        masked: Sequence[int],
        masks: MaskSource | None,
        step: Step,
    ) -> torch.Tensor:
        """Return the first rank's tokens [D]. masked: the places of rows with masks."""
        report = None
        if self._sampler is None:
            tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
            drawn = tokens  # by the first rank alone
        else:
            allowed = None
            if masked:
                assert masks is not None, "a row's mask follows, but nobody has it"
                words = masks()
                allowed = None if words is None else send(words, logits.device)
            finite = quieten(logits)
            tokens, report = self._sampler(logits, draws, allowed, masked)
            drawn = tokens if finite is None else torch.where(finite, tokens, NO_TOKEN)
        tokens = self._shard.broadcast(tokens)
        self._batcher.keep_tokens(draws, tokens)
        step.draw(drawn)
        if report is not None:
            step.copy_outcome(report)
        return tokens


def _masked(plan: Plan) -> list[int]:
    """Return which of the rows that draw have masks, by place."""
    drawing = [row for row in plan.rows if row.sample]
    return [index for index, row in enumerate(drawing) if row.masked]
