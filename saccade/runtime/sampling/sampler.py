"""From logits to tokens: bans and biases, penalties, then the draw (`kernels/reference/sample.py`),
each on the tokens left by the step before (vLLM's order), and log-probabilities.

Owns each slot's parameters and token counts, and the parts that edit logits, on the device, so that
the host can send the next step at once. A row's draw depends only on its own logits, its seed and
the number of drawn tokens. One uniform number per token comes from a counter-based hash of (seed,
count), known before the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pkgutil import resolve_name

import numpy as np
import torch

from saccade.core.plan import Open, StepResult
from saccade.core.types import TokenLogprobs
from saccade.kernels.device import send
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.sample import COLUMNS, NEUTRAL, Columns, RowMasks, SamplingRows
from saccade.plugin import LogitRule
from saccade.plugins import plugins
from saccade.runtime.row_parts import Draws, RowEdit, SamplePart

BuildEdit = Callable[[Open, int, Sequence[int], torch.device], RowEdit]
"""Of the vocabulary's size, the ids that end an answer, and the device."""
EDITS = LogitRule("saccade.runtime.sampling.edits:Edit.of", f"{__name__}:has_edits")


def has_edits(opened: Open) -> bool:
    return opened.sampling.edits


class RowByRow:
    """A part that processes its rows one by one.

    make: makes the edit for a sequence that asks.
    """

    def __init__(self, make: Callable[[Open], RowEdit]) -> None:
        self._make = make
        self._slots: dict[int, RowEdit] = {}

    def open(self, opened: Open) -> None:
        self._slots[opened.slot] = self._make(opened)

    def close(self, slot: int) -> None:
        del self._slots[slot]

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool, /) -> bool:
        left = masked
        for at, slot in enumerate(draws.rows):
            if slot in self._slots:
                left |= self._slots[slot].edit(logits[at], draws.counts[at], masked)
        return left

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        for at, slot in enumerate(draws.rows):
            if slot in self._slots:
                self._slots[slot].add_token(tokens[at : at + 1])


class SampleParts:
    """The parts for all slots in one worker."""

    def __init__(
        self, vocab_size: int, slots: int, stop_ids: Sequence[int], place: torch.device, ops: Ops
    ) -> None:
        self._given = vocab_size, stop_ids, place
        rules = [rule for plugin in plugins() for rule in plugin.logit_rules]
        first = [each for each in rules if not each.last]
        self._rules = (*first, EDITS, *(each for each in rules if each.last))
        self._made: dict[int, SamplePart] = {}
        if ops.slot_edits is not None:
            made = resolve_name(ops.slot_edits)(vocab_size, slots, stop_ids, place)
            self._made[len(first)] = made

    @property
    def made(self) -> list[SamplePart]:
        """Return the parts made so far, in their order."""
        return [self._made[kind] for kind in sorted(self._made)]

    def open(self, opened: Open) -> tuple[SamplePart, ...]:
        """Open and return the parts that a sequence asks for."""
        joined = []
        for kind, rule in enumerate(self._rules):
            if resolve_name(rule.asked)(opened):
                if kind not in self._made:
                    self._made[kind] = RowByRow(partial(self._build, resolve_name(rule.build)))
                self._made[kind].open(opened)
                joined.append(self._made[kind])
        return tuple(joined)

    def _build(self, build: BuildEdit, opened: Open) -> RowEdit:
        return build(opened, *self._given)


NO_TOKEN = -1
"""Told instead of a token where none could be drawn."""
_MASK = (1 << 64) - 1
NO_ROWS: frozenset[int] = frozenset()
GREEDY: Columns = 0.0, 0, 1.0, 0.0
"""The columns of a slot that is free, or draws the best token."""


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of `values` [R, N] are finite throughout, [R] bool.

    So a damaged weight or embedding, or too narrow a dtype, ends the affected requests alone. One
    pass is enough, since a sum is finite only with finite terms.
    """
    return values.sum(dim=-1, dtype=torch.float32).isfinite()


def quieten(logits: torch.Tensor) -> torch.Tensor | None:
    """Return `finite_rows`, and write zeros into all other rows of `logits` [D, V].

    Returns `None` on a CPU if all are finite. Kernels that draw expect numbers.
    """
    if not logits.is_cuda and isfinite(logits.sum()):
        return None
    finite = finite_rows(logits)  # [D]
    logits.masked_fill_(~finite.unsqueeze(1), 0.0)  # a look from the host would wait for a GPU
    return finite


def uniform(seed: int, count: int) -> float:
    """Return a number in [0, 1) for (seed, count).

    Two rounds of splitmix64 (Steele, Lea, Flood 2014), 53 bits kept.
    """
    z = seed & _MASK
    for word in (count, 0x5ACCADE):
        z = (z + word * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Report:
    """Log-probabilities for W of the rows drawn, `rows`, each with `tops[i]` of the K best.

    tensors: for the chosen tokens [W], for the best ones [W, K], and the best ones' ids [W, K].
    """

    rows: Sequence[int]
    tops: Sequence[int]
    tensors: Sequence[torch.Tensor]

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        chosen, best, ids = (each.tolist() for each in found)
        logprobs = []
        for index, (row, top) in enumerate(zip(self.rows, self.tops)):
            pairs = tuple(zip(ids[index][:top], best[index][:top]))
            logprobs.append((row, TokenLogprobs(result.tokens[row], chosen[index], pairs)))
        return replace(result, logprobs=tuple(logprobs))


class Sampler:
    """Draws for all slots in one worker. `stop_ids`: the model's own end tokens."""

    def __init__(
        self,
        vocab_size: int,
        slots: int,
        stop_ids: Sequence[int],
        place: torch.device,
        ops: Ops | None = None,
    ) -> None:
        """Allocate the slots' tables. Without `ops`, the device's kernels are used."""
        self._ops = ops = ops or pick_ops(place, torch.float32)
        self._vocab_size = vocab_size
        self._device = place
        self._columns: list[Columns] = [GREEDY] * slots
        self._drew = [False] * slots  # whether its line of the tables is of one that draws
        self._table = torch.zeros((slots, COLUMNS), dtype=torch.float32, device=place)
        self._tops: dict[int, int] = {}  # alternatives to name, of slots with log-probabilities
        self._parts = SampleParts(vocab_size, slots, stop_ids, place, ops)
        self._joined: dict[int, tuple[SamplePart, ...]] = {}  # of slots that ask for any

    def open(self, opened: Open) -> None:
        """Open a slot for a sequence, with its prompt and the answer so far."""
        slot, params = opened.slot, opened.sampling
        factor, limit, share, floor = params.columns
        # A limit may have 64 bits.
        self._columns[slot] = columns = factor, min(limit, self._vocab_size), share, floor
        if factor > 0.0 or self._drew[slot]:
            self._table[slot].copy_(send(np.array(columns, np.float32), self._device))
        self._drew[slot] = factor > 0.0
        if params.logprobs is not None:
            self._tops[slot] = params.logprobs
        if params.edits or opened.rules is not None:
            self._joined[slot] = self._parts.open(opened)

    def close(self, slot: int) -> None:
        self._columns[slot] = GREEDY
        self._tops.pop(slot, None)
        for part in self._joined.pop(slot, ()):
            part.close(slot)

    def warm_up(self) -> None:
        """Launch each way to draw once, for kernels that are compiled at first launch."""
        logits = torch.zeros((1, self._vocab_size), dtype=torch.float32, device=self._device)
        slots = torch.zeros(1, dtype=torch.int64, device=self._device)
        draws = Draws([0], [0], slots, torch.zeros(1, dtype=torch.float64, device=self._device))
        self._table[0].copy_(send(np.array(NEUTRAL, np.float32), self._device))
        rows = SamplingRows([NEUTRAL], self._table, slots, draws.uniforms)
        words = -(-self._vocab_size // 32)
        masks = torch.full((1, words), -1, dtype=torch.int32, device=self._device)
        for allowed in (None, RowMasks(masks, [0])):
            for part in self._parts.made:
                part.edit(logits, draws, allowed is not None)
            tokens = self._ops.sample(logits, replace(rows, masks=allowed))
            for part in self._parts.made:
                part.count(draws, tokens)
        self._table[0].zero_()  # a slot that draws no tokens leaves its line as it is

    def __call__(
        self,
        logits: torch.Tensor,
        draws: Draws,
        masks: torch.Tensor | None = None,
        masked: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Report | None]:
        """Draw one token [D] int64 per row of `logits` [D, V] float32, changed in place.

        masks: [M, ceil(V / 32)] int32, on the device: bit i % 32 of word i // 32 is set if token
        i may be sampled. masked: the masks' rows. Without them, all rows, in order.
        """
        wants = (
            [at for at, slot in enumerate(draws.rows) if slot in self._tops] if self._tops else []
        )
        # of the model's own distribution, before any edit
        raw = torch.log_softmax(self._pick(logits, wants), dim=-1) if wants else None  # [W, V]
        depends = self._joined.keys() & draws.rows if self._joined else NO_ROWS
        later: RowMasks | None = None
        if masks is not None:
            rows = range(len(masks)) if masked is None else masked
            if depends:  # what an edit bans depends on what a mask leaves
                self._ops.mask_logits(logits, masks, None if masked is None else self._send(rows))
            else:
                later = RowMasks(masks, rows)
        if depends and any(draws.rows[at] in depends for at in draws.draft_tokens):
            tokens = self._sample_in_order(logits, draws, depends, masks is not None)
        else:
            tokens = self._draw_rows(logits, draws, depends, masks is not None, later)
        return tokens, None if raw is None else self._report(raw, tokens, draws, wants)

    def _report(
        self, raw: torch.Tensor, tokens: torch.Tensor, draws: Draws, wants: Sequence[int]
    ) -> Report:
        """Report log-probabilities. raw: those of the rows `wants`, [W, V]."""
        tops = [self._tops[draws.rows[at]] for at in wants]
        best, ids = torch.topk(raw, min(max(tops), self._vocab_size), dim=-1)
        chosen = raw.gather(1, self._pick(tokens, wants).unsqueeze(1)).squeeze(1)
        return Report(wants, tops, (chosen, best, ids))

    def _draw_rows(
        self,
        logits: torch.Tensor,
        draws: Draws,
        depends: Collection[int],
        masked: bool,
        later: RowMasks | None,
    ) -> torch.Tensor:
        """Draw all rows, and give the tokens to parts that depend on them."""
        parts = self._parts_of(draws, depends) if depends else ()
        for part in parts:
            masked = part.edit(logits, draws, masked)
        columns = [self._columns[slot] for slot in draws.rows]
        rows = SamplingRows(columns, self._table, draws.slots, draws.uniforms, later)
        tokens = self._ops.sample(logits, rows)
        for part in parts:
            part.count(draws, tokens)
        return tokens

    def _parts_of(self, draws: Draws, depends: Collection[int]) -> Sequence[SamplePart]:
        """Return the parts for the rows' slots that are in `depends`, in their order."""
        joined = [self._joined[slot] for slot in depends if slot in draws.rows]
        return [part for part in self._parts.made if any(part in each for each in joined)]

    def _sample_in_order(
        self, logits: torch.Tensor, draws: Draws, depends: Collection[int], masked: bool
    ) -> torch.Tensor:
        """Draw as `_draw_rows` does, where a slot's edits depend on what its earlier rows draw.

        These rows are drawn one after another. Those behind a rejected draft token are skipped and
        get 0.
        """
        tokens = torch.zeros(len(draws.rows), dtype=torch.int64, device=logits.device)
        drawn: dict[
            int, int
        ] = {}  # by slot, the newest token, as long as draft tokens are accepted
        left = list(range(len(draws.rows)))
        while left:
            turn, waiting, slots = list[int](), list[int](), set[int]()
            for at in left:
                slot = draws.rows[at]
                (waiting if slot in slots else turn).append(at)
                slots.update({slot} & {*depends})
            right = [
                at
                for at in turn
                if at not in draws.draft_tokens
                or (slot := draws.rows[at]) not in depends
                or drawn.get(slot) == draws.draft_tokens[at]
            ]
            for at in set(turn) - set(right):
                drawn.pop(draws.rows[at], None)
            if right:
                index = self._send(right)
                part, some = logits.index_select(0, index), _some(draws, right, index)
                found = self._draw_rows(part, some, depends, masked, None)
                tokens.index_copy_(0, index, found)
                drawn.update(zip(some.rows, found.tolist()))
            left = waiting
        return tokens

    def _pick(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return x if len(rows) == len(x) else x.index_select(0, self._send(rows))

    def _send(self, rows: Sequence[int]) -> torch.Tensor:
        return send(np.array(rows, np.int64), self._device)


def _some(draws: Draws, places: Sequence[int], index: torch.Tensor) -> Draws:
    """Return some of a step's rows as rows of their own. index: the places."""
    return Draws(
        [draws.rows[at] for at in places],
        [draws.counts[at] for at in places],
        draws.slots.index_select(0, index),
        draws.uniforms.index_select(0, index),
    )
