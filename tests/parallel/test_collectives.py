"""Collectives: sums, gathers and broadcasts are right, and have the same bits on every rank,
whatever the size of the tensor.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from saccade.core.errors import ConfigError
from saccade.parallel import Shard
from saccade.plugins.parallel.collectives import SLOT
from tests.fixtures.rank_group import shards, together

BACKENDS = ("shm", "gloo")
SHAPES = [(0, 8), (1, 1), (3, 64), (SLOT // 4, 1), (3, SLOT // 4 + 5)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_are_right_and_alike_on_every_rank(
    backend: Literal["shm", "gloo"], size: int
) -> None:
    rank_group = shards(size, backend)
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(sum(shape))
        given = [torch.randn(shape, generator=generator) for _ in range(size)]
        sums = together(lambda shard, x: shard.all_reduce(x.clone()), rank_group, given)
        gathers = together(lambda shard, x: shard.all_gather(x), rank_group, given)
        firsts = together(lambda shard, x: shard.broadcast(x.clone()), rank_group, given)
        assert all(torch.equal(first, given[0]) for first in firsts)
        torch.testing.assert_close(sums[0], torch.stack(given).sum(0))
        for total, gathered in zip(sums, gathers):
            assert torch.equal(total, sums[0])
            assert torch.equal(gathered, torch.stack(given))


def test_the_first_ranks_words_among_sums_reach_all() -> None:
    rank_group = shards(3)

    def work(shard: Shard) -> list[float]:
        heard = []
        for i in range(200):
            word = torch.full((5,), float(i if shard.rank == 0 else -1))
            heard.append(float(shard.broadcast(word)[0]))
            if i % 3 == 0:
                heard.append(float(shard.all_reduce(torch.ones(2))[0]))
        return heard

    first, *others = together(work, rank_group)
    assert all(other == first for other in others)
    assert [word for word in first if word != 3.0] == [float(i) for i in range(200) if i != 3]


def test_many_messages_in_a_row_do_not_overwrite_each_other() -> None:
    """Ranks run at their own pace; each message must be read by all before its slot is written
    again.
    """
    rank_group = shards(4)

    def work(shard: Shard) -> list[float]:
        return [
            float(shard.all_reduce(torch.full((7,), float(i * (shard.rank + 1)))).sum())
            for i in range(300)
        ]

    assert together(work, rank_group) == [[7.0 * 10 * i for i in range(300)]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    totals = together(lambda shard: shard.all_reduce(torch.arange(8).to(dtype)), shards(2))
    assert all(
        total.dtype == dtype and total.tolist() == [2.0 * i for i in range(8)] for total in totals
    )


def test_one_rank_is_alone() -> None:
    x = torch.ones(3)
    assert Shard().all_reduce(x) is x
    assert Shard().all_gather(x).shape == (1, 3)
    assert Shard().broadcast(x) is x


def test_fewer_heads_than_ranks_are_shared_by_neighbours() -> None:
    assert [Shard(rank, 4).over(2) for rank in range(4)] == [
        Shard(0, 2),
        Shard(0, 2),
        Shard(1, 2),
        Shard(1, 2),
    ]
    assert [Shard(rank, 4).over(1) for rank in range(4)] == [Shard()] * 4
    assert Shard(3, 4).over(8) == Shard(3, 4)


def test_a_rest_is_an_error_that_names_what_is_left() -> None:
    with pytest.raises(ConfigError, match="--tp-size 3: 4 attention heads"):
        Shard(0, 3).divide(4, "attention heads")
