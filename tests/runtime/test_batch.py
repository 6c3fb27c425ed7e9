"""From a plan to tensors: page tables, positions, splices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.runtime.batch import PageTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_table_lists_the_slots_of_its_pages_in_order(page_size: int) -> None:
    table = PageTable(page_size, CPU)
    pages = [5, 6, 2, *range(100, 300)]
    for page in pages:
        table.append((page,))
    want = np.concatenate([np.arange(page * page_size, (page + 1) * page_size) for page in pages])
    assert table.length == len(want)
    np.testing.assert_array_equal(table.device_slots[: table.length].numpy(), want)
    np.testing.assert_array_equal(table.host[: table.length], want)


def test_a_run_is_known_while_pages_are_consecutive_and_no_longer() -> None:
    table = PageTable(4, CPU)
    table.append((7, 8))
    assert table.run == 28
    table.append((9,))
    assert table.run == 28
    table.append((11,))
    assert table.run == -1
    table.append((12,))
    assert table.run == -1, "consecutive again, but not from the start"
