"""HunyuanOCR's own: positions on four axes, an image's size, and what is not served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import smart_resize

from saccade.core.errors import CheckpointError, ImageError
from saccade.families.config_readers import HALF
from saccade.families.qwen_vl.hunyuan_vl.images import LineRules
from saccade.families.qwen_vl.hunyuan_vl.spec import HunyuanSpec
from saccade.families.qwen_vl.hunyuan_vl.vision import lines
from saccade.families.registry import load_spec
from saccade_bench.fixtures.tiny import Reference, tinies
from tests.families.conftest import Changed, listed
from tests.families.forwarding import Session, images_of, load, pixels, prompt

FAMILY = "hunyuan_vl"
HUB = LineRules(16, 2, 512 * 512, 2048 * 2048, HALF, HALF, temporal_patch=1)
SIDES = st.integers(1, 9000)


def read(folder: Path) -> HunyuanSpec:
    found = load_spec(folder)
    assert isinstance(found, HunyuanSpec)
    return found


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="200"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    tall, wide = smart_resize(height, width, 32, 512 * 512, 2048 * 2048)
    assert recipe.canvas == (tall, wide) and recipe.plain
    assert recipe.grid == (1, tall // 16, wide // 16)
    tokens = tall // 32 * (wide // 32 + 1) + 2
    assert HUB.num_tokens(recipe.grid) == tokens <= HUB.largest_image.tokens


@pytest.mark.parametrize("variant", ["as it is", "an axis less"])
def test_positions_are_the_references(reference: Callable[..., Reference], variant: str) -> None:
    theirs = reference(FAMILY, **tinies()[FAMILY].variants[variant])
    spec, pictures = read(theirs.folder), pixels(theirs, 3)
    images = images_of(spec, pictures)
    tokens, spans = spec.expand_prompt(prompt(theirs, 3), images)
    blocks = [spec.image_positions(image.grid) for image in images]
    found, following = spec.positions(tokens, spans, blocks)
    ids = torch.tensor([tokens])
    kinds = (ids == theirs.mark).int()
    wanted, delta = theirs.model.model.get_rope_index(
        ids, kinds, torch.tensor([image.grid for image in images])
    )
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert following == len(tokens) + int(delta)
    assert {*found[-1, found[0] != found[-1]]} == {0, 1, 2}, "each image has its number"


def test_an_image_is_known_by_its_number(reference: Callable[..., Reference]) -> None:
    """The second of two equal images is not the first."""
    theirs = reference(FAMILY)
    net, (shown,) = load(theirs.folder), pixels(theirs, 1)
    session = Session(net, prompt(theirs, 2), [shown, shown], 16)
    wanted = theirs.logits(session.tokens, [shown, shown])
    torch.testing.assert_close(session.prefill(7), wanted, atol=2e-4, rtol=0.0)


def test_texts_are_turned_as_by_transformers_itself(reference: Callable[..., Reference]) -> None:
    """Where all axes are alike, it does not matter to which a frequency belongs."""
    theirs = reference(FAMILY)
    rope = theirs.model.model.language_model.rotary_emb
    published = rope.recomposition_frequencies
    session = Session(load(theirs.folder), prompt(theirs, 0), [], 16)
    found = session.prefill()
    rope.recomposition_frequencies = type(rope).recomposition_frequencies.__get__(rope)
    try:
        wanted = theirs.logits(session.tokens)
    finally:
        rope.recomposition_frequencies = published
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0.0)


def test_lines_end_in_marks() -> None:
    assert lines(2, 3).tolist() == [7, 0, 1, 2, 6, 3, 4, 5, 6, 8]


def test_names_of_the_hub_say_the_same(checkpoint: Callable[..., Path]) -> None:
    new, old = (read(checkpoint(FAMILY, tie=True, layout=each)) for each in ("new", "old"))
    assert new == old and new.position_axes == 4


REFUSED = {
    "config.json": (
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "alpha is missing"),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
            "three whole numbers or more that sum to 8",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 1.5]}}},
            "three whole numbers or more that sum to 8",
        ),
        ({"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "'yarn' is not supported"),
        ({"text_config": {"use_qk_norm": False}}, "use_qk_norm false"),
        ({"text_config": {"attention_bias": True}}, "attention_bias"),
        ({"vision_config": {"interpolate_mode": "nearest"}}, "interpolate_mode 'nearest'"),
        ({"vision_config": {"temporal_patch_size": 2}}, "temporal_patch_size must be 1"),
        ({"vision_config": {"max_image_size": 7}}, "max_image_size 7 is less than a patch"),
        ({"vision_config": {"num_key_value_heads": 2}}, "num_key_value_heads must be 4"),
        ({"image_token_id": 600}, "beyond the vocabulary"),
    ),
    "preprocessor_config.json": (({"merge_size": 4}, "merge_size is 4"),),
}


@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
