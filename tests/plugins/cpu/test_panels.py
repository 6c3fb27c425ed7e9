"""Products with 4-bit matrices on a CPU: what the reference says to the bit, and near what the
matrix says; a row's bits are its own. The code that LLVM makes is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Int4Matrix
from saccade.kernels.reference.int4 import dense, pack_int4, quantise_int4
from saccade.kernels.reference.int8 import quantise_matrix
from saccade.plugins.cpu import disk_cache
from saccade.plugins.cpu import kernel as native
from saccade.plugins.cpu.panels import HUGE_PAGE_BYTES, LargePages
from saccade.plugins.cpu.vnni_layout import (
    PANEL,
    bytes_linear,
    pack_int8,
    pack_panels,
    panels_linear,
    panels_reference,
)
from tests.helpers.processor import needs_vnni
from tests.helpers.tensors import noise

pytestmark = needs_vnni

SHAPES = [(64, 96, 96), (100, 256, 64), (33, 128, 128), (7, 272, 400), (31, 160, 32), (1, 40, 64)]
"""(outputs, inputs, group): whole panels and not, one group and several, the last one cut."""


def matrix_of(shape: tuple[int, int, int], *, zeros: bool, ordered: bool = True) -> Int4Matrix:
    outputs, inputs, group = shape
    source = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randint(16, (outputs, inputs), generator=source, dtype=torch.uint8)
    scales = noise(outputs, -(-inputs // group), seed=1).exp() / 100
    points = torch.randint(17, scales.shape, generator=source, dtype=torch.uint8)
    if outputs % 2:
        points = points * 3.7 - 20  # as of matrices that are made or stored with a least value
    order = None if ordered else torch.randperm(inputs, generator=source)
    return pack_int4(numbers, scales, points if zeros else None, group, order)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "middle"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_references_to_the_bit(
    shape: tuple[int, int, int], dtype: torch.dtype, zeros: bool
) -> None:
    matrix = matrix_of(shape, zeros=zeros, ordered=shape[0] != 31)
    panels = pack_panels(matrix)
    x = noise(26, shape[1], seed=2).to(dtype)
    bias = noise(shape[0], seed=3).to(dtype) if shape[0] % 2 else None
    expected = panels_reference(x, matrix, bias)
    for rows in (*range(14), 26):
        found = panels_linear(x[:rows], panels, bias)
        assert found.dtype == dtype and torch.equal(found, expected[:rows]), rows


def test_a_product_is_near_the_matrixs() -> None:
    matrix = matrix_of((96, 1024, 128), zeros=True)
    x = noise(5, 1024, seed=4)
    x[:, 3] *= 50  # one large input spoils its own group only
    expected = F.linear(x, dense(matrix))
    assert (panels_linear(x, pack_panels(matrix)) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_thread(bits: int) -> None:
    weight = noise(1500, 512, seed=5)
    x = noise(300, 512, seed=6).bfloat16()
    four, eight = pack_panels(quantise_int4(weight, 64)), pack_int8(quantise_matrix(weight))

    def product(rows: torch.Tensor) -> torch.Tensor:
        return panels_linear(rows, four) if bits == 4 else bytes_linear(rows, eight)

    together = product(x)
    for count in (1, 2, 3, 8, 13, 64):
        assert torch.equal(product(x[:count]), together[:count]), count
    assert native.parallel() is not None, "PyTorch's own threads do the work"
    torch.set_num_threads(1)
    assert torch.equal(product(x), together)


def test_what_is_no_number_stays_none_and_zeros_stay_zero() -> None:
    matrix = matrix_of((40, 128, 64), zeros=True)
    x = noise(3, 128, seed=7)
    x[0], x[1, 5] = 0, torch.nan
    y = panels_linear(x, pack_panels(matrix))
    assert not y[0].any() and y[1].isnan().all() and y[2].isfinite().all()
    assert panels_linear(x.bfloat16(), pack_panels(matrix))[1].isnan().all()


def test_quantised_values_are_within_half_a_step() -> None:
    weight = noise(40, 200, seed=8) + 0.3
    weight[3, 64:128] = 0
    weight[4, :64] = 0.25
    matrix = quantise_int4(weight, 64)
    step = matrix.scales.t().repeat_interleave(64, 1)[:, :200]
    assert ((dense(matrix) - weight).abs() <= step.abs() * 0.5001).all()
    assert not dense(matrix)[3, 64:128].any() and (dense(matrix)[4, :64] == 0.25).all()


def test_numbers_between_a_least_and_a_largest_stay_what_they_are() -> None:
    """A matrix that was in 4 bits before, as Q4_1 is, loses nothing when it is made so again."""
    whole = torch.randint(16, (40, 128), generator=torch.Generator().manual_seed(1)).float()
    whole[:, ::32], whole[:, 1::32] = 0, 15
    groups = whole.view(40, 4, 32)
    weight = (groups * noise(40, 4, 1, seed=2).exp() + 3 * noise(40, 4, 1, seed=3)).view(40, 128)
    matrix = quantise_int4(weight, 32)
    torch.testing.assert_close(dense(matrix), weight)
    x = noise(3, 128, seed=4)
    near, expected = panels_linear(x, pack_panels(matrix)), F.linear(x, weight)
    assert (near - expected).norm() < 0.01 * expected.norm()


def test_panels_take_the_bytes_of_their_bits() -> None:
    panels = pack_panels(matrix_of((2 * PANEL, 1024, 64), zeros=True))
    assert panels.words.nbytes * 2 == 2 * PANEL * 1024
    assert panels.nbytes == panels.words.nbytes + 2 * PANEL * 16 * 4


def test_code_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"code")
        return made[-1]

    assert [disk_cache.get_or_create(what, make) for what in ("a", "a", "b")] == [b"code"] * 3
    assert len(made) == 2
    names = {path.name for path in (tmp_path / "saccade" / "code").iterdir()}
    assert names == {disk_cache.LOCK_FILE, *map(disk_cache.file_name, "ab")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "saccade" / "code" / "none"))
    (tmp_path / "saccade" / "code" / "none").touch()
    assert disk_cache.get_or_create("c", make) == b"code", "where nothing can be kept"


def test_small_matrices_share_large_pages_and_large_ones_begin_their_own() -> None:
    pages = LargePages()
    first, second, large = (pages.take(size) for size in (1000, 4096, 9 * HUGE_PAGE_BYTES))
    assert first.data_ptr() % HUGE_PAGE_BYTES == large.data_ptr() % HUGE_PAGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 1024  # behind whole lines
    for value, each in enumerate((first, second, large)):
        each.fill_(value)
    assert [int(each.max()) for each in (first, second, large)] == [0, 1, 2]
