"""Kimi-VL's own: sizes of images are the published processor's, and what is not served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core.errors import ImageError
from saccade.core.family import PixelBounds
from saccade.families.kit.config_readers import HALF
from saccade.families.registry import load_spec
from saccade.plugins.models.kimi_vl.images import PaddedRules
from saccade.plugins.models.kimi_vl.spec import KimiSpec
from tests.families.conftest import Refusals, refusals_by_name
from tests.fixtures.families.kimi_vl import published_pixels, published_size

FAMILY = "kimi_vl"
HUB = PaddedRules(14, 2, 4096, (HALF, HALF))
SIDES = st.integers(1, 9000)


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([4096, 1024, 100, 16384]))
def test_sizes_stay_below_what_is_said_of_the_largest(height: int, width: int, most: int) -> None:
    rules = PaddedRules(14, 2, most, (HALF, HALF))
    try:
        recipe = rules.recipe(height, width, rules.pixel_bounds)
    except ImageError as error:
        assert "more than 511 patches of 14 pixels" in str(error)
        return
    tall, wide = recipe.canvas
    assert rules.num_tokens(recipe.grid) == tall * wide // 784 <= rules.largest_image.tokens
    assert tall * wide <= rules.largest_image.pixels
    (view,) = recipe.views
    assert view.size == published_size(width, height, most, 14)[::-1]
    assert 0 <= tall - view.size[0] < 28 and 0 <= wide - view.size[1] < 28
    assert (recipe.fill is None) == (view.size == recipe.canvas)


@pytest.mark.parametrize(
    ("size", "canvas"),
    [
        ((1, 1), (28, 28)),
        ((28, 29), (28, 56)),
        ((896, 896), (896, 896)),
        ((897, 911), (896, 924)),
        ((910, 910), (896, 896)),
        ((2000, 3000), (756, 1120)),
        ((7139, 20), (7140, 28)),
    ],
)
def test_sizes_are_the_references(size: tuple[int, int], canvas: tuple[int, int]) -> None:
    assert HUB.recipe(*size, HUB.pixel_bounds).canvas == canvas
    image = PIL.Image.new("RGB", size[::-1])
    assert published_pixels(image, 4096, 14).shape[:2] == canvas


def test_an_image_too_long_is_refused_as_by_the_published_processor() -> None:
    with pytest.raises(ImageError, match="more than 511 patches of 14 pixels; crop it"):
        HUB.recipe(7200, 20, HUB.pixel_bounds)
    with pytest.raises(ValueError, match="Exceed pos emb"):
        published_pixels(PIL.Image.new("RGB", (20, 7200)), 4096, 14)


def test_a_request_may_ask_for_fewer_pixels(checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(checkpoint(FAMILY))
    assert isinstance(spec, KimiSpec)
    bounds = spec.pixel_bounds
    grids = []
    for most in (bounds.max_pixels, 32 * 64, 4 * 64, 1):
        within = PixelBounds(bounds.least, bounds.min_pixels, most)
        grids.append(spec.recipe(90, 130, within).grid)
    assert grids == [(10, 12), (6, 8), (2, 4), (2, 2)]


REFUSED: Refusals = {
    "config.json": (
        ({"vision_config": {"hidden_size": 40}}, "multiple of 4 values for each of 4 heads"),
        ({"vision_config": {"merge_kernel_size": [2, 1]}}, "must be two equal numbers"),
        ({"vision_config": {"model_type": "moonvit3d"}}, "'moonvit3d' is not supported"),
        ({"media_placeholder_token_id": 600}, "not in the vocabulary"),
    ),
    "preprocessor_config.json": (
        ({"pad_input": False}, "pad_input must be true"),
        ({"in_token_limit": 10**6}, "in_token_limit must be at most 261121"),
        ({"patch_size": 14}, "patch_size is 14"),
        ({"merge_kernel_size": [4, 4]}, "merge_kernel_size is 4"),
    ),
}


test_what_is_not_served_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
