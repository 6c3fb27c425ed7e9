"""Recorded work repeats kernels and PyTorch's operations over the same memory, and says so where it
cannot.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.helpers.processor import HAS_BACKEND

if not HAS_BACKEND:
    pytest.skip("no Numba", allow_module_level=True)

from saccade.plugins.cpu.capture import CapturedWork, CaptureError, Operation
from saccade.plugins.cpu.layer import compiled_rms_norm, compiled_silu_gate

WEIGHT = torch.linspace(0.5, 1.5, 64).bfloat16()


def rows(seed: int, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def by_kernels(x: torch.Tensor) -> torch.Tensor:
    total, normed = compiled_rms_norm(x, x, WEIGHT, 1e-6)
    return compiled_silu_gate(compiled_rms_norm(total, normed, WEIGHT, 1e-6)[1])


def by_both(x: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([x.float().t().t(), x.float().cos()], 1)[:, 32:96]
    return by_kernels(wide.to(x.dtype).contiguous()) + x[:, :32]


def in_place(x: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros_like(x)
    sums.index_add_(0, torch.tensor([0, 0, 1]), x)
    sums[1:] *= 2
    return sums.view(-1, 32)


def of_views(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, 1)
    return torch.where(left > right, left, right.reshape(3, 32).flip(0))


@pytest.mark.parametrize("function", [by_kernels, by_both, in_place, of_views])
def test_what_is_repeated_has_the_bits_of_what_is_done(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = rows(0)
    with torch.inference_mode():
        recording = CapturedWork(lambda: (function(x),))
        (found,) = recording.results
        assert torch.equal(found, function(x))
        for seed in range(1, 4):
            x.copy_(rows(seed))
            recording.replay()
            assert torch.equal(found, function(x))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.tolist(),
        lambda x: x.float().numpy(),
        lambda x: x[0, 0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.argmax()),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
    ],
)
def test_work_that_looks_at_values_is_not_recorded(
    look: Callable[[torch.Tensor], object],
) -> None:
    def work() -> tuple[torch.Tensor, ...]:
        look(x)
        return (by_kernels(x),)

    x = rows(0)
    with torch.inference_mode(), pytest.raises(CaptureError):
        CapturedWork(work)
    with torch.inference_mode():  # nothing listens on
        assert len(CapturedWork(lambda: (by_kernels(x),)).results) == 1


def test_an_error_in_the_work_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        CapturedWork(lambda: (torch.empty(1 // 0),))


def test_layers_share_their_memory() -> None:
    def layers(count: int) -> torch.Tensor:
        found = x
        for _ in range(count):
            found = compiled_rms_norm(found, found, WEIGHT, 1e-6)[1]
        return found

    x = rows(0)
    with torch.inference_mode():
        few, many = CapturedWork(lambda: (layers(3),)), CapturedWork(lambda: (layers(30),))
        assert few.lent.nbytes == many.lent.nbytes
        x.copy_(rows(1))
        many.replay()
        assert torch.equal(many.results[0], layers(30))


TABLE = torch.linspace(-1.0, 1.0, 7 * 64).view(7, 64).bfloat16()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """As a decoder: tokens to rows, places on several axes to angles, and a last addition."""
    places = (x[:, :2].float() * 50).long().abs().t().contiguous()  # [A, T]
    rows = torch.nn.functional.embedding(places[0] % 7, TABLE)
    axis = torch.tensor([0, 1, 0, 1, 1])
    angles = places.t().index_select(1, axis) * torch.linspace(0.0, 1.0, 5)
    sines = torch.cat((-angles, angles.sin(), angles), dim=-1)
    return torch.cat(((rows + x).float(), sines), 1).to(x.dtype)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_small_operations_run_as_machine_code_with_their_bits(count: int) -> None:
    x = rows(0, count)
    with torch.inference_mode():
        recording = CapturedWork(lambda: (rotated(x),))
        operations = {
            str(part.function).split(".")[1]
            for part in recording.parts
            if isinstance(part, Operation)
        }
        assert operations.isdisjoint({"embedding", "index_select", "neg", "cat", "add"})
        for seed in range(4):
            x.copy_(rows(seed, count))
            recording.replay()
            assert torch.equal(recording.results[0], rotated(x))


RECORDED = """
import sys
import torch
from saccade.plugins.cpu.capture import CapturedWork

twos = torch.full((4, 8), 2.0)
recording = CapturedWork(lambda: (torch.cos(twos) + twos,))
recording.replay()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


@pytest.mark.more
def test_recording_imports_no_compiler_of_pytorch_s() -> None:
    """It would in the middle of the first answer, for a second."""
    command = [sys.executable, "-c", RECORDED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["[]"]
