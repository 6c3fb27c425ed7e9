"""From plans to tensors: page tables, positions, tokens that only the device knows, splices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.core.metrics import Metrics
from saccade.core.plan import Open, Plan, Row, Splice
from saccade.core.types import Image, ImageKey, SamplingParams, Span
from saccade.nn.protocol import Batch, FamilyNet
from saccade.parallel import UNSHARDED
from saccade.runtime.batch import Batcher, PageTable
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.row_parts import Draws
from saccade.runtime.vision.positions import PositionCache
from tests.families.forwarding import CPU, load

KEY = ImageKey(bytes(32), bytes(16))


@pytest.fixture
def net(checkpoint: Callable[..., Path]) -> FamilyNet:
    return load(checkpoint("qwen3_vl"))


class Bench:
    """A batcher with four slots, without a worker around it."""

    def __init__(self, net: FamilyNet, page_size: int) -> None:
        self.net = net
        self.table = PageTable(4, 64, CPU)
        known = PositionCache(net.spec, net.vision, Metrics())
        self.batcher = Batcher(known, 4, 64, self.table, page_size)
        self.memory = EmbeddingMemory(torch.empty((0, 3)), UNSHARDED)

    def open(self, slot: int, tokens: list[int], pages: list[int], prompt: int, seed: int) -> None:
        grid = (1, 4, 6)
        images = (Image(KEY, grid, 6, 24, (64, 96)),) if 99 in tokens else ()
        spans = (Span(tokens.index(99), 6, 0),) if images else ()
        params = SamplingParams(temperature=1.0, seed=seed)
        self.batcher.open(Open(slot, tuple(tokens), prompt, spans, images, params, tuple(pages)))

    def build(self, *rows: Row, splices: tuple[Splice, ...] = ()) -> tuple[Batch, Draws]:
        return self.batcher.build(Plan(0, rows=rows, splices=splices), self.memory)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_table_lists_the_pages_of_a_slot_in_order(page_size: int) -> None:
    table = PageTable(3, 300, CPU)
    pages = [5, 6, 2, *range(100, 300)]
    table.open(1, pages[:2])
    for page in pages[2:]:
        table.append(1, (page,))
    table.open(2, [7])
    assert table.lists == [[], pages, [7]]
    assert table.on_device[1, : len(pages)].tolist() == pages
    table.open(1, [9])
    assert table.lists[1] == [9] and int(table.on_device[1, 0]) == 9


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_batch_says_where_each_token_comes_from_and_goes_to(
    net: FamilyNet, page_size: int
) -> None:
    bench = Bench(net, page_size)
    pages = [10, 3, 7, 20, 21, 5, 40, 2, 30, 31, 32, 33]
    first = [8, 9, *[99] * 6, 11]
    bench.open(2, first, pages[:1] if page_size == 4 else pages[:4], len(first), 7)
    more = tuple(pages[1:3] if page_size == 4 else pages[4:9])
    bench.open(0, [50, 51], [], 1, 3)
    own = tuple(range(60, 62)) if page_size == 1 else (60,)
    splices = (Splice(0, 4, KEY, 2),)
    bench.memory.put(KEY, torch.arange(18.0).view(6, 3).clone())
    batch, draws = bench.build(Row(2, 4, 5, more, True), Row(0, 0, 2, own, False), splices=splices)
    assert batch.tokens.tolist() == [99, 99, 99, 99, 11, 50, 51]
    positions, following = net.spec.positions(
        first, [Span(2, 6, 0)], [net.spec.image_positions((1, 4, 6))]
    )
    np.testing.assert_array_equal(batch.positions[:, :5].numpy(), positions[:, 4:9])
    assert batch.positions[:, 5:].tolist() == [[0, 1]] * 3
    slots = [page * page_size + at for page in pages for at in range(page_size)]
    theirs = [page * page_size + at for page in own for at in range(page_size)]
    assert batch.out_slots.tolist() == [*slots[4:9], *theirs[:2]]
    assert batch.q_starts.tolist() == [0, 5, 7] and batch.kv_lengths.tolist() == [9, 2]
    assert batch.slots.tolist() == [2, 0]
    held = -(-9 // page_size)
    assert batch.page_table[2, :held].tolist() == pages[:held]
    assert batch.singles == 0
    assert batch.splice_rows.tolist() == [0, 1, 2, 3]
    assert torch.equal(batch.embeddings, torch.arange(18.0).view(6, 3)[2:6])
    assert batch.sample_rows.tolist() == [4]
    assert draws.rows == [2] and draws.counts == [0] and draws.slots.tolist() == [2]

    bench.batcher.keep_tokens(draws, torch.tensor([77]))
    new = (pages[3],) if page_size == 4 else (pages[9],)
    batch, draws = bench.build(Row(2, 9, 1, new if page_size == 1 else (), True))
    assert batch.tokens.tolist() == [77], "only the device need know it"
    assert batch.positions.tolist() == [[following]] * 3
    assert batch.out_slots.tolist() == [slots[9]]
    assert draws.counts == [1]


def test_an_answer_that_goes_on_after_a_preemption_counts_what_it_had_drawn(
    net: FamilyNet,
) -> None:
    bench = Bench(net, 4)
    bench.open(1, [5, 6, 7, 8, 9], [], 2, 1)
    _, draws = bench.build(Row(1, 0, 5, (3, 4), True))
    assert draws.counts == [3]


def test_a_slot_in_use_is_not_opened_again(net: FamilyNet) -> None:
    bench = Bench(net, 4)
    bench.open(1, [5], [], 1, 0)
    with pytest.raises(AssertionError, match="in use"):
        bench.open(1, [5], [], 1, 0)
    bench.batcher.close(1)
    bench.open(1, [5], [], 1, 0)
