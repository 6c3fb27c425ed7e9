"""Bounds on images as an option, for the families that have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.core.errors import CheckpointError, ConfigError
from saccade.families.kit.grid_spec import RaisedSpec
from saccade.families.registry import load_spec


@pytest.mark.parametrize(("family", "longest"), [("glm_ocr", 8192), ("paddleocr_vl", 4096)])
def test_bounds_on_images_are_an_option(
    checkpoint: Callable[..., Path], family: str, longest: int
) -> None:
    """GLM-OCR's bounds are those of two frames."""
    folder = checkpoint(family)
    spec = load_spec(folder, [f'size={{"longest_edge": {longest}}}'])
    assert isinstance(spec, RaisedSpec)
    assert (spec.images.min_pixels, spec.images.max_pixels) == (1024, 4096)
    assert spec.recipe(500, 500, spec.pixel_bounds).canvas == (64, 64)
    for option, words in (
        ("size=64", "write a JSON object"),
        ('size={"height": 64}', "shortest_edge and longest_edge"),
        ("tiles=4", "has size, which is a JSON object"),
    ):
        with pytest.raises(ConfigError, match=f"--family-option .*{words}"):
            load_spec(folder, [option])
    for size, words in (
        ('{"longest_edge": 0}', "longest_edge must be at least 1"),
        ('{"longest_edge": 64}', "cannot be made: a token has 256"),
        ('{"shortest_edge": 1000000}', "cannot be made"),
        ('{"longest_edge": 4294967296}', "longest_edge must be at most"),
        ('{"longest_edge": 4096.5}', "longest_edge must be an integer"),
    ):
        with pytest.raises(CheckpointError, match=f"--family-option.*{words}"):
            load_spec(folder, [f"size={size}"])
