"""What many adapters add to one batch, beside the sum written out for each row; without a GPU in
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch

from saccade.kernels.reference.low_rank import (
    AdapterRows,
    Additions,
    Pair,
    Present,
    add_low_rank,
)

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.low_rank import launch_low_rank
from tests.helpers.tensors import noise
from tests.kernels.conftest import bounds

TOLERANCE = bounds(1e-5, 4e-3)
RANKS = (1, 3, 16, 33)


def additions_of(
    parts: Sequence[int],
    inputs: int,
    ranks: Sequence[int],
    dtype: torch.dtype,
    device: str,
    untouched: int = -1,
) -> Additions:
    """An adapter of each rank; the last leaves the part `untouched` alone."""
    outputs = [slice(*pair) for pair in pairwise(accumulate(parts, initial=0))]
    made = Additions(outputs)
    for place, rank in enumerate(ranks):
        touched = [
            part
            for part in range(len(parts))
            if (place, part) != (len(ranks) - 1, untouched % len(parts)) or len(parts) == 1
        ]
        down = noise(rank * len(touched), inputs, seed=place) / inputs**0.5
        ups = tuple(
            (
                outputs[part],
                slice(at * rank, (at + 1) * rank),
                (noise(parts[part], rank, seed=50 + place + part) / rank**0.5).to(device, dtype),
            )
            for at, part in enumerate(touched)
        )
        made.put(place, Pair(down.to(device, dtype), ups))
    return made


def rows_of(places: Sequence[int], total: int, device: str) -> tuple[AdapterRows, ...]:
    """Scattered rows: one of each adapter in turn, every ninth without."""
    owners = [at % (len(places) + 1) for at in range(total)]
    return tuple(
        (place, torch.tensor([at for at, owner in enumerate(owners) if owner == mine]).to(device))
        for mine, place in enumerate(places)
    )


def wanted_of(
    x: torch.Tensor, y: torch.Tensor, additions: Additions, each: Sequence[AdapterRows]
) -> torch.Tensor:
    """In float64, row by row."""
    total = y.double().cpu()
    for place, rows in each:
        pair = additions.pairs.get(place)
        numbers = rows.tolist() if isinstance(rows, torch.Tensor) else range(len(x))[rows]
        for row in numbers if pair is not None else ():
            assert pair is not None
            inner = pair.down.double().cpu() @ x[row].double().cpu()
            for outputs, ranks, up in pair.ups:
                total[row, outputs] += up.double().cpu() @ inner[ranks]
    return total


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("parts", "inputs"), [((64, 32, 32), 96), ((130,), 1100), ((20, 7), 64), ((16, 16), 64)]
)
def test_each_row_gets_what_its_adapter_adds(
    device: str, parts: Sequence[int], inputs: int, dtype: torch.dtype
) -> None:
    additions = additions_of(parts, inputs, RANKS, dtype, device, untouched=0)
    total = 24
    x = noise(total, 2 * inputs).to(device, dtype)[:, :inputs]
    y = noise(total, sum(parts), seed=9).to(device, dtype)
    each = rows_of(range(len(RANKS) + 1), total, device)  # of the last there is no addition
    wanted = wanted_of(x, y, additions, each)
    plain = y.clone()
    add_low_rank(x, plain, additions, Present(each))
    launch_low_rank(x, y, additions, Present(each))
    for found in (plain, y):
        torch.testing.assert_close(
            found.double().cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    again = wanted_of(x, torch.zeros_like(y), additions, each)
    assert again.abs().max() > 0.1, "pairs are what they were, now that they are views"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_rows_bits_do_not_depend_on_what_is_beside_it(device: str, dtype: torch.dtype) -> None:
    """Alone with its adapter; among others' rows, in another order; with more adapters loaded."""
    parts, inputs, total = (48, 16), 1200, 10
    x = noise(total, inputs).to(device, dtype)
    y = noise(total, sum(parts), seed=3).to(device, dtype)
    whole = additions_of(parts, inputs, RANKS, dtype, device)
    mixed = y.clone()
    launch_low_rank(x, mixed, whole, Present(rows_of(range(len(RANKS)), total, device)))
    for place in (0, 3):
        few = Additions(whole.parts)
        few.put(place, whole.pairs[place])
        mine = range(place, total, len(RANKS) + 1)
        for row in mine:
            alone = y[row : row + 1].clone()
            launch_low_rank(x[row : row + 1], alone, few, Present(((place, slice(0, 1)),)))
            assert alone[0].equal(mixed[row])
            assert not alone[0].equal(y[row])
        run = y.clone()
        launch_low_rank(x, run, whole, Present(((place, slice(None)),)))
        assert run[mine[0]].equal(mixed[mine[0]])


def test_a_dropped_adapter_adds_nothing_and_the_others_what_they_did(device: str) -> None:
    parts, inputs = (32, 32), 64
    additions = additions_of(parts, inputs, (4, 8, 16), torch.float32, device)
    x = noise(6, inputs).to(device)
    present = Present(((0, slice(0, 2)), (1, slice(2, 4)), (2, slice(4, 6))))
    before, after = (torch.zeros(6, 64, device=device) for _ in range(2))
    launch_low_rank(x, before, additions, present)
    held = additions.packed()
    additions.drop(1)
    left = additions.pairs[0].down.untyped_storage().nbytes()
    assert left < held.downs.untyped_storage().nbytes(), "its memory goes"
    launch_low_rank(x, after, additions, present)
    assert after[2:4].eq(0).all() and before[2:4].ne(0).any()
    assert after[:2].equal(before[:2]) and after[4:].equal(before[4:])
    additions.drop(0)
    additions.drop(2)
    launch_low_rank(x, after, additions, present)
    assert after[:2].equal(before[:2]), "nothing is added where no adapter is left"
