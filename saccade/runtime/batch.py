"""From a plan to tensors: the worker's per-slot state, and `build_batch`.

A slot remembers what the plan does not repeat: token values (those that this worker sampled too),
rotary positions and the page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.plan import Open, Plan, Row
from saccade.kernels.attention import Context
from saccade.nn.protocol import Batch
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.positions import PositionCache
from saccade.runtime.sampler import SamplerState


class PageTable:
    """KV slots of one sequence's tokens, in order, on the device; grows page by page.

    `run` is the first KV slot while all pages are consecutive (attention then reads a slice instead
    of gathering), else -1.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._last_page = -1
        self.run = -1
        self.length = 0
        self.host = np.empty(64 * page_size, np.int64)
        self.device_slots = self._to_device(device)

    def _to_device(self, device: torch.device) -> torch.Tensor:
        slots = torch.from_numpy(self.host)
        return slots if device.type == "cpu" else slots.to(device)

    def append(self, pages: Sequence[int]) -> None:
        size, begin = self._page_size, self.length
        end = begin + len(pages) * size
        if end > len(self.host):
            grown = np.empty(max(end, 2 * len(self.host)), np.int64)
            grown[:begin] = self.host[:begin]
            self.host = grown
            self.device_slots = self._to_device(self.device_slots.device)
        for page in pages:
            first = page * size
            self.host[self.length : self.length + size] = np.arange(first, first + size)
            if self.length == 0:
                self.run = first
            elif page != self._last_page + 1:
                self.run = -1
            self._last_page = page
            self.length += size
        if self.device_slots.device.type != "cpu":
            self.device_slots[begin:end].copy_(torch.from_numpy(self.host[begin:end]))


class Slot:
    """One sequence on this worker. `tokens` grows by the tokens sampled here."""

    def __init__(
        self, opened: Open, known: PositionCache, page_size: int, device: torch.device
    ) -> None:
        self.tokens = list(opened.tokens)
        self._positions, next_position = known.sequence(
            len(opened.tokens), opened.spans, opened.images
        )  # [3, P]
        # Every token after those known now is text: all three axes advance by one.
        self._shift = next_position - len(opened.tokens)
        self.table = PageTable(page_size, device)
        self.table.append(opened.pages)
        self.sampler = SamplerState(opened.sampling, opened.tokens, opened.prompt_length)

    def positions(self, start: int, length: int) -> np.ndarray:
        """Rotary positions [3, length] of tokens [start, start + length)."""
        known = self._positions.shape[1]
        if start >= known:
            later = np.arange(start + self._shift, start + self._shift + length)
            return np.broadcast_to(later, (3, length))
        assert start + length <= known, (
            "a row lies either in the tokens a slot was opened with, or after them"
        )
        return self._positions[:, start : start + length]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.sampler.append(token)


def build_batch(
    plan: Plan, slots: Sequence[Slot | None], embeddings: EmbeddingMemory, device: torch.device
) -> Batch:
    """The tensors of one step. Appends each row's new pages to its slot's table first."""
    tokens: list[int] = []
    contexts: list[Context] = []
    sample_rows: list[int] = []
    positions: list[np.ndarray] = []
    out_slots: list[np.ndarray] = []
    for row in plan.rows:
        slot = slots[row.slot]
        assert slot is not None, "a plan names an empty slot"
        if row.pages:
            slot.table.append(row.pages)
        contexts.append(_context(row, len(tokens), slot.table))
        tokens += slot.tokens[row.start : row.start + row.length]
        positions.append(slot.positions(row.start, row.length))
        out_slots.append(slot.table.host[row.start : row.start + row.length])
        if row.sample:
            sample_rows.append(len(tokens) - 1)
    splice_rows = [np.arange(splice.row, splice.row + splice.length) for splice in plan.splices]

    def put(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return Batch(
        tokens=put(np.array(tokens, np.int64)),  # [T]
        positions=put(np.concatenate(positions, axis=1)),  # [3, T]
        out_slots=put(np.concatenate(out_slots)),  # [T]
        contexts=tuple(contexts),
        splice_rows=put(
            np.concatenate(splice_rows) if splice_rows else np.empty(0, np.int64)
        ),  # [S]
        embeddings=embeddings.gather(
            [(splice.key, splice.offset, splice.length) for splice in plan.splices]
        ),  # [S, W]
        sample_rows=put(np.array(sample_rows, np.int64)),  # [R]
    )


def _context(row: Row, begin: int, table: PageTable) -> Context:
    kv_length = row.start + row.length
    assert kv_length <= table.length, "a row reaches beyond its pages"
    return Context(
        start=begin,
        length=row.length,
        kv_length=kv_length,
        slots=table.device_slots[:kv_length],
        run=table.run,
    )
