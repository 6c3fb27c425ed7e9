"""Samples tokens from logits, and computes log-probabilities. As in vLLM, bans and biases are
applied first, then penalties, then sampling parameters (`kernels/reference/sample.py`).

Each slot's parameters and token counts are on the device, so that the host can launch the next step
immediately. A sampled token depends only on its own logits, the seed, and the number of tokens
sampled before: its random number is a hash of (seed, count), which is known before the logits.
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
"""Creates the edit of a sequence, given the vocabulary's size, the model's end tokens and the
device.
"""
EDITS = LogitRule("saccade.runtime.sampling.edits:Edit.of", f"{__name__}:has_edits")


def has_edits(opened: Open) -> bool:
    return opened.sampling.edits


class RowByRow:
    """A `SamplePart` that applies a `RowEdit` to each row. `make` creates the edit for a
    sequence.
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
    """Creates and orders the parts that edit logits. A part is created for the first sequence that
    needs it.
    """

    def __init__(
        self, vocab_size: int, slots: int, stop_ids: Sequence[int], place: torch.device, ops: Ops
    ) -> None:
        self._given = vocab_size, stop_ids, place
        rules = [rule for plugin in plugins() for rule in plugin.runtime.logit_rules]
        first = [each for each in rules if not each.last]
        self._rules = (*first, EDITS, *(each for each in rules if each.last))
        self._made: dict[int, SamplePart] = {}
        if ops.slot_edits is not None:
            made = resolve_name(ops.slot_edits)(vocab_size, slots, stop_ids, place)
            self._made[len(first)] = made

    @property
    def made(self) -> list[SamplePart]:
        """The parts created so far, in the order in which they apply."""
        return [self._made[kind] for kind in sorted(self._made)]

    def open(self, opened: Open) -> tuple[SamplePart, ...]:
        """Add a sequence to the parts that it needs, and return these parts."""
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
"""Reported instead of a token if the row's logits are not finite."""
_MASK = (1 << 64) - 1
NO_ROWS: frozenset[int] = frozenset()
GREEDY: Columns = 0.0, 0, 1.0, 0.0
"""The sampling parameters of a slot that is free or uses greedy sampling."""


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of `values` [R, N] have only finite values, [R] bool.

    If a weight or an embedding is damaged, or a dtype overflows, only the affected requests then
    end. One pass suffices, because a sum is only finite if all its terms are.
    """
    return values.sum(dim=-1, dtype=torch.float32).isfinite()


def quieten(logits: torch.Tensor) -> torch.Tensor | None:
    """Set rows of `logits` [D, V] that are not finite to zero, because the sampling kernels require
    finite values.

    Returns `finite_rows`, or None on a CPU if all rows are finite.
    """
    if not logits.is_cuda and isfinite(logits.sum()):
        return None
    finite = finite_rows(logits)  # [D]
    # unconditional: a check on the host would wait for the GPU
    logits.masked_fill_(~finite.unsqueeze(1), 0.0)
    return finite


def uniform(seed: int, count: int) -> float:
    """Return a random number in [0, 1) that depends only on `seed` and `count`.

    Two rounds of splitmix64 compute it (Steele, Lea, Flood 2014), of which 53 bits are used.
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
    """The log-probabilities of W sampled rows."""

    rows: Sequence[int]  # [W]: indices among the rows that sample
    tops: Sequence[int]  # [W]: how many of the K most likely tokens to report for each
    # log-probabilities of the sampled tokens [W] and of the most likely ones [W, K], and the ids of
    # the most likely ones [W, K]
    tensors: Sequence[torch.Tensor]

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        chosen, best, ids = (each.tolist() for each in found)
        logprobs = []
        for index, (row, top) in enumerate(zip(self.rows, self.tops)):
            pairs = tuple(zip(ids[index][:top], best[index][:top]))
            logprobs.append((row, TokenLogprobs(result.tokens[row], chosen[index], pairs)))
        return replace(result, logprobs=tuple(logprobs))


class Sampler:
    """Samples tokens for all slots of one worker."""

    def __init__(
        self,
        vocab_size: int,
        slots: int,
        stop_ids: Sequence[int],
        place: torch.device,
        ops: Ops | None = None,
    ) -> None:
        """Allocate the tables.

        stop_ids: the model's end tokens, which are banned below a minimum length.
        ops: the operations to use. The default is those of the device.
        """
        self._ops = ops = ops or pick_ops(place, torch.float32)
        self._vocab_size = vocab_size
        self._device = place
        self._columns: list[Columns] = [GREEDY] * slots
        self._drew = [False] * slots  # whether the slot's row of `_table` was set
        self._table = torch.zeros((slots, COLUMNS), dtype=torch.float32, device=place)
        self._tops: dict[int, int] = {}  # by slot, how many likely tokens to report
        self._parts = SampleParts(vocab_size, slots, stop_ids, place, ops)
        # by slot, the parts that edit its logits
        self._joined: dict[int, tuple[SamplePart, ...]] = {}

    def open(self, opened: Open) -> None:
        """Add the sequence in `opened`, which has its prompt and the output so far."""
        slot, params = opened.slot, opened.sampling
        factor, limit, share, floor = params.columns
        # top-k may be a 64-bit number.
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
        """Sample once with and once without masks, so that kernels are compiled before the first
        request.
        """
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
        self._table[0].zero_()  # `open` does not reset the row of a greedy slot

    def __call__(
        self,
        logits: torch.Tensor,
        draws: Draws,
        masks: torch.Tensor | None = None,
        masked: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Report | None]:
        """Sample one token per row of `logits` [D, V] float32, which are changed in place.

        Returns tokens [D] int64, and log-probabilities if any row requests them, else None.

        masks: [M, ceil(V / 32)] int32, on the device. Bit i % 32 of word i // 32 is set if token i
            may be sampled.
        masked: the row of each mask. By default, there is one mask per row.
        """
        wants = (
            [at for at, slot in enumerate(draws.rows) if slot in self._tops] if self._tops else []
        )
        # Log-probabilities are from the model's distribution, before any edit.
        raw = torch.log_softmax(self._pick(logits, wants), dim=-1) if wants else None  # [W, V]
        depends = self._joined.keys() & draws.rows if self._joined else NO_ROWS
        later: RowMasks | None = None
        if masks is not None:
            rows = range(len(masks)) if masked is None else masked
            if depends:  # bans depend on which tokens a mask leaves
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
        """Return the log-probabilities to report.

        raw: the log-probabilities of the rows `wants`, [W, V].
        """
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
        """Edit and sample all rows at once. Report the tokens to the parts that count them, and
        return them.
        """
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
        """Return the parts that edit the slots in `depends`, in the order in which they apply."""
        joined = [self._joined[slot] for slot in depends if slot in draws.rows]
        return [part for part in self._parts.made if any(part in each for each in joined)]

    def _sample_in_order(
        self, logits: torch.Tensor, draws: Draws, depends: Collection[int], masked: bool
    ) -> torch.Tensor:
        """Sample the rows of each slot one after another, and return the tokens [D].

        The edits of later rows depend on the tokens that earlier ones sample. Rows after a rejected
        draft token are skipped and get 0.
        """
        tokens = torch.zeros(len(draws.rows), dtype=torch.int64, device=logits.device)
        drawn: dict[
            int, int
        ] = {}  # by slot, the last sampled token, while draft tokens are accepted
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
    return Draws(
        [draws.rows[at] for at in places],
        [draws.counts[at] for at in places],
        draws.slots.index_select(0, index),
        draws.uniforms.index_select(0, index),
    )
