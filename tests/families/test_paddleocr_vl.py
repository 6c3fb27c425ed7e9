"""PaddleOCR-VL's own: an image's size, positions, what files say, and what is not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

from saccade.core.errors import CheckpointError, ImageError
from saccade.families.kit.config_readers import HALF
from saccade.families.paddleocr_vl.images import PaddleRules
from saccade.families.paddleocr_vl.spec import PaddleSpec
from saccade.families.registry import load_spec
from saccade_bench.fixtures.tiny import Reference
from tests.families.conftest import Changed, check_hub, listed
from tests.families.forwarding import images_of, pixels, prompt

FAMILY = "paddleocr_vl"
HUB = PaddleRules(14, 2, 147384, 2822400, HALF, HALF, temporal_patch=1)
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 9000))


def read(folder: Path) -> PaddleSpec:
    found = load_spec(folder)
    assert isinstance(found, PaddleSpec)
    return found


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match=f"{width} x {height} px.*200"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(height, width, 28, 147384, 2822400)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    assert recipe.canvas == smart_resize(height, width, 28, 147384, 2822400) and recipe.plain
    assert HUB.num_tokens(recipe.grid) <= HUB.largest_image.tokens


def test_positions_are_the_references(reference: Callable[..., Reference]) -> None:
    theirs = reference(FAMILY)
    spec, pictures = read(theirs.folder), pixels(theirs, 3)
    images = images_of(spec, pictures)
    tokens, spans = spec.expand_prompt(prompt(theirs, 3), images)
    found, following = spec.positions(
        tokens, spans, [spec.image_positions(image.grid) for image in images]
    )
    ids, grids = torch.tensor([tokens]), torch.tensor([image.grid for image in images])
    kinds = (ids == theirs.mark).int()
    wanted, delta = theirs.model.model.get_rope_index(ids, kinds, grids)
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert following == len(tokens) + int(delta)


def test_names_of_the_hub_say_the_same(checkpoint: Callable[..., Path]) -> None:
    assert read(checkpoint(FAMILY)) == read(checkpoint(FAMILY, layout="old"))


HUB_FILES: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "image_token_id": 100295,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 500000,
        "num_hidden_layers": 18,
        "sliding_window": None,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "paddleocr_vl", "temporal_patch_size": 2},
    },
    "preprocessor_config.json": {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "min_pixels": 147384,
        "max_pixels": 2822400,
        "size": {"min_pixels": 147384, "max_pixels": 2822400},
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def test_the_hubs_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for name, data in HUB_FILES.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, PaddleSpec)
    assert spec.images == HUB
    assert (spec.text.kv_heads, spec.text.head_dim, spec.text.rope.theta) == (2, 128, 5e5)
    assert (spec.vision.across, spec.vision.head_dim, spec.encoder_blocks) == (27, 72, 27)


def test_filters_are_the_processors(changed: Changed) -> None:
    spec = read(changed(FAMILY, "preprocessor_config.json", resample=2))
    assert spec.recipe(100, 90, spec.pixel_bounds).resample == "bilinear"


REFUSED = {
    "config.json": (
        ({"text_config": {"use_bias": True}}, "use_bias"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        (
            {"text_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "'yarn' is not supported",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
            "three figures that sum to 8",
        ),
        ({"vision_config": {"hidden_size": 42}}, "multiple of 4 values for each of 4 heads"),
        ({"vision_config": {"image_size": 7}}, "image_size 7 is less than a patch"),
        ({"vision_config": {"num_channels": 4}}, "num_channels must be 3"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "axial is"),
        ({"image_token_id": 600}, "beyond the vocabulary"),
    ),
    "preprocessor_config.json": (
        ({"merge_size": 4}, "merge_size is 4"),
        ({"temporal_patch_size": 2}, "temporal_patch_size is 2"),
        ({"do_normalize": False}, "do_normalize false"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"resample": 0}, "resample 0"),
    ),
}


@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
