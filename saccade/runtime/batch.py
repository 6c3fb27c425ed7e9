"""Converts plans to tensors. It stores the worker's state of each slot, and fills the input buffers
of a step.

A plan's row is one sequence's part of a step. A row that decodes has one input token. The previous
step has sampled this token, perhaps without reporting it to the scheduler yet. Sampled tokens are
stored on the device, so that the host can start the next step before it receives them.

A slot stores the data that only a sequence's first plan contains: prompt tokens, rotary positions
and KV pages. The inputs of a step are written to one staging buffer, and sent to the device in one
copy.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import NO_LINE, PLANS_IN_FLIGHT, Open, Plan, Row, RowExtra, Splice
from saccade.kernels.device import send
from saccade.nn.protocol import Batch
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.row_parts import Draws, ExtraRow
from saccade.runtime.sampling.sampler import uniform
from saccade.runtime.vision.positions import PositionCache

Integers = npt.NDArray[np.int64]
UPDATES = 4096
"""Maximum updates of the page table that the staging buffer has space for. Others are copied
separately.
"""
NO_SNAPSHOTS: Mapping[int, int] = MappingProxyType({})
ROW_TOKENS = 8
"""A padded shape has space for one prefill row per this many tokens."""


class Frame(NamedTuple):
    """The padded shape of a step. It equals the shape of the CUDA graph that the step replays.

    Padding rows write to the dummy page and attend to no keys. Padding image rows are added to
    padding tokens.
    """

    singles: int  # rows that decode, which come first in the batch
    rows: int  # rows in total
    tokens: int  # tokens in total
    splices: int  # rows of image embeddings

    @classmethod
    def decode(cls, rows: int) -> Frame:
        """Return the padded shape of steps that only decode, with up to `rows` rows."""
        return cls(rows, rows, rows, 0)

    @classmethod
    def mixed(cls, singles: int, tokens: int) -> Frame:
        """Return the padded shape of steps that decode and compute prompts.

        They have up to `singles` rows that decode, and up to `tokens` - 1 tokens in other rows. The
        last row is always padding.
        """
        return cls(singles, singles + 1 + tokens // ROW_TOKENS, singles + tokens, tokens)


@dataclass(frozen=True, slots=True)
class Slot:
    """The data of one sequence that a worker stores while the sequence runs."""

    tokens: Integers  # [P]: known when the slot was opened
    positions: Integers  # [A, P]: their rotary positions, for each axis
    shift: int  # rotary position minus index, for later tokens
    prompt_length: int
    seed: int | None  # `None` for greedy sampling
    adapter: int  # as in `Open`


class PageTable:
    """Stores the KV pages of each slot, in order: int32 [slots, pages] on the device.

    The host has a copy, both as `array` (on a CPU the same memory) and as `lists`.
    """

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        # torch.empty, because unused entries are never read and then take no physical memory.
        on_host = torch.empty((slots, pages), dtype=torch.int32)
        self.array = on_host.numpy()
        self.lists: list[list[int]] = [[] for _ in range(slots)]
        self.on_device = on_host if device.type == "cpu" else on_host.to(device)
        self._separate = self.on_device is not on_host
        self._updates: list[int] = []  # flat indices of entries that have changed on the host only

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """Set the pages of a new sequence in `slot`."""
        self.array[slot, : len(pages)] = pages
        self.lists[slot] = list(pages)
        if self._separate and pages:
            self._updates = [at for at in self._updates if at // self.array.shape[1] != slot]
            self._send(slot, 0, len(pages))

    def append(self, slot: int, pages: Sequence[int]) -> None:
        """Add pages to the sequence in `slot`."""
        start = len(self.lists[slot])
        self.array[slot, start : start + len(pages)] = pages
        self.lists[slot] += pages
        if not self._separate:
            return
        if len(self._updates) + len(pages) > UPDATES:
            self._send(slot, start, len(pages))
        else:
            place = slot * self.array.shape[1] + start
            self._updates += range(place, place + len(pages))

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return the flat indices of the entries to update on the device, and their values. Clear
        both.

        The staging buffer transfers them.
        """
        places, self._updates = self._updates, []
        return places, self.array.reshape(-1)[places].tolist() if places else []

    def update(self, places: torch.Tensor, pages: torch.Tensor) -> None:
        """Apply the updates from `take_updates`.

        places: the flat indices, [U] on the device.
        pages: the values, [U] on the device.
        """
        if len(places):
            self.on_device.view(-1).index_copy_(0, places, pages)

    def _send(self, slot: int, start: int, count: int) -> None:
        pages = self.array[slot, start : start + count].copy()
        self.on_device[slot, start : start + count].copy_(send(pages, self.on_device.device))


class Layout(NamedTuple):
    """The sizes of the fields in a step's staging buffer."""

    axes: int  # axes of rotary positions
    tokens: int
    rows: int
    draws: int
    updates: int
    splices: int


class Fields(NamedTuple):
    """The inputs of a step on the device, as views of the staging buffer."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [A, T] int64
    out_slots: torch.Tensor  # [T] int64
    owners: torch.Tensor  # [R] int64: the slot of each row
    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    splice_rows: torch.Tensor  # [S] int64
    sample_rows: torch.Tensor  # [D] int64
    drawing: torch.Tensor  # [D] int64: the slots that sample
    places: torch.Tensor  # [U] int64: flat indices of page table updates
    uniforms: torch.Tensor  # [D] float64
    pages: torch.Tensor  # [U] int32: the pages at these indices

    @classmethod
    def of(cls, buffer: torch.Tensor, layout: Layout) -> Fields:
        """Split the buffer into fields, in the order in which `Batcher._stage` writes them.

        The inputs of the network's layers come first, so that their addresses depend only on the
        padded shape, as CUDA graphs require.
        """
        axes, total, rows, draws, updates, splices = layout
        sizes = (total, axes * total, total, rows, rows + 1, splices, draws, draws, updates, draws)
        tokens, positions, out_slots, *longs, rest = buffer.split(
            [*sizes, len(buffer) - sum(sizes)]
        )
        owners, bounds, shown, sample_rows, drawing, places, chances = longs
        q_starts, kv_lengths, _ = bounds.view(torch.int32).split([rows + 1, rows, 1])
        pages = rest.view(torch.int32)[:updates]
        return cls(
            tokens,
            positions.view(axes, total),
            out_slots,
            owners,
            q_starts,
            kv_lengths,
            shown,
            sample_rows,
            drawing,
            places,
            chances.view(torch.float64),
            pages,
        )


class BatchOffsets(NamedTuple):
    """Where each row of a step is in the batch, which is padded to the shape `frame`."""

    frame: Frame
    decoding: int  # how many rows decode, which come first
    firsts: list[int]  # index of each row's first token in the batch
    end: int  # index after the last row's last token
    q_starts: list[int]  # as in `Batch`, with padding rows

    def spread(self, values: Sequence[int]) -> list[int]:
        """Return `values`, which has one value per row, with 0 inserted for padding rows."""
        between = self.frame.singles - self.decoding  # padding after the rows that decode
        behind = self.frame.rows - between - len(values)
        return [*values[: self.decoding], *[0] * between, *values[self.decoding :], *[0] * behind]

    def splice_rows(self, splices: Sequence[Splice]) -> Integers:
        """Return the batch index of each row of image embeddings, in the order of `splices`.

        The result is padded to the number of image rows in `frame`.
        """
        between = self.frame.singles - self.decoding  # rows that decode have no image tokens
        rows = [np.arange(each.row, each.row + each.length) + between for each in splices]
        found = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return pad_splices(found, self.frame, self.end)


class SampledRequests(NamedTuple):
    """The D rows of a step that sample a token, on the host. `Draws` explains the fields."""

    slots: list[int]
    last: list[int]  # batch index of each row's last token
    counts: list[int]
    points: list[float]  # random numbers, as in `Draws.uniforms`
    draft_tokens: dict[int, int]

    def on_device(self, there: Fields) -> Draws:
        return Draws(self.slots, self.counts, there.drawing, there.uniforms, self.draft_tokens)


class Staging:
    """Transfers a step's inputs to the device: `words` x 8 bytes there, and host memory to fill.

    On a CPU, both are the same memory. On a GPU, each plan in flight has its own pinned host
    memory.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        apart = device.type != "cpu"
        self._hosts = [
            torch.empty(words, dtype=torch.int64, pin_memory=apart)
            for _ in range(PLANS_IN_FLIGHT if apart else 1)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = (
            torch.empty(words, dtype=torch.int64, device=device) if apart else self._hosts[0]
        )
        self._separate = apart
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._turn = 0
        self._layout = Layout(1, 0, 0, 0, 0, 0)
        self._fields = Fields.of(self._device, self._layout)

    @property
    def on_device(self) -> torch.Tensor:
        """The buffer on the device. Its address never changes."""
        return self._device

    def next(self) -> Integers:
        """Return the host memory to fill for the next step. Wait if it is still being copied."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # the copy of an earlier step, which has usually finished
        return self._arrays[self._turn]

    def send(self, words: int) -> None:
        """Copy the first `words` of the host memory to the device."""
        if self._separate:
            self._device[:words].copy_(self._hosts[self._turn][:words], non_blocking=True)
            self._copied[self._turn] = copied = torch.cuda.Event()
            copied.record()

    def cut(self, layout: Layout) -> Fields:
        """Return the buffer's fields on the device for a step with this layout."""
        if layout != self._layout:  # decode steps reuse the same layout
            self._layout, self._fields = layout, Fields.of(self._device, layout)
        return self._fields


class Batcher:
    """Builds the batches of one worker, and stores the state of its slots."""

    def __init__(
        self, known: PositionCache, slots: int, chunk_tokens: int, table: PageTable, page_size: int
    ) -> None:
        """Allocate the buffers.

        slots: the maximum number of sequences.
        chunk_tokens: the maximum number of tokens in a step, in addition to one for each sequence.
        """
        device = table.on_device.device
        self.slots = slots
        self.chunk_tokens = chunk_tokens
        self._known = known
        self._axes = known.spec.position_axes
        self._page_size = page_size
        self._table = table
        self._slots: list[Slot | None] = [None] * slots
        self._drawn = torch.zeros(slots, dtype=torch.int64, device=device)
        # Words for each token: its id, a position per axis, a KV slot, and an index in a splice.
        # For each row, and as many draft tokens as slots: a slot, three for sampling, and two half
        # words (q_starts, kv_lengths). For each update: an index and half a word. For each other
        # row (at most one per token): a slot and two half words.
        words = (3 + self._axes) * (chunk_tokens + slots) + 12 * slots + 2 * UPDATES + 4
        words += 2 * (1 + chunk_tokens)
        self._staging = Staging(words, device)
        self._no_rows = torch.empty((0, 0), device=device)

    def open(self, opened: Open) -> None:
        """Add a sequence to an empty slot."""
        assert self._slots[opened.slot] is None, "a plan opens a slot that is in use"
        images = [self._known.image(image.grid) for image in opened.images]
        prompt = opened.tokens[: opened.prompt_length]
        positions, following = self._known.spec.positions(prompt, opened.spans, images)  # [A, P]
        # Tokens after the prompt are text, so their positions advance by one on all axes.
        shift = following - len(prompt)
        answer = np.arange(following, shift + len(opened.tokens))
        tokens = np.array(opened.tokens, np.int64)
        sampling = opened.sampling
        self._slots[opened.slot] = Slot(
            tokens,
            np.hstack((positions, np.tile(answer, (self._axes, 1)))),
            shift,
            opened.prompt_length,
            None if sampling.is_greedy else sampling.seed,
            opened.adapter,
        )
        self._table.open(opened.slot, opened.pages)

    def close(self, slot: int) -> None:
        self._slots[slot] = None

    def keep_tokens(self, draws: Draws, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, which are the inputs of the next step's decoding rows."""
        self._drawn.index_copy_(0, draws.slots, tokens)

    def count_decoding(self, rows: Sequence[Row]) -> int:
        """Return the number of decoding rows, which come first. Their token is only known on the
        device.
        """
        for index, row in enumerate(rows):
            slot = self._slots[row.slot]
            assert slot is not None, "a plan names an empty slot"
            if row.tokens or row.start < len(slot.tokens):
                return index
        return len(rows)

    def known(self, slot: int, place: int) -> int:
        """Return the token at index `place` of a slot's sequence.

        Returns 0 if the token was added after the slot was opened.
        """
        opened = self._slots[slot]
        assert opened is not None, "a plan names an empty slot"
        return int(opened.tokens[place]) if place < len(opened.tokens) else 0

    def capacity(self, slot: int) -> int:
        """Return how many tokens fit in a slot's KV pages."""
        return len(self._table.lists[slot]) * self._page_size

    def singles(self, places: Mapping[int, int], tokens: Sequence[int]) -> Batch:
        """Return a batch with one token for each slot.

        The batch is independent of the plan's batch, and does not use the staging buffer.

        places: for each slot, the index of its token in the sequence.
        """
        positions, kept = [], []
        for slot, place in places.items():
            opened, page = self._slots[slot], self._table.lists[slot][place // self._page_size]
            assert opened is not None, "a plan names an empty slot"
            positions.append(place + opened.shift)
            kept.append(page * self._page_size + place % self._page_size)
        count = len(places)
        return Batch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions).expand(self._axes, count),
            out_slots=torch.tensor(kept),
            slots=torch.tensor(list(places)),
            page_table=self._table.on_device,
            q_starts=torch.arange(count + 1, dtype=torch.int32),
            kv_lengths=torch.tensor([place + 1 for place in places.values()], dtype=torch.int32),
            singles=count,
            splice_rows=torch.empty(0, dtype=torch.int64),
            embeddings=self._no_rows,
            sample_rows=torch.empty(0, dtype=torch.int64),
        )

    def places(self, rows: Sequence[Row], frame: Frame | None = None) -> list[int]:
        """Return the index in the batch of each of the plan's rows.

        frame: the shape that the batch is padded to, or None without padding.
        """
        decoding = self.count_decoding(rows)
        first = frame.singles if frame else decoding
        return [*range(decoding), *range(first, first + len(rows) - decoding)]

    def idle(self, frame: Frame) -> Batch:
        """Return a batch that consists of padding. Its embeddings are empty: [0, 0]."""
        placed = place_rows([], 0, frame)
        there = self._stage([], placed, placed.splice_rows([]), SampledRequests([], [], [], [], {}))
        assert not len(there.places), "pages of an opened slot go with its rows"
        return self._batch(there, frame.singles, self._no_rows)

    def build(
        self, plan: Plan, embeddings: EmbeddingMemory, frame: Frame | None = None
    ) -> tuple[Batch, Draws]:
        """Append the rows' new pages to the page table, and return the tensors for one step.

        They are valid until the next step is built.

        frame: the shape to pad to, or None for no padding. Embeddings are never padded.
        """
        rows = plan.rows
        placed = place_rows(rows, self.count_decoding(rows), frame)
        self._grow(rows)
        drawing = self._find_draws(rows, placed)
        there = self._stage(rows, placed, placed.splice_rows(plan.splices), drawing)
        self._table.update(there.places, there.pages)
        if placed.decoding:
            mine, tokens = there.owners, there.tokens
            if placed.decoding < len(tokens):
                mine, tokens = mine[: placed.decoding], tokens[: placed.decoding]
            torch.index_select(self._drawn, 0, mine, out=tokens)
        parts = [(each.key, each.offset, each.length) for each in plan.splices]
        shown = embeddings.gather(parts) if parts else embeddings.none
        kept = {first: row.keep for first, row in zip(placed.firsts, rows) if row.keep != NO_LINE}
        return self._batch(there, placed.frame.singles, shown, kept), drawing.on_device(there)

    def _batch(
        self,
        there: Fields,
        singles: int,
        shown: torch.Tensor,
        kept: Mapping[int, int] = NO_SNAPSHOTS,
    ) -> Batch:
        return Batch(
            tokens=there.tokens,
            positions=there.positions,
            out_slots=there.out_slots,
            slots=there.owners,
            page_table=self._table.on_device,
            q_starts=there.q_starts,
            kv_lengths=there.kv_lengths,
            singles=singles,
            splice_rows=there.splice_rows,
            embeddings=shown,
            sample_rows=there.sample_rows,
            kept=kept,
        )

    def asking(
        self, rows: Sequence[Row], frame: Frame | None = None
    ) -> Mapping[type[RowExtra], list[ExtraRow[Any]]]:
        """Group the rows with extras by the type of the extra.

        frame: the shape that the batch is padded to, or None without padding.
        """
        found: dict[type[RowExtra], list[ExtraRow[Any]]] = {}
        decoding = self.count_decoding(rows)
        first = frame.singles if frame else decoding
        for place, row in enumerate(rows[decoding:], decoding):  # rows that decode have no extras
            slot = self._slots[row.slot]
            assert slot is not None, "a plan names an empty slot"
            for extra in row.extras:
                each = ExtraRow(
                    place, first, row.start, row.length, slot.tokens, slot.adapter, extra
                )
                found.setdefault(type(extra), []).append(each)
            first += row.length
        return found

    def _grow(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.pages:
                self._table.append(row.slot, row.pages)
            held = len(self._table.lists[row.slot]) * self._page_size
            assert row.start + row.length <= held, "a row reaches beyond its pages"

    def _find_draws(self, rows: Sequence[Row], placed: BatchOffsets) -> SampledRequests:
        drawing = SampledRequests([], [], [], [], {})
        for row, first in zip(rows, placed.firsts):
            if not row.sample:
                continue
            slot = self._slots[row.slot]
            assert slot is not None, "a plan names an empty slot"
            if row.draft:
                drawing.draft_tokens[len(drawing.slots)] = row.tokens[0]
            count = row.start + row.length - slot.prompt_length
            drawing.slots.append(row.slot)
            drawing.last.append(first + row.length - 1)
            drawing.counts.append(count)
            drawing.points.append(0.0 if slot.seed is None else uniform(slot.seed, count))
        return drawing

    def _stage(
        self, rows: Sequence[Row], placed: BatchOffsets, spliced: Integers, drawing: SampledRequests
    ) -> Fields:
        """Write a step's inputs in the order of `Fields`, and send them to the device in
        one copy.
        """
        frame, host = placed.frame, self._staging.next()
        total, width = frame.tokens, 2 + self._axes
        owners = placed.spread([row.slot for row in rows])
        lengths = placed.spread([row.start + row.length for row in rows])
        begin, longs = 0, owners
        if placed.decoding == total:
            positions, places = self._find_places(rows)
            longs = [*[0] * total, *positions * self._axes, *places, *owners]
        else:
            begin = width * total
            tokens = host[:begin]
            if frame.rows > len(rows):
                tokens[:] = 0
            self._write_tokens(rows, placed, tokens.reshape(width, total))
        words = append(host, begin, longs, [*placed.q_starts, *lengths])
        if len(spliced):
            host[words : words + len(spliced)] = spliced
            words += len(spliced)
        changed, pages = self._table.take_updates()
        longs = [*drawing.last, *drawing.slots, *changed]
        self._staging.send(append(host, words, longs, pages, drawing.points))
        sizes = frame.rows, len(drawing.slots), len(changed), len(spliced)
        return self._staging.cut(Layout(self._axes, total, *sizes))

    def _find_places(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        size, lists = self._page_size, self._table.lists
        positions: list[int] = []
        places: list[int] = []
        for row in rows:
            slot = self._slots[row.slot]
            assert slot is not None and row.length == 1
            positions.append(row.start + slot.shift)
            places.append(lists[row.slot][row.start // size] * size + row.start % size)
        return positions, places

    def _write_tokens(self, rows: Sequence[Row], placed: BatchOffsets, into: Integers) -> None:
        """Write each row's tokens, rotary positions and KV slots to `into` [1 + A + 1, T].

        The tokens of rows that decode are left out, because they are filled in on the device.
        """
        decoding, firsts, size = placed.decoding, placed.firsts, self._page_size
        if decoding:
            into[1:-1, :decoding], into[-1, :decoding] = self._find_places(rows[:decoding])
        for row, first in zip(rows[decoding:], firsts[decoding:]):
            slot = self._slots[row.slot]
            assert slot is not None, "a plan names an empty slot"
            start, end = row.start, row.start + row.length
            opened = max(0, len(slot.tokens) - start)
            assert opened or row.tokens, "decode rows must come first"
            assert row.length == min(row.length, opened) + len(row.tokens), "unreported tokens"
            part, place = into[:, first : first + row.length], np.arange(start, end)
            part[0, :opened] = slot.tokens[start:end]
            part[0, opened:] = row.tokens
            part[1:-1, :opened] = slot.positions[:, start:end]
            part[1:-1, opened:] = place[opened:] + slot.shift
            part[-1] = self._table.array[row.slot, place // size] * np.int64(size) + place % size


def place_rows(rows: Sequence[Row], decoding: int, frame: Frame | None) -> BatchOffsets:
    """Return the offsets of a step's rows in the batch.

    decoding: the number of leading rows that decode.
    frame: the shape to pad to, or None for no padding.
    """
    others = [row.length for row in rows[decoding:]]
    frame = frame or Frame(decoding, len(rows), decoding + sum(others), 0)
    q_starts = compute_offsets(others, frame)
    firsts = [*range(decoding), *q_starts[frame.singles :]]
    return BatchOffsets(frame, decoding, firsts, q_starts[frame.singles + len(others)], q_starts)


def compute_offsets(others: Sequence[int], frame: Frame) -> list[int]:
    """Return the index of each row's first token in the padded batch, and the end, [R + 1].

    Rows with a single token come first, then rows with `others` tokens, then empty rows. The last
    row has all remaining tokens, which are padding.
    """
    found = [*range(frame.singles), *accumulate(others, initial=frame.singles)]
    if more := frame.rows + 1 - len(found):
        found += [*[found[-1]] * (more - 1), frame.tokens]
    assert len(found) == frame.rows + 1 and found[-1] == frame.tokens, "the step does not fit"
    return found


def pad_splices(shown: Integers, frame: Frame, end: int) -> Integers:
    """Pad the batch indices of image rows to the number in `frame`.

    The padding refers to all padding tokens in turn, because adding many rows to one token is slow.

    shown: the batch indices of image rows.
    end: the batch index of the first padding token.
    """
    if (left := frame.splices - len(shown)) <= 0:
        return shown
    assert end < frame.tokens, "a frame with images has a token that pads"
    return np.concatenate([shown, end + np.arange(left) % (frame.tokens - end)])


def append(
    host: Integers,
    start: int,
    longs: Sequence[int],
    ints: Sequence[int],
    floats: Sequence[float] = (),
) -> int:
    """Write `longs`, `floats` and `ints` contiguously into `host`, starting at word `start`.

    Two ints take one word of 8 bytes. Returns the end, in words.
    """
    form = f"={len(longs)}q{len(floats)}d{len(ints)}i"
    struct.pack_into(form, host.data, 8 * start, *longs, *floats, *ints)
    return start + len(longs) + len(floats) + -(-len(ints) // 2)
