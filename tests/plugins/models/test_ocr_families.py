"""Families that read pages at native resolution, each as data: an image's size, positions, what
files say, few bits, and what is not served. `tests/families/test_contract.py` has the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize as glm_size
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    smart_resize as hunyuan_size,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    smart_resize as paddle_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen_size

from saccade.core.errors import CheckpointError, ConfigError, ImageError
from saccade.core.types import Size
from saccade.families.kit.config_readers import CLIP_MEAN, CLIP_STD, HALF
from saccade.families.kit.grid_spec import GridSpec, RaisedSpec
from saccade.families.kit.native_images import ImageRules
from saccade.families.registry import load_spec
from saccade.plugins.models.dots_ocr.spec import DotsSpec
from saccade.plugins.models.glm_ocr.images import GlmRules
from saccade.plugins.models.glm_ocr.spec import GlmSpec
from saccade.plugins.models.hunyuan_vl.images import LineRules
from saccade.plugins.models.hunyuan_vl.spec import HunyuanSpec
from saccade.plugins.models.paddleocr_vl.images import PaddleRules
from saccade.plugins.models.paddleocr_vl.spec import PaddleSpec
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from tests.families.conftest import Changed, Refusals, check_hub, listed
from tests.families.forwarding import CPU, Session, images_of, load, pixels, prompt
from tests.fixtures.tiny import Reference, tinies
from tests.helpers.processor import needs_vnni

YARN = {"text_config": {"rope_parameters": {"rope_type": "yarn"}}}
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 9000))


@dataclass(frozen=True)
class Pages:
    """What a family's files make of a page, and what of them is refused.

    rules: the hub's. size: transformers', of height and width. tokens: of a page of so many tokens
    down and across. hub: the hub's files by name, and what the spec says of them, if they are
    published for transformers. options: variants of the tiny checkpoint whose positions differ.
    """

    spec: type[Any]
    rules: ImageRules
    size: Callable[[int, int], Size]
    refused: Refusals
    tokens: Callable[[int, int], int] = lambda down, across: down * across
    hub: Mapping[str, Any] = field(default_factory=dict)
    facts: Callable[[Any], tuple[Any, ...]] = lambda _: ()
    said: tuple[Any, ...] = ()


GLM = Pages(
    GlmSpec,
    GlmRules(14, 2, 12544 // 2, 9633792 // 2, CLIP_MEAN, CLIP_STD),
    lambda height, width: glm_size(2, height, width, 2, 28, 12544, 9633792),
    {
        "config.json": (
            ({"text_config": {"attention_bias": True}}, "attention_bias"),
            ({"text_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
            (YARN, "'yarn' is not supported"),
            (
                {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5}}},
                "partial_rotary_factor 0.5",
            ),
            (
                {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
                "three numbers that sum to 8",
            ),
            ({"vision_config": {"hidden_size": 42}}, "multiple of 4 values for each of 4 heads"),
            ({"vision_config": {"out_hidden_size": 48}}, "must be the language model's 64"),
            ({"vision_config": {"in_channels": 4}}, "in_channels must be 3"),
            ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "axial is"),
            ({"image_token_id": 600}, "not in the vocabulary"),
        ),
        "preprocessor_config.json": (
            ({"merge_size": 4}, "merge_size is 4"),
            ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
            ({"do_rescale": False}, "do_rescale false"),
            ({"rescale_factor": 1.0}, "rescale_factor"),
            ({"size": {"longest_edge": 9633791}}, "must be multiples of 2"),
        ),
    },
    hub={
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
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    },
    facts=lambda spec: (
        *(spec.text.tied, spec.text.kv_heads, spec.text.head_dim, spec.text.rope.pairs),
        *(spec.vision.hidden, spec.vision.out_hidden, spec.encoder_blocks),
    ),
    said=(False, 8, 128, "neighbours", 1024, 1536, 24),
)
PADDLE = Pages(
    PaddleSpec,
    PaddleRules(14, 2, 147384, 2822400, HALF, HALF, temporal_patch=1),
    lambda height, width: paddle_size(height, width, 28, 147384, 2822400),
    {
        "config.json": (
            ({"text_config": {"use_bias": True}}, "use_bias"),
            ({"text_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
            (YARN, "'yarn' is not supported"),
            (
                {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
                "three numbers that sum to 8",
            ),
            ({"vision_config": {"hidden_size": 42}}, "multiple of 4 values for each of 4 heads"),
            ({"vision_config": {"image_size": 7}}, "image_size 7 is less than a patch"),
            ({"vision_config": {"num_channels": 4}}, "num_channels must be 3"),
            ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "axial is"),
            ({"image_token_id": 600}, "not in the vocabulary"),
        ),
        "preprocessor_config.json": (
            ({"merge_size": 4}, "merge_size is 4"),
            ({"temporal_patch_size": 2}, "temporal_patch_size is 2"),
            ({"do_normalize": False}, "do_normalize false"),
            ({"rescale_factor": 1.0}, "rescale_factor"),
            ({"resample": 0}, "resample 0"),
        ),
    },
    hub={
        "config.json": {
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "model_type": "paddleocr_vl",
            "image_token_id": 100295,
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            },
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
    },
    facts=lambda spec: (
        *(spec.text.kv_heads, spec.text.head_dim, spec.text.rope.theta),
        *(spec.vision.across, spec.vision.head_dim, spec.encoder_blocks),
    ),
    said=(2, 128, 5e5, 27, 72, 27),
)
HUNYUAN = Pages(
    HunyuanSpec,
    LineRules(16, 2, 512 * 512, 2048 * 2048, HALF, HALF, temporal_patch=1),
    lambda height, width: hunyuan_size(height, width, 32, 512 * 512, 2048 * 2048),
    {
        "config.json": (
            ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "alpha is missing"),
            (
                {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
                "at least three integers that sum to 8",
            ),
            (
                {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 1.5]}}},
                "at least three integers that sum to 8",
            ),
            (YARN, "'yarn' is not supported"),
            ({"text_config": {"use_qk_norm": False}}, "use_qk_norm false"),
            ({"text_config": {"attention_bias": True}}, "attention_bias"),
            ({"vision_config": {"interpolate_mode": "nearest"}}, "interpolate_mode 'nearest'"),
            ({"vision_config": {"temporal_patch_size": 2}}, "temporal_patch_size must be 1"),
            ({"vision_config": {"max_image_size": 7}}, "max_image_size 7 is less than a patch"),
            ({"vision_config": {"num_key_value_heads": 2}}, "num_key_value_heads must be 4"),
            ({"image_token_id": 600}, "not in the vocabulary"),
        ),
        "preprocessor_config.json": (({"merge_size": 4}, "merge_size is 4"),),
    },
    tokens=lambda down, across: down * (across + 1) + 2,
)
DOTS = Pages(
    DotsSpec,
    ImageRules(14, 2, 3136, 11289600, HALF, HALF, temporal_patch=1),
    lambda height, width: qwen_size(height, width, 28, 3136, 11289600),
    {
        "config.json": (
            ({"use_sliding_window": True}, "use_sliding_window"),
            ({"rope_scaling": {"type": "yarn"}}, "'yarn' is not supported"),
            ({"vision_config": {"embed_dim": 42}}, "multiple of 4 values for each of 4 heads"),
            ({"vision_config": {"hidden_size": 48}}, "hidden_size 48 must be the language model's"),
            ({"vision_config": {"is_causal": True}}, "is_causal"),
            ({"vision_config": {"num_channels": 4}}, "num_channels must be 3"),
            ({"image_token_id": 600}, "not in the vocabulary"),
        ),
        "preprocessor_config.json": (({"patch_size": 14}, "patch_size is 14"),),
    },
)
PAGES = {"glm_ocr": GLM, "paddleocr_vl": PADDLE, "hunyuan_vl": HUNYUAN, "dots_ocr": DOTS}


# ---- sizes


def check_size(family: str, height: int, width: int) -> None:
    known = PAGES[family]
    rules = known.rules
    try:
        wanted = known.size(height, width)
    except ValueError:
        with pytest.raises(ImageError, match=f"{width} x {height} px.*200"):
            rules.recipe(height, width, rules.pixel_bounds)
        return
    recipe = rules.recipe(height, width, rules.pixel_bounds)
    assert recipe.canvas == wanted and recipe.plain
    assert recipe.grid == (1, wanted[0] // rules.patch, wanted[1] // rules.patch)
    tokens = known.tokens(wanted[0] // rules.factor, wanted[1] // rules.factor)
    assert rules.num_tokens(recipe.grid) == tokens <= rules.largest_image.tokens


@pytest.mark.parametrize("family", PAGES)
@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(family: str, height: int, width: int) -> None:
    check_size(family, height, width)


@pytest.mark.parametrize("family", PAGES)
def test_small_edges_are_rounded_as_the_references(family: str) -> None:
    """GLM-OCR's scale is a float, which may leave an edge a pixel short of a token's."""
    factor = PAGES[family].rules.factor
    for height in range(1, factor):
        for width in (height, factor, 99 * height + 1, 200 * height, 200 * height + 1):
            check_size(family, height, width)


# ---- positions


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("glm_ocr", ""), ("paddleocr_vl", "")),
        *(("hunyuan_vl", "as it is"), ("hunyuan_vl", "an axis less")),
    ],
)
def test_positions_are_the_references(
    reference: Callable[..., Reference], family: str, variant: str
) -> None:
    theirs = reference(family, **tinies()[family].variants[variant] if variant else {})
    spec, pictures = load_spec(theirs.folder), pixels(theirs, 3)
    images = images_of(spec, pictures)
    tokens, spans = spec.expand_prompt(prompt(theirs, 3), images)
    blocks = [spec.image_positions(image.grid) for image in images]
    found, following = spec.positions(tokens, spans, blocks)
    ids, grids = torch.tensor([tokens]), torch.tensor([image.grid for image in images])
    kinds = (ids == theirs.mark).int()
    wanted, delta = theirs.model.model.get_rope_index(ids, kinds, grids)
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert following == len(tokens) + int(delta)
    if family == "hunyuan_vl":
        assert {*found[-1, found[0] != found[-1]]} == {0, 1, 2}, "each image has its number"


# ---- files


@pytest.mark.parametrize("family", [name for name, each in PAGES.items() if each.hub])
def test_the_hubs_files_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    known = PAGES[family]
    for name, data in known.hub.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, known.spec)
    assert spec.images == known.rules
    assert known.facts(spec) == known.said


@pytest.mark.parametrize(
    ("family", "options"), [("paddleocr_vl", {}), ("hunyuan_vl", {"tie": True})]
)
def test_names_of_the_hub_say_the_same(
    checkpoint: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    new, old = (load_spec(checkpoint(family, layout=each, **options)) for each in ("new", "old"))
    assert isinstance(new, GridSpec | HunyuanSpec) and new == old
    assert new.position_axes == (4 if family == "hunyuan_vl" else 3)


@pytest.mark.parametrize(
    ("family", "file", "fields", "words"),
    [(name, *case) for name, each in PAGES.items() for case in listed(each.refused)],
)
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, family: str, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(family, file, **fields))


def test_a_short_file_of_dots_ocr_is_that_of_the_hub(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    """Fields that the published configuration has a default for."""
    known = load_spec(checkpoint("dots_ocr"))
    names = ("rms_norm_eps", "use_bias", "post_norm", "spatial_merge_size", "is_causal")
    short = changed("dots_ocr", "config.json", vision_config=dict.fromkeys(names))
    assert load_spec(short) == known
    for name in ("min_pixels", "max_pixels"):
        changed("dots_ocr", "preprocessor_config.json", **{name: None})
    read = load_spec(short)
    assert isinstance(read, DotsSpec)
    assert (read.images.min_pixels, read.images.max_pixels) == (56 * 56, 28 * 28 * 1280)


def test_filters_are_the_processors(changed: Changed) -> None:
    spec = load_spec(changed("paddleocr_vl", "preprocessor_config.json", resample=2))
    assert spec.recipe(100, 90, spec.pixel_bounds).resample == "bilinear"


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
        ('{"longest_edge": 64}', "pixels: a token has 256"),
        ('{"shortest_edge": 1000000}', "no image size has"),
        ('{"longest_edge": 4294967296}', "longest_edge must be at most"),
        ('{"longest_edge": 4096.5}', "longest_edge must be an integer"),
    ):
        with pytest.raises(CheckpointError, match=f"--family-option.*{words}"):
            load_spec(folder, [f"size={size}"])


# ---- weights


def test_the_layer_that_drafts_is_left_out(
    checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("glm_ocr")
    stored = load_file(folder / "model.safetensors")
    assert any(".layers.3." in name for name in stored)
    net = load(folder)
    assert len(net.spec.kv_spec().layers) == 3
    assert "layers.3" not in capfd.readouterr().err


@needs_vnni
@pytest.mark.parametrize(("mode", "furthest"), [("int8", 0.06), ("int4", 0.4)])
@pytest.mark.parametrize(
    ("family", "vision"), [("paddleocr_vl", {}), ("glm_ocr", {"out_hidden_size": 256})]
)
def test_matrices_of_few_bits_answer_nearly_as_whole_ones(
    reference: Callable[..., Reference],
    family: str,
    vision: dict[str, Any],
    mode: Literal["int8", "int4"],
    furthest: float,
) -> None:
    """Every matrix of the language model is found."""
    dtype = torch.bfloat16
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    theirs = reference(family, text=sizes, vision=vision)
    spec, tally, images = load_spec(theirs.folder), LoadTally(), pixels(theirs, 1)
    net = load_net(spec, theirs.folder, dtype=dtype, device=CPU, quantization=mode, tally=tally)
    session = Session(net, prompt(theirs, 1), images, 16, dtype)
    found, exact = session.prefill().float(), theirs.logits(session.tokens, images)
    assert 0 < (found - exact).norm() / exact.norm() < furthest
    products = 4 * spec.kv_spec().kv_layers + (mode == "int8")  # with the head
    assert f"{products} matrices of the language model in {mode}" in tally.line(dtype)
