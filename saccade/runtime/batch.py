"""From a plan to tensors: what the worker remembers of each slot, and the buffers of a step.

Owns the page table, the tokens drawn last (on the device: the host need not know them to begin the
next step), and one staging buffer that a step's numbers cross to the device in, in one copy. A slot
remembers what the plan does not repeat: prompt tokens, rotary positions and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import Open, Plan, Splice
from saccade.nn.protocol import Batch, Bounds
from saccade.nn.transfer import send
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.positions import PositionCache
from saccade.runtime.sampler import Draws, uniforms

Integers = npt.NDArray[np.int64]
IN_FLIGHT = 2
"""Plans that may be begun before the first one's result is read."""
UPDATES = 4096
"""New pages that cross in the staging buffer; what is beyond goes in copies of its own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a slot was opened with: tokens [P], and their rotary positions [3, P]."""

    tokens: Integers
    positions: Integers


class PageTable:
    """The pages of every slot's sequence, in order: int32 [slots, pages] on the device, and a copy
    for the host (on a CPU the same memory).
    """

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        # Never read beyond `counts`: memory that is not touched costs nothing on a CPU.
        on_host = torch.empty((slots, pages), dtype=torch.int32)
        self.host = on_host.numpy()
        self.counts = np.zeros(slots, np.int64)
        self.on_device = on_host if device.type == "cpu" else on_host.to(device)
        self._apart = self.on_device is not on_host
        self._updates: list[int] = []  # flat places that the device does not know yet

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """The sequence in `slot` is another one, and has these pages."""
        self.host[slot, : len(pages)] = pages
        self.counts[slot] = len(pages)
        if self._apart and pages:
            self._updates = [at for at in self._updates if at // self.host.shape[1] != slot]
            self._send(slot, 0, len(pages))

    def append(self, slot: int, pages: Sequence[int]) -> None:
        """It has grown."""
        start = int(self.counts[slot])
        self.host[slot, start : start + len(pages)] = pages
        self.counts[slot] += len(pages)
        if not self._apart:
            return
        if len(self._updates) + len(pages) > UPDATES:
            self._send(slot, start, len(pages))
        else:
            place = slot * self.host.shape[1] + start
            self._updates += range(place, place + len(pages))

    def take_updates(self) -> tuple[Integers, npt.NDArray[np.int32]]:
        """Flat places of the table and what they hold now, to be sent with the step's numbers."""
        places = np.array(self._updates, np.int64)
        self._updates = []
        return places, self.host.reshape(-1)[places]

    def _send(self, slot: int, start: int, count: int) -> None:
        pages = self.host[slot, start : start + count].copy()
        self.on_device[slot, start : start + count].copy_(send(pages, self.on_device.device))


class Staging:
    """One buffer of `words` x 8 bytes on the device, and what fills it: on a CPU the same memory,
    else pinned buffers, one per plan that may be in flight.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        apart = device.type != "cpu"
        hosts = [
            torch.empty(words, dtype=torch.int64, pin_memory=apart)
            for _ in range(IN_FLIGHT if apart else 1)
        ]
        self._hosts = hosts
        self._device = torch.empty(words, dtype=torch.int64, device=device) if apart else hosts[0]
        self._apart = apart
        self._copied: list[torch.cuda.Event | None] = [None] * len(hosts)
        self._turn = 0

    def fill(
        self, longs: Sequence[Integers], ints: Sequence[npt.NDArray[np.int32]]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The arrays on the device, flat, in one copy. Their addresses follow from their sizes."""
        sizes, small = [x.size for x in longs], [x.size for x in ints]
        whole, words = sum(sizes), sum(sizes) + -(-sum(small) // 2)
        self._turn = (self._turn + 1) % len(self._hosts)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # of two steps ago: long done
        host = self._hosts[self._turn]
        assert words <= host.shape[0], "a plan is larger than the limits that it was made for"
        np.concatenate(longs, out=host.numpy()[:whole])
        np.concatenate(ints, out=host.numpy()[whole:words].view(np.int32)[: sum(small)])
        if self._apart:
            self._device[:words].copy_(host[:words], non_blocking=True)
            self._copied[self._turn] = copied = torch.cuda.Event()
            copied.record()
        there = self._device
        return (
            there[:whole].split(sizes),
            there[whole:words].view(torch.int32)[: sum(small)].split(small),
        )


class Batcher:
    """All slots of one worker, and the batches made of them."""

    def __init__(
        self,
        known: PositionCache,
        slots: int,
        chunk_tokens: int,
        table: PageTable,
        page_size: int,
    ) -> None:
        """At most `slots` sequences; a step computes at most `chunk_tokens` beside one token of
        each.
        """
        device = table.on_device.device
        self._known = known
        self._page_size = page_size
        self._table = table
        self._prompts: list[Prompt | None] = [None] * slots
        self._opened = np.zeros(slots, np.int64)  # tokens that a slot was opened with
        self._asked = np.zeros(slots, np.int64)  # of those, the prompt's
        self._shift = np.zeros(slots, np.int64)  # from a later token's place to its position
        self._seeds = np.zeros(slots, np.uint64)
        self._drawn = torch.zeros(slots, dtype=torch.int64, device=device)
        tokens = chunk_tokens + slots
        # In the order of `build`: four or fewer numbers per token, two of splices, six per row.
        self._staging = Staging(6 * tokens + 8 * slots + 2 * UPDATES + 8, device)

    def open(self, opened: Open) -> None:
        """A sequence enters a slot that is empty."""
        slot = opened.slot
        assert self._prompts[slot] is None, "a plan opens a slot that is in use"
        positions, following = self._known.sequence(
            len(opened.tokens), opened.spans, opened.images
        )  # [3, P]
        self._prompts[slot] = Prompt(np.array(opened.tokens, np.int64), positions)
        self._opened[slot] = len(opened.tokens)
        self._asked[slot] = opened.prompt_length
        # Every token after those known now is text: all three axes advance by one.
        self._shift[slot] = following - len(opened.tokens)
        self._seeds[slot] = opened.sampling.seed & (1 << 64) - 1
        self._table.open(slot, opened.pages)

    def close(self, slot: int) -> None:
        self._prompts[slot] = None

    def keep(self, draws: Draws, tokens: torch.Tensor) -> None:
        """These were drawn; the next step's rows of these slots begin with them."""
        self._drawn.index_copy_(0, draws.slots, tokens)

    def build(self, plan: Plan, embeddings: EmbeddingMemory) -> tuple[Batch, Draws]:
        """The tensors of one step, valid until the next is built. Appends each row's new pages
        first.
        """
        table = self._table
        for row in plan.rows:
            assert self._prompts[row.slot] is not None, "a plan names an empty slot"
            if row.pages:
                table.append(row.slot, row.pages)
        slots, starts, lengths, sampled = np.array(
            [(row.slot, row.start, row.length, row.sample) for row in plan.rows], np.int64
        ).T
        ends = starts + lengths
        size = self._page_size
        assert (ends <= table.counts[slots] * size).all(), "a row reaches beyond its pages"
        q_starts = np.concatenate(([0], lengths.cumsum()))
        of = np.repeat(np.arange(len(slots)), lengths)  # [T] row of each token
        place = np.arange(len(of)) + (starts - q_starts[:-1])[of]  # in its sequence
        owner = slots[of]
        tokens, positions = self._values(slots, starts, q_starts, place, owner)
        drawn = np.flatnonzero(starts >= self._opened[slots])
        assert (lengths[drawn] == 1).all(), "a row lies in the tokens of an open, or is one later"
        wanted = np.flatnonzero(sampled)
        counts = ends[wanted] - self._asked[slots[wanted]]
        points = uniforms(self._seeds[slots[wanted]], counts)
        places, pages = table.take_updates()
        longs, ints = self._staging.fill(
            (
                tokens,
                positions.reshape(-1),
                table.host[owner, place // size].astype(np.int64) * size + place % size,
                slots,
                splice_rows(plan.splices),
                q_starts[1:][wanted] - 1,
                slots[wanted],
                points.view(np.int64),
                q_starts[:-1][drawn],
                slots[drawn],
                places,
            ),
            (q_starts.astype(np.int32), ends.astype(np.int32), pages),
        )
        if places.size:
            table.on_device.view(-1).index_copy_(0, longs[10], ints[2])
        if drawn.size:
            longs[0].index_copy_(0, longs[8], self._drawn.index_select(0, longs[9]))
        batch = Batch(
            tokens=longs[0],
            positions=longs[1].view(3, -1),
            out_slots=longs[2],
            slots=longs[3],
            page_table=table.on_device,
            q_starts=ints[0],
            kv_lengths=ints[1],
            bounds=Bounds(int(lengths.max()), int(ends.max()), int(ends.sum())),
            splice_rows=longs[4],
            embeddings=embeddings.gather(
                [(splice.key, splice.offset, splice.length) for splice in plan.splices]
            ),
            sample_rows=longs[5],
        )
        draws = Draws(
            slots[wanted].tolist(), counts.tolist(), longs[6], longs[7].view(torch.float64)
        )
        return batch, draws

    def _values(
        self,
        slots: Integers,
        starts: Integers,
        q_starts: Integers,
        place: Integers,
        owner: Integers,
    ) -> tuple[Integers, Integers]:
        """Tokens [T] and rotary positions [3, T]. Drawn tokens are put in on the device."""
        tokens = np.zeros(len(place), np.int64)
        positions = np.empty((3, len(place)), np.int64)
        positions[:] = place + self._shift[owner]
        for index in np.flatnonzero(starts < self._opened[slots]).tolist():
            prompt = self._prompts[slots[index]]
            assert prompt is not None
            begin, end = q_starts[index], q_starts[index + 1]
            part = slice(starts[index], starts[index] + end - begin)
            assert part.stop <= len(prompt.tokens), "a row lies in the tokens of an open, or after"
            tokens[begin:end] = prompt.tokens[part]
            positions[:, begin:end] = prompt.positions[:, part]
        return tokens, positions


def splice_rows(splices: Sequence[Splice]) -> Integers:
    """The batch rows that are image rows, in the order of the splices."""
    if not splices:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(splice.row, splice.row + splice.length) for splice in splices])
