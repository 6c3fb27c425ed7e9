"""LFM2-VL's own: sizes of images are those of transformers' processor, and hub files' own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.types import Size
from saccade.families.kit.base_spec import MAX_ASPECT
from saccade.families.kit.config_readers import HALF
from saccade.families.registry import load_spec
from saccade.plugins.models.lfm2_vl.images import ThumbnailRules, tile_grid, view_size
from saccade.plugins.models.lfm2_vl.spec import Lfm2Spec
from tests.fixtures.families.lfm2_vl import arithmetic

Changed = Callable[..., Path]
FAMILY = "lfm2_vl"
HUB = ThumbnailRules(64, 256, 2.0, 2, 10, 512, True, (HALF, HALF), "bilinear", 16, 2)
SIDES = st.integers(1, 9000)


def theirs(size: Size, most: int = 10) -> tuple[Size, tuple[int, int] | None]:
    """The whole image's size, and rows and columns of tiles."""
    made, (height, width) = arithmetic(), size
    some = {"downsample_factor": 2, "encoder_patch_size": 16, "max_image_tokens": 256}
    wide, tall = made.smart_resize(None, height, width, min_image_tokens=64, **some)
    if not made._is_image_too_large(None, height, width, max_pixels_tolerance=2.0, **some):
        return (tall, wide), None
    own = SimpleNamespace(_target_ratios=lambda *few: made._target_ratios(None, *few))
    columns, rows, *_ = made._get_grid_layout(own, height, width, 2, most, 512)
    return (tall, wide), (rows, columns)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    whole, cut = theirs((height, width))
    assert view_size((height, width), 32, 64, 256) == whole
    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(ImageError, match="more than 200 times"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    assert recipe.grid == (whole[0] // 32, whole[1] // 32, *(cut or ()))
    tiles, largest = 256 * (cut[0] * cut[1] if cut else 0), HUB.largest_image
    assert HUB.num_tokens(recipe.grid) == tiles + whole[0] * whole[1] // 1024 <= largest.tokens
    assert recipe.canvas[0] * recipe.canvas[1] <= largest.pixels


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(2, 30))
def test_grids_of_any_number_of_tiles_are_the_references(
    height: int, width: int, most: int
) -> None:
    _, cut = theirs((height, width), most)
    assert cut is None or tile_grid((height, width), 512, 2, most) == cut


def read(folder: Path) -> Lfm2Spec:
    found = load_spec(folder)
    assert isinstance(found, Lfm2Spec)
    return found


def test_a_request_may_ask_for_fewer_pixels(checkpoint: Callable[..., Path]) -> None:
    spec = read(checkpoint(FAMILY))
    bounds, tile = spec.pixel_bounds, spec.images.tile**2
    grids = []
    for most in (bounds.max_pixels, 4 * tile, 2 * tile, 2 * tile - 1, 2 * 64):
        within = type(bounds)(bounds.least, bounds.min_pixels, most)
        grids.append(spec.recipe(90, 130, within).grid)
    assert grids == [(2, 2, 2, 3), (2, 2, 2, 2), (2, 2, 1, 2), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("text", "width", "full"),
    [
        ({"block_ff_dim": 192}, 128, (1,)),
        ({"block_auto_adjust_ff_dim": False}, 96, (1,)),
        ({"block_ffn_dim_multiplier": 2.0}, 128, (1,)),
        ({"layer_types": None, "full_attn_idxs": [0, 3]}, 64, (0, 3)),
    ],
)
def test_hub_files_have_words_of_their_own(
    changed: Changed, text: dict[str, Any], width: int, full: tuple[int, ...]
) -> None:
    spec = read(changed(FAMILY, "config.json", text_config=text))
    assert spec.text.intermediate == width
    assert tuple(at for at, is_full in enumerate(spec.convolutions.full) if is_full) == full


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"text_config": {"conv_L_cache": 1}}, "conv_L_cache must be at least 2"),
        ("config.json", {"text_config": {"conv_bias": True}}, "conv_bias"),
        ("config.json", {"text_config": {"layer_types": ["conv"] * 4}}, "no layer has full"),
        ("config.json", {"vision_config": {"num_patches": 24}}, "num_patches 24 is not a square"),
        ("preprocessor_config.json", {"tile_size": 20}, "tile_size 20 must be a multiple of 8"),
        ("preprocessor_config.json", {"max_tiles": 101}, "max_tiles 101 must be ascending"),
        ("preprocessor_config.json", {"min_image_tokens": 7}, "must be ascending"),
        ("preprocessor_config.json", {"downsample_factor": 3}, "downsample_factor is 3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
