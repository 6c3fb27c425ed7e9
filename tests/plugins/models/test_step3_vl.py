"""Step3-VL: how an image is cut, beside the published plan and transformers', and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from saccade.core.errors import CheckpointError, ImageError
from saccade.core.types import Image, ImageKey
from saccade.families.checkpoint import Section
from saccade.families.registry import load_spec
from saccade.plugins.models.step3_vl import pixels
from saccade.plugins.models.step3_vl.config import PerceptionConfig
from saccade.plugins.models.step3_vl.images import (
    CropRules,
    Sides,
    canvas_size,
    plan_crops,
    read_images,
)
from saccade.plugins.models.step3_vl.spec import CropPlaceholder, Step3VLSpec
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families.conftest import Changed, Refusals, refusals_by_name
from tests.families.forwarding import CPU, Session, encode, load
from tests.fixtures.families.step3_vl import VISION, published_crops
from tests.fixtures.tiny import Reference, picture
from tests.quantising import FORMATS, is_projection, quantise

FAMILY = "step3_vl"
SIDES = Sides(3024, 728, 504)
"""Those of the published model."""
HUB = PerceptionConfig(
    depth=47,
    hidden=1536,
    heads=16,
    intermediate=8960,
    activation="quick_gelu",
    norm_eps=1e-5,
    theta=1e4,
    side=728,
    patch=14,
    projector_bias=False,
    out_hidden=4096,
)


@pytest.fixture
def rules() -> CropRules:
    return read_images(Section("preprocessor_config.json", {}), HUB)


@pytest.fixture
def spec(checkpoint: Callable[..., Path]) -> Step3VLSpec:
    found = load_spec(checkpoint(FAMILY))
    assert isinstance(found, Step3VLSpec)
    return found


def sizes(count: int, seed: int = 7) -> list[tuple[int, int]]:
    """Return (height, width) of images of all shapes, small and large."""
    random = np.random.default_rng(seed)
    edges = np.exp(random.uniform(np.log(4), np.log(6000), (count, 2))).astype(int)
    edges[::50, 0] = SIDES.whole
    return [(int(height), int(width)) for height, width in edges]


# ---- images


def test_crops_are_those_of_the_published_plan() -> None:
    for height, width in sizes(20_000):
        plan = plan_crops((height, width), SIDES)
        resized, cut, window = published_crops(width, height, (3024, 728, 504))
        assert (plan.resized, plan.snapped, plan.window) == (resized[::-1], cut[::-1], window)


def test_transformers_plans_other_crops_at_bounds_alone() -> None:
    """Its processor is that of Step-3.7, and differs where floats do and at one size."""
    settings: Any = SimpleNamespace(
        max_image_size=3024, _is_extreme_aspect=Step3p7ImageProcessor._is_extreme_aspect
    )
    other = 0
    for height, width in sizes(20_000):
        plan = plan_crops((height, width), SIDES)
        _, cut, window, columns, rows, _ = Step3p7ImageProcessor._plan_patches(
            settings, width, height, SIDES.whole, SIDES.crop
        )
        if (plan.snapped[::-1], plan.window, plan.columns, plan.rows) != (
            cut,
            window,
            columns,
            rows,
        ):
            other += 1
            parts = [edge / plan.window % 1 for edge in plan.resized] if plan.window else []
            assert any(abs(part - 0.2) < 1e-9 for part in parts)
    assert 0 < other < 20_000 / 100


@pytest.mark.parametrize(
    ("width", "height", "grid", "tokens"),
    [
        (640, 480, (0, 0), 171),
        (1280, 720, (2, 3), 670),
        (1400, 850, (2, 3), 670),
        (1920, 1080, (2, 4), 836),
        (2560, 1440, (3, 5), 1418),
        (3840, 2160, (4, 6), 2166),
        (3024, 3024, (6, 6), 3164),
    ],
)
def test_prompts_have_the_published_lengths(
    rules: CropRules,
    spec: Step3VLSpec,
    width: int,
    height: int,
    grid: tuple[int, int],
    tokens: int,
) -> None:
    recipe = rules.recipe(height, width, rules.pixel_bounds)
    patches = rules.num_patches(recipe.grid)
    image = Image(
        ImageKey(b"", b""), recipe.grid, rules.num_tokens(recipe.grid), patches, recipe.canvas
    )
    assert isinstance(spec.placeholder, CropPlaceholder)
    placeholder = replace(spec.placeholder, rules=rules)
    expanded, _ = placeholder.expand(placeholder.marks, [image])
    assert (recipe.grid, len(expanded)) == (grid, tokens)


def test_no_image_has_more_tokens_or_pixels_than_the_largest(rules: CropRules) -> None:
    refused = 0
    for height, width in sizes(4_000):
        try:
            recipe = rules.recipe(height, width, rules.pixel_bounds)
        except ImageError:
            refused += max(height, width) > 36 * min(height, width)
            continue
        assert rules.num_tokens(recipe.grid) <= rules.largest_image.tokens
        assert recipe.canvas[0] * recipe.canvas[1] <= rules.largest_image.pixels
        assert recipe.own is not None
        assert recipe.own.other_bytes < 2**28
    assert refused > 100


def test_a_request_may_ask_for_fewer_crops(rules: CropRules) -> None:
    crop, found = 504**2, []
    for most in (36 * crop, 35 * crop, 16 * crop, 4 * crop, crop, 1):
        recipe = rules.recipe(4000, 4000, replace(rules.pixel_bounds, max_pixels=most))
        found.append((recipe.grid, rules.settings(FAMILY, recipe)))
    assert [grid for grid, _ in found] == [(6, 6), (5, 5), (4, 4), (2, 2), (0, 0), (0, 0)]
    assert len({settings for _, settings in found}) == 5


def test_a_crop_of_the_published_size_is_a_cut_from_pillows_image() -> None:
    """Beyond the image's edge it is black: transformers' processor stretches it there."""
    picture = np.random.default_rng(0).integers(0, 256, (400, 1100, 3), np.uint8)
    plan = plan_crops(picture.shape[:2], SIDES)
    assert (plan.snapped, plan.rows, plan.columns) == ((400, 1008), 1, 2)
    out = np.full((*canvas_size((1, 2), SIDES), 3), 7, np.uint8)
    pixels.warm_up("3024 728 504")
    pixels.draw(out, "3024 728 504", picture)
    wanted = PIL.Image.fromarray(picture).resize((1008, 400), PIL.Image.Resampling.BILINEAR)
    assert np.array_equal(out[:400, :1008], np.asarray(wanted))
    assert not out[400:504].any()
    assert not out[504:, 728:].any()
    assert out[504:, :728].any(axis=2).mean() > 0.99


def test_an_image_without_crops_is_encoded_as_the_reference(
    reference: Callable[..., Reference],
) -> None:
    theirs = reference(FAMILY)
    images = [theirs.resize(picture(*size, seed=size[0])) for size in ((40, 44), (90, 60))]
    found = encode(load(theirs.folder), [torch.from_numpy(each) for each in images])
    for ours, wanted in zip(found, theirs.embeddings(images), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    assert len(found[0]) == 9


# ---- files


def test_the_hubs_tower_is_what_transformers_makes_of_it(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Queries' and keys' values are turned with their neighbours there."""
    folder = checkpoint(FAMILY)
    tensors = load_file(folder / "model.safetensors")
    tower = {
        name.removeprefix("vision_model."): value.contiguous()
        for name, value in tensors.items()
        if name.startswith("vision_model.")
    }
    assert "transformer.resblocks.0.attn.in_proj_weight" in tower
    save_file(tower, tmp_path / "model.safetensors", {"format": "pt"})
    Step3p7VisionConfig(**VISION).save_pretrained(tmp_path)
    made = Step3p7VisionModel.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    wanted = load_file(folder / "reference" / "model.safetensors")
    for name, value in made.items():
        assert torch.equal(value, wanted[f"model.vision_model.{name}"]), name


def test_the_tokenizer_must_know_the_marks(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    folder = changed(FAMILY, "tokenizer.json")
    (folder / "tokenizer.json").write_bytes(
        (checkpoint("qwen2_vl") / "tokenizer.json").read_bytes()
    )
    with pytest.raises(CheckpointError, match="has no <im_start>"):
        load_spec(folder)


MATRICES = {"old": (".out_proj.weight", ".c_fc.weight", ".c_proj.weight"), "new": ("_proj.weight",)}
"""Of the tower, in the hub's files and in transformers'. The hub's queries, keys and values are no
layer of their own.
"""


@pytest.mark.sparse
@pytest.mark.parametrize("tower", [False, True], ids=["language model", "tower, too"])
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_computes_what_its_twin_does(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str, layout: str, tower: bool
) -> None:
    """Equal logits behind a picture, with scales under the hub's names and transformers'."""
    prefix = "" if layout == "old" else "model."
    text = "model.layers" if layout == "old" else "model.language_model.layers"
    settings = FORMATS[name].settings
    blocks = "weight_block_size" in settings
    ignored = ["lm_head", f"{text}.1.self_attn.k_proj"]
    if not tower:
        ignored.append(f"{prefix}vision_model" if blocks else "re:.*vision_model.*")
    listed = "modules_to_not_convert" if blocks else "ignore"

    def chosen(weight: str) -> bool:
        if "vision_model" in weight:
            return tower and weight.endswith(MATRICES[layout])
        return is_projection(weight)

    folder = checkpoint(FAMILY, layout=layout)
    format = replace(FORMATS[name], settings={**settings, listed: ignored})
    logits = []
    for each in quantise(folder, format, tmp_path, chosen):
        spec = load_spec(each)
        assert isinstance(spec, Step3VLSpec)
        net = load_net(spec, each, dtype=torch.float32, device=CPU, quantization="none")
        shown = [np.asarray(picture(*spec.sample.canvas))]
        marks = spec.placeholder.marks
        logits.append(Session(net, [1, 2, *marks, 3, 4], shown, page_size=None).prefill())
    assert torch.equal(*logits)


REFUSED: Refusals = {
    "config.json": [
        ({"vision_config": {"use_cls_token": True}}, "use_cls_token must be false"),
        ({"vision_config": {"ues_cls_token": True}}, "ues_cls_token must be false"),
        ({"vision_config": {"use_rope2d": False}}, "use_rope2d must be true"),
        ({"vision_config": {"image_size": 50}}, "image_size 50 must be a multiple of 4 patches"),
        ({"vision_config": {"heads": 5}}, "multiple of 4 values for each of 5 heads"),
        ({"understand_projector_stride": 1}, "understand_projector_stride must be 2"),
        ({"text_config": {"model_type": "step3p5"}}, "'step3p5' is not supported"),
        ({"image_token_id": 70_000}, "not in the vocabulary"),
    ],
    "preprocessor_config.json": [
        ({"size": {"height": 64}}, "height is 64, but the vision encoder requires 48"),
        ({"patch_size": 24}, "patch_size must be a multiple of 16 pixels and at most 48"),
        ({"patch_size": 64}, "patch_size must be a multiple of 16 pixels and at most 48"),
        ({"max_image_size": 4000}, "max_image_size must be from 48 to 192"),
    ],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
