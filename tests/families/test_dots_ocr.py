"""dots.ocr's own: what its files say, and what is not served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from saccade.core.errors import CheckpointError, ImageError
from saccade.families.dots_ocr.spec import DotsSpec
from saccade.families.kit.config_readers import HALF
from saccade.families.kit.native_images import ImageRules
from saccade.families.registry import load_spec
from tests.families.conftest import Changed, listed

FAMILY = "dots_ocr"
HUB = ImageRules(14, 2, 3136, 11289600, HALF, HALF, temporal_patch=1)
SIDES = st.integers(1, 9000)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="200"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    assert recipe.canvas == smart_resize(height, width, 28, 3136, 11289600) and recipe.plain


def test_a_short_file_is_that_of_the_hub(changed: Changed, checkpoint: Callable[..., Path]) -> None:
    """Fields that the published configuration has a default for."""
    known = load_spec(checkpoint(FAMILY))
    names = ("rms_norm_eps", "use_bias", "post_norm", "spatial_merge_size", "is_causal")
    short = changed(FAMILY, "config.json", vision_config=dict.fromkeys(names))
    assert load_spec(short) == known
    for name in ("min_pixels", "max_pixels"):
        changed(FAMILY, "preprocessor_config.json", **{name: None})
    read = load_spec(short)
    assert isinstance(read, DotsSpec)
    assert (read.images.min_pixels, read.images.max_pixels) == (56 * 56, 28 * 28 * 1280)


REFUSED = {
    "config.json": (
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' is not supported"),
        ({"vision_config": {"embed_dim": 42}}, "multiple of 4 values for each of 4 heads"),
        ({"vision_config": {"hidden_size": 48}}, "hidden_size 48 must be the language model's 64"),
        ({"vision_config": {"is_causal": True}}, "is_causal"),
        ({"vision_config": {"num_channels": 4}}, "num_channels must be 3"),
        ({"image_token_id": 600}, "beyond the vocabulary"),
    ),
    "preprocessor_config.json": (({"patch_size": 14}, "patch_size is 14"),),
}


@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
