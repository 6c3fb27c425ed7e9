"""GLM-OCR's own: an image's size, positions, a layer that drafts, and what is not served."""

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
from safetensors.torch import load_file
from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize

from saccade.core.errors import CheckpointError, ImageError
from saccade.families.glm_ocr.images import GlmRules
from saccade.families.glm_ocr.spec import GlmSpec
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD
from saccade.families.registry import load_spec
from saccade_bench.fixtures.tiny import Reference
from tests.families.conftest import Changed, check_hub, listed
from tests.families.forwarding import images_of, load, pixels, prompt

FAMILY = "glm_ocr"
LEAST, MOST = 12544, 9633792
HUB = GlmRules(14, 2, LEAST // 2, MOST // 2, CLIP_MEAN, CLIP_STD)
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 9000))


def read(folder: Path) -> GlmSpec:
    found = load_spec(folder)
    assert isinstance(found, GlmSpec)
    return found


def theirs(height: int, width: int) -> tuple[int, int]:
    size: tuple[int, int] = smart_resize(2, height, width, 2, 28, LEAST, MOST)
    return size


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    try:
        wanted = theirs(height, width)
    except ValueError:
        with pytest.raises(ImageError, match="200"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    assert recipe.canvas == wanted and recipe.plain
    assert HUB.num_tokens(recipe.grid) <= HUB.largest_image.tokens


def test_small_edges_are_rounded_as_the_references() -> None:
    """Its scale is a float, which may leave an edge a pixel short of a token's."""
    for height in range(1, 28):
        for width in (height, 28, 99 * height + 1, 200 * height):
            try:
                wanted = theirs(height, width)
            except ValueError:
                with pytest.raises(ImageError, match="200"):
                    HUB.recipe(height, width, HUB.pixel_bounds)
            else:
                assert HUB.recipe(height, width, HUB.pixel_bounds).canvas == wanted


def test_positions_are_the_references(reference: Callable[..., Reference]) -> None:
    model = reference(FAMILY)
    spec, pictures = read(model.folder), pixels(model, 3)
    images = images_of(spec, pictures)
    tokens, spans = spec.expand_prompt(prompt(model, 3), images)
    found, following = spec.positions(
        tokens, spans, [spec.image_positions(image.grid) for image in images]
    )
    ids, grids = torch.tensor([tokens]), torch.tensor([image.grid for image in images])
    kinds = (ids == model.mark).int()
    wanted, delta = model.model.model.get_rope_index(ids, kinds, grids)
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert following == len(tokens) + int(delta)


def test_the_layer_that_drafts_is_left_out(
    checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(FAMILY)
    stored = load_file(folder / "model.safetensors")
    assert any(".layers.3." in name for name in stored)
    net = load(folder)
    assert len(net.spec.kv_spec().layers) == 3
    assert "layers.3" not in capfd.readouterr().err


HUB_FILES: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "text_config": {
            "model_type": "glm_ocr_text",
            "eos_token_id": [59246, 59253],
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "head_dim": 128,
            "num_nextn_predict_layers": 1,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [16, 24, 24],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000,
            },
        },
        "vision_config": {"model_type": "glm_ocr_vision"},
    },
    "preprocessor_config.json": {
        "image_processor_type": "Glm46VImageProcessor",
        "size": {"shortest_edge": LEAST, "longest_edge": MOST},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}


def test_the_hubs_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for name, data in HUB_FILES.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, GlmSpec)
    assert spec.images == HUB and not spec.text.tied
    assert (spec.text.kv_heads, spec.text.head_dim, spec.text.rope.pairs) == (8, 128, "neighbours")
    assert (spec.vision.hidden, spec.vision.out_hidden, spec.encoder_blocks) == (1024, 1536, 24)


REFUSED = {
    "config.json": (
        ({"text_config": {"attention_bias": True}}, "attention_bias"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        (
            {"text_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "'yarn' is not supported",
        ),
        (
            {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
            "three figures that sum to 8",
        ),
        ({"vision_config": {"hidden_size": 42}}, "multiple of 4 values for each of 4 heads"),
        ({"vision_config": {"out_hidden_size": 48}}, "must be the language model's 64"),
        ({"vision_config": {"in_channels": 4}}, "in_channels must be 3"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "axial is"),
        ({"image_token_id": 600}, "beyond the vocabulary"),
    ),
    "preprocessor_config.json": (
        ({"merge_size": 4}, "merge_size is 4"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ({"do_rescale": False}, "do_rescale false"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"size": {"longest_edge": 9633791}}, "must be multiples of 2"),
    ),
}


@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
