"""From logits to tokens: bans and biases, penalties, temperature, min-p, top-k, top-p, each on the
tokens left by the step before (vLLM's order), and log-probabilities.

Owns each slot's parameters and token counts, on the device, so that the host can send the next step
at once. A row's draw depends only on its own logits, its seed and the number of drawn tokens. One
uniform number per token comes from a counter-based hash of (seed, count), known before the logits.
It picks from the row's own cumulative distribution, the best token first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from saccade.core.plan import Open, StepResult
from saccade.core.types import SamplingParams, TokenLogprobs
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.few_rows import FEW_ROWS, ROUNDING
from saccade.kernels.reference.ops import Ops
from saccade.nn.transfer import send
from saccade.runtime.row_parts import DrawPart, Draws
from saccade.runtime.sampling.draw_parts import DrawParts

_MASK = (1 << 64) - 1
NUCLEUS_TOKENS = 1024
"""A row whose draw lies among its so many best tokens needs no sort of all of them."""
FEW_TOKENS = 64
"""The same where top-k leaves no more."""
NOBODY: frozenset[int] = frozenset()


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


@dataclass(frozen=True, slots=True)
class Allowed:
    """Masks [M, ceil(V / 32)] for some rows of logits, still to be applied."""

    masks: torch.Tensor
    rows: Sequence[int]  # [M]


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
        self._asked: list[SamplingParams] = [SamplingParams()] * slots
        self._drew = [False] * slots  # whether its line of the tables is of one that draws
        # temperature, top-p, min-p
        self._params = torch.zeros((slots, 3), dtype=torch.float32, device=place)
        self._top_ks = torch.zeros(slots, dtype=torch.int32, device=place)
        self._tops: dict[int, int] = {}  # alternatives to name, of slots with log-probabilities
        self._parts = DrawParts(vocab_size, slots, stop_ids, place, ops)
        self._joined: dict[int, tuple[DrawPart, ...]] = {}  # of slots that ask for any

    def open(self, opened: Open) -> None:
        """Open a slot for a sequence, with its prompt and the answer so far."""
        slot, params = opened.slot, opened.sampling
        if params.temperature > 0.0 or self._drew[slot]:
            row = np.array((params.temperature, params.top_p, params.min_p), np.float32)
            self._params[slot].copy_(send(row, self._device))
            top_k = min(params.top_k, self._vocab_size)  # what may be asked has 64 bits
            self._top_ks[slot : slot + 1].copy_(send(np.array([top_k], np.int32), self._device))
        self._asked[slot] = params
        self._drew[slot] = params.temperature > 0.0
        if params.logprobs is not None:
            self._tops[slot] = params.logprobs
        if params.edits or opened.rules is not None:
            self._joined[slot] = self._parts.open(opened)

    def close(self, slot: int) -> None:
        self._asked[slot] = SamplingParams()
        self._tops.pop(slot, None)
        for part in self._joined.pop(slot, ()):
            part.close(slot)

    def warm_up(self) -> None:
        """Launch each way to draw once, for kernels that are compiled at first launch."""
        logits = torch.zeros((1, self._vocab_size), dtype=torch.float32, device=self._device)
        slots = torch.zeros(1, dtype=torch.int64, device=self._device)
        draws = Draws([0], [0], slots, torch.zeros(1, dtype=torch.float64, device=self._device))
        drawn = [SamplingParams(temperature=1.0)]
        words = -(-self._vocab_size // 32)
        masks = torch.full((1, words), -1, dtype=torch.int32, device=self._device)
        for allowed in (None, Allowed(masks, [0])):
            for part in self._parts.made:
                part.edit(logits, draws, allowed is not None)
            tokens = self._launch(logits, draws, drawn, allowed)
            for part in self._parts.made:
                part.count(draws, tokens)

    def __call__(
        self,
        logits: torch.Tensor,
        draws: Draws,
        masks: torch.Tensor | None = None,
        masked: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Report | None]:
        """Draw one token [D] int64 per row of `logits` [D, V] float32, changed in place.

        masks: [M, ceil(V / 32)] int32, on the device: bit i % 32 of word i // 32 says whether token
        i may be drawn. masked: the masks' rows. Without them, all rows, in order.
        """
        wants = (
            [at for at, slot in enumerate(draws.rows) if slot in self._tops] if self._tops else []
        )
        # of the model's own distribution, before any edit
        raw = torch.log_softmax(self._pick(logits, wants), dim=-1) if wants else None  # [W, V]
        depends = self._joined.keys() & draws.rows if self._joined else NOBODY
        later: Allowed | None = None
        if masks is not None:
            rows = range(len(masks)) if masked is None else masked
            # What an edit bans depends on what a mask leaves.
            if depends or not self._ops.samples:
                self._ops.mask_logits(logits, masks, None if masked is None else self._send(rows))
            else:
                later = Allowed(masks, rows)
        if depends and any(draws.rows[at] in depends for at in draws.draft_tokens):
            tokens = self._take_turns(logits, draws, depends, masks is not None)
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
        later: Allowed | None,
    ) -> torch.Tensor:
        """Draw all rows, and give the tokens to parts that depend on them."""
        parts = self._parts_of(draws, depends) if depends else ()
        for part in parts:
            masked = part.edit(logits, draws, masked)
        asked = [self._asked[slot] for slot in draws.rows]
        if self._ops.samples:
            tokens = self._launch(logits, draws, asked, later)
        else:
            tokens = self._choose(logits, draws, asked)
        for part in parts:
            part.count(draws, tokens)
        return tokens

    def _parts_of(self, draws: Draws, depends: Collection[int]) -> Sequence[DrawPart]:
        """Return the parts for the rows' slots that are in `depends`, in their order."""
        joined = [self._joined[slot] for slot in depends if slot in draws.rows]
        return [part for part in self._parts.made if any(part in each for each in joined)]

    def _take_turns(
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

    def _launch(
        self,
        logits: torch.Tensor,
        draws: Draws,
        asked: Sequence[SamplingParams],
        allowed: Allowed | None,
    ) -> torch.Tensor:
        """Draw as `_choose` does, by one kernel, which reads the masks too."""
        if allowed is None and all(params.temperature == 0.0 for params in asked):
            return logits.argmax(dim=-1)  # several programs to a row, where the kernel has one
        # Imported where there is a GPU: elsewhere Triton need not be installed.
        from saccade.kernels.triton.sample import launch_sample

        table = logits, draws.slots, self._params, self._top_ks, draws.uniforms
        if allowed is None:
            return launch_sample(*table)
        lines = np.full(len(asked), -1, np.int64)
        lines[list(allowed.rows)] = np.arange(len(allowed.rows))
        return launch_sample(*table, allowed.masks, send(lines, self._device))

    def _choose(
        self, logits: torch.Tensor, draws: Draws, asked: Sequence[SamplingParams]
    ) -> torch.Tensor:
        """Return each row's best token, or a drawn one."""
        drawn = [row for row, params in enumerate(asked) if params.temperature > 0.0]
        if drawn and len(asked) <= FEW_ROWS and not logits.is_cuda:
            return self._choose_few(logits, draws, asked)
        if drawn and len(drawn) == len(asked):
            return self._draw(logits, asked, draws.slots, draws.uniforms)
        tokens = logits.argmax(dim=-1)
        if drawn:
            index = self._send(drawn)
            found = self._draw(
                logits.index_select(0, index),
                [asked[row] for row in drawn],
                draws.slots.index_select(0, index),
                draws.uniforms.index_select(0, index),
            )
            tokens.index_copy_(0, index, found)
        return tokens

    def _choose_few(
        self, logits: torch.Tensor, draws: Draws, asked: Sequence[SamplingParams]
    ) -> torch.Tensor:
        """Do as `_choose`, row by row on the host. PyTorch draws where rounding could decide."""
        tokens = np.zeros(len(asked), np.int64)
        uncertain = []
        points = draws.uniforms.tolist()
        for row, (params, line) in enumerate(zip(asked, logits)):
            if params.temperature == 0.0:
                tokens[row] = line.argmax()
            elif (found := self._ops.draw_few(line, params, points[row])) is None:
                uncertain.append(row)
            else:
                tokens[row] = found
        if uncertain:
            index = self._send(uncertain)
            tokens[uncertain] = self._draw(
                logits.index_select(0, index),
                [asked[row] for row in uncertain],
                draws.slots.index_select(0, index),
                draws.uniforms.index_select(0, index),
            ).numpy()
        return torch.from_numpy(tokens)

    def _pick(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Select rows of `x`, or return `x` itself for all rows."""
        return x if len(rows) == len(x) else x.index_select(0, self._send(rows))

    def _send(self, rows: Sequence[int]) -> torch.Tensor:
        return send(np.array(rows, np.int64), self._device)

    def _draw(
        self,
        logits: torch.Tensor,
        asked: Sequence[SamplingParams],
        slots: torch.Tensor,
        points: torch.Tensor,
    ) -> torch.Tensor:
        """Draw tokens [D] for rows [D, V] whose temperature is above 0.

        Each is drawn among as many of its best tokens as its own parameters ask for, whatever the
        other rows ask for.
        """
        vocab = logits.shape[-1]
        params = self._params.index_select(0, slots)
        limits = [min(each.top_k, vocab) if each.top_k > 0 else vocab for each in asked]
        scaled, most = logits / params[:, :1], self._send(limits)
        tokens = torch.empty_like(slots)
        sizes = [_count_best(limit, vocab) for limit in limits]
        for size in sorted({*sizes, vocab}):
            rows = [row for row, each in enumerate(sizes) if each == size]
            if rows:
                table = (self._pick(each, rows) for each in (scaled, most, params, points))
                found, certain = draw_among(size, *table)
                tokens.index_copy_(0, self._send(rows), found)
                for row, sure in zip(rows, certain.tolist()):
                    sizes[row] = size if sure else vocab
        return tokens


def _count_best(limit: int, vocab: int) -> int:
    """Return how many of a row's best tokens to look at first, with `limit` open to its draw."""
    if limit == vocab:
        return min(NUCLEUS_TOKENS, vocab)
    return next((size for size in (FEW_TOKENS, NUCLEUS_TOKENS) if limit <= size < vocab), vocab)


def _some(draws: Draws, places: Sequence[int], index: torch.Tensor) -> Draws:
    """Return some of a step's rows as rows of their own. index: the places."""
    return Draws(
        [draws.rows[at] for at in places],
        [draws.counts[at] for at in places],
        draws.slots.index_select(0, index),
        draws.uniforms.index_select(0, index),
    )


def draw_among(
    size: int,
    scaled: torch.Tensor,
    limits: torch.Tensor,
    params: torch.Tensor,
    points: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token [D] for each row of `scaled` [D, V] among its `size` best ones.

    Returns also whether these are the whole range of its draw [D]. Where they are fewer, the token
    is meaningless.

    limits [D]: top-k, at most V. params [D, 3]: as `Sampler._params`. points [D]: uniform numbers.
    """
    vocab = scaled.shape[1]
    _, top_p, min_p = params.split(1, dim=1)
    points, few = points.unsqueeze(1), limits.unsqueeze(1) < vocab
    best, order = torch.topk(scaled, size, dim=-1)
    # A row's sum in a product of all rows, as softmax's: alone, `sum` adds up in another order.
    of_all = FEW_TOKENS < size < vocab
    probs = torch.softmax(scaled, -1).gather(1, order) if of_all else torch.softmax(best, -1)
    mass = probs.sum(dim=-1, keepdim=True)
    # Min-p comes first: top-p's share is of what that leaves.
    nucleus = (min_p == 0.0) & (mass > top_p + ROUNDING)
    cut = few | nucleus | (probs[:, -1:] < min_p * probs[:, :1])
    whole = ~few & (min_p == 0.0) & (top_p >= 1.0)
    certain = cut | (whole & (points < mass - ROUNDING))
    left = (probs >= min_p * probs[:, :1]) & (
        torch.arange(size, device=scaled.device) < limits.unsqueeze(1)
    )
    # A row that has lost nothing need not have all its tokens here.
    probs = torch.where(few | (min_p > 0.0), renormalise(probs * left), probs)
    keep = left & (probs.cumsum(dim=-1) - probs < top_p)
    keep[:, 0] = True
    cumulative = (probs * keep).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if size == vocab:
        certain = torch.ones_like(certain)
    else:
        total = torch.where(whole, 1.0, total)
    # The smallest index whose cumulative probability exceeds the point; rounding may leave the
    # sum just below it.
    found = torch.searchsorted(cumulative, points * total, right=True)
    last = keep.int().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return order.gather(1, torch.minimum(found, last)).squeeze(1), certain.squeeze(1)


def renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)
