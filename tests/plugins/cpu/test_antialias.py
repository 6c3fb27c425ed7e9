"""Resizing as PyTorch does it, without PyTorch: the same bytes at any size, from any place."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from saccade.media.formats.pixel_operations import RESAMPLERS, Pixels
from saccade.plugins.cpu import antialias
from saccade.plugins.cpu.resize import vector_bytes

MODES = ("bilinear", "bicubic", "lanczos")
SIZES = (1, 2, 3, 4, 5, 7, 10, 11, 16, 21, 22, 33, 64, 97, 150)
"""Of few pixels, and to both sides of the widths that vectors of 32 and 64 bytes have."""

needs_code = pytest.mark.skipif(
    not vector_bytes(), reason="resizing is compiled for x86-64 with AVX2, where llvmlite is"
)


def random(height: int, width: int, seed: int = 0) -> Pixels:
    generator = np.random.default_rng((height, width, seed))
    noise = generator.integers(0, 256, (height, width, 3), np.uint8)
    return np.where(generator.random((height, width, 1)) < 0.3, noise // 128 * 255, noise)


def expected(pixels: Pixels, size: tuple[int, ...], mode: str) -> Pixels:
    image = torch.from_numpy(np.array(pixels, order="C")).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(image, size[:2], mode=mode, antialias=True)
    return np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())


def resized(pixels: Pixels, size: tuple[int, ...], mode: str) -> Pixels:
    target = np.full((*size, 3), 9, np.uint8)
    RESAMPLERS[mode].resize(target, pixels)
    return target


@needs_code
@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_pytorch_s_at_any_two_sizes(mode: str) -> None:
    for before in SIZES:
        for after in SIZES:
            source = random(before, after + 3)
            made = resized(source, (after, before), mode)
            np.testing.assert_array_equal(made, expected(source, (after, before), mode))


@needs_code
@pytest.mark.parametrize("mode", MODES)
def test_and_at_the_sizes_of_photos_and_screens(mode: str) -> None:
    chosen = np.random.default_rng(7)
    for seed in range(12):
        height, width, *size = (int(side) for side in chosen.integers(200, 1300, 4))
        source, wanted = random(height, width, seed), (size[0], size[1])
        np.testing.assert_array_equal(resized(source, wanted, mode), expected(source, wanted, mode))


@needs_code
def test_pixels_are_read_and_written_where_they_lie() -> None:
    """Turned, cut out, read-only or a part of a canvas: and nothing beside the part changes."""
    whole = random(90, 120)
    whole.setflags(write=False)
    sources = whole[::-1], whole[:, ::-1], whole.transpose(1, 0, 2), whole[10:70:2, 5:80], whole
    for source in sources:
        canvas = np.full((80, 100, 3), 9, np.uint8)
        for part in (canvas[3:53, 20:70], canvas.transpose(1, 0, 2)[3:53, 20:60], canvas[::2, ::2]):
            canvas[:] = 9
            RESAMPLERS["bicubic"].resize(part, source)
            made = expected(source, part.shape, "bicubic")
            np.testing.assert_array_equal(part, made)
            assert (canvas == 9).sum() == canvas.size - part.size + (made == 9).sum()


@needs_code
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_pytorch_s_too(mode: str) -> None:
    """Of float64 pixels PyTorch shows its weights themselves, before they are rounded."""
    for size, wanted in ((37, 12), (12, 37), (640, 224), (224, 640), (500, 3), (999, 1000)):
        found = antialias.find_weights(size, wanted, mode, 2)
        lines = torch.eye(size, dtype=torch.float64).view(1, size, 1, size)
        shown = torch.nn.functional.interpolate(lines, (1, wanted), mode=mode, antialias=True)
        scaled = shown[0, :, 0].T.numpy() * (1 << found.shift)  # [wanted, size]
        rounded = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int16)
        for row, first, values in zip(rounded, found.first, found.values):
            spread = np.zeros(size + len(values), np.int16)
            spread[first : first + len(values)] = values
            np.testing.assert_array_equal(spread[:size], row)


def test_without_the_code_pytorch_itself_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(antialias, "vector_bytes", lambda: 0)
    monkeypatch.setattr(antialias, "find_weights", None)
    source = random(50, 60)
    for mode in MODES:
        made = resized(source, (31, 87), mode)
        np.testing.assert_array_equal(made, expected(source, (31, 87), mode))


LOADED = """
import sys
from saccade.media.workers import supervisor
supervisor.warm_up(True, None)
print([name for name in ("torch", "numba") if name in sys.modules])
"""


@needs_code
@pytest.mark.more
def test_image_workers_import_no_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["[]"]
