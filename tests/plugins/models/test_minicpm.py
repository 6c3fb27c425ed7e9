"""MiniCPM-V 4.6: images are cut into slices and numbered in the prompt as transformers does it, and
are the same images at any place; rows become one within the tower.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)

from saccade.core.config import EncoderConfig, QuantizationMode
from saccade.core.errors import CheckpointError, ConfigError, ImageError, InvalidRequest
from saccade.core.metrics import Metrics
from saccade.core.types import Image, ImageKey
from saccade.families.kit.base_spec import MAX_ASPECT
from saccade.families.registry import load_spec
from saccade.kernels.reference.segments import sdpa_segments
from saccade.nn.protocol import FamilyNet, Pack
from saccade.plugins.models.minicpm.images import slice_grid, slice_size, view_size
from saccade.plugins.models.minicpm.spec import MiniCPMSpec, SlicePlaceholder
from saccade.runtime.vision.packed_encoder import PackedEncoder, drain, split_segments
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from saccade_bench.lab.qwen import grids
from tests.families.answers import Case, Model
from tests.families.conftest import Changed, Refusals, check_hub, refusals_by_name
from tests.families.forwarding import CPU, LOGITS, Session, encode, load, pixels, prompt
from tests.families.image_files import check_pixels
from tests.fixtures.families.minicpm import IMAGE, MOST, SCALE, TOKENS, SliceReference
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import Reference, picture
from tests.fixtures.tiny import reference as load_reference
from tests.helpers.processor import needs_vnni

References = Callable[..., Reference]
FAMILY = "minicpmv4_6"
HALF = torch.bfloat16
SHAPES = [(60, 60), (100, 230), (300, 90), (20, 31), (700, 500), (30, 400), (48, 97)]


@pytest.fixture(scope="module")
def theirs(reference: References) -> Reference:
    return reference(FAMILY)


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> MiniCPMSpec:
    return read(theirs.folder)


@pytest.fixture(scope="module")
def model(answered: Callable[[str], Model]) -> Model:
    return answered(FAMILY)


def read(folder: Path, *options: str) -> MiniCPMSpec:
    found = load_spec(folder, options)
    assert isinstance(found, MiniCPMSpec)
    return found


# ---- images


def in_mode(changed: Changed, mode: str) -> Path:
    changed(FAMILY, "preprocessor_config.json", downsample_mode=mode)
    return changed(FAMILY, "config.json", downsample_mode=mode)


@pytest.mark.parametrize(
    "fields",
    [
        {"slice_mode": False},
        {"max_slice_nums": 1},
        {"max_slice_nums": 3, "scale_resolution": 90},
        {"resample": 1},
        {"downsample_mode": "4x"},
    ],
    ids=["no slices", "one", "three of another size", "lanczos", "4x"],
)
def test_pixels_of_other_settings_are_the_references(
    changed: Changed, fields: dict[str, Any]
) -> None:
    in_mode(changed, fields.get("downsample_mode", "16x"))
    folder = changed(FAMILY, "preprocessor_config.json", **fields)
    check_pixels(read(folder), load_reference(folder), 16)


@settings(deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([1, 2, 6, 9, 36]),
    st.sampled_from([(448, 14), (48, 4), (100, 14)]),
    st.sampled_from(["16x", "4x"]),
)
def test_sizes_are_the_references(
    height: int, width: int, most: int, scale_patch: tuple[int, int], mode: str
) -> None:
    (scale, patch), size = scale_patch, (height, width)
    made, unit = MiniCPMV4_6ImageProcessorPil(), patch * (2 if mode == "4x" else 4)
    wanted = made.get_sliced_grid(size, most, scale)
    grid = slice_grid(size, scale, 1, most)
    assert grid == tuple(wanted or (0, 0))
    enlarge = wanted is None
    assert view_size(size, scale, unit, enlarge=enlarge) == made.find_best_resize(
        size, scale, patch, mode, allow_upscale=enlarge
    )
    if wanted is not None:
        refined = made.get_refine_size(size, wanted, scale, patch, mode, allow_upscale=True)
        tall, wide = slice_size(size, grid, scale, unit)
        assert (tall * grid[0], wide * grid[1]) == refined


def test_a_request_may_ask_for_fewer_slices_or_for_more(spec: MiniCPMSpec) -> None:
    area, bounds = SCALE**2, spec.pixel_bounds
    assert (bounds.least, bounds.max_pixels) == (area, MOST * area)
    found = []
    for most in (6 * area, 4 * area, 2 * area, 2 * area - 1, area):
        recipe = spec.recipe(300, 300, replace(bounds, max_pixels=most))
        found.append((recipe.grid[2:4], spec.settings(recipe)))
    assert [grid for grid, _ in found] == [(2, 3), (2, 2), (2, 1), (), ()]
    assert len({settings for _, settings in found}) == 4
    more = replace(bounds, min_pixels=4 * area)
    assert spec.recipe(40, 40, more).grid[2:4] == (2, 2)
    assert spec.recipe(40, 40, bounds).grid == (3, 3)


@pytest.mark.parametrize(("scale", "most"), [(48, 6), (448, 9), (448, 36), (200, 1)])
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_no_image_is_larger_than_the_largest(
    checkpoint: Callable[..., Path], scale: int, most: int, mode: str
) -> None:
    tiny = read(checkpoint(FAMILY), f"downsample_mode={mode}")
    patch = 14 if scale > 48 else 4
    spec = replace(tiny, images=replace(tiny.images, scale=scale, most=most, patch=patch))
    chance, largest, furthest = random.Random(0), spec.largest_image, 0
    for _ in range(3000):
        shape = math.exp(chance.uniform(-1, 1) * math.log(MAX_ASPECT))
        area = scale**2 * chance.uniform(0.01, most + 3)
        size = max(1, round(math.sqrt(area / shape))), max(1, round(math.sqrt(area * shape)))
        if max(size) > MAX_ASPECT * min(size):
            continue
        recipe = spec.recipe(*size, spec.pixel_bounds)
        assert math.prod(recipe.canvas) <= largest.pixels
        assert spec.num_tokens(recipe.grid) <= largest.tokens
        furthest = max(furthest, spec.num_tokens(recipe.grid))
    assert furthest > largest.tokens / 2, "the bound is no wild guess"


def test_shapes_that_are_a_line_are_refused(spec: MiniCPMSpec) -> None:
    with pytest.raises(ImageError, match=r"2010 x 10 px: .* more than 200 times the shorter"):
        spec.recipe(10, 2010, spec.pixel_bounds)


# ---- prompts


def image_of(spec: MiniCPMSpec, size: tuple[int, int]) -> Image:
    grid = spec.recipe(*size, spec.pixel_bounds).grid
    return Image(ImageKey(b"", b""), grid, spec.num_tokens(grid), spec.num_patches(grid), size)


class Processor(transformers.MiniCPMV4_6Processor):
    """transformers' own, but that it takes no video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


def processor(theirs: Reference) -> Processor:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(theirs.folder / "tokenizer.json"),
        extra_special_tokens=TOKENS,
        pad_token="<|endoftext|>",
    )
    videos = SimpleNamespace(slice_mode=False, downsample_mode="16x")
    return Processor(theirs.processor, videos, tokenizer)


@pytest.mark.parametrize(
    "shapes",
    [SHAPES[:1], SHAPES[1:2], SHAPES[2:4], SHAPES[4:7], SHAPES, [(60, 61), (100, 230)] * 6],
    ids=["one", "one of slices", "two", "three", "seven", "twelve"],
)
@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "not numbered"])
def test_prompts_and_pixels_are_those_of_the_references_processor(
    changed: Changed,
    shapes: list[tuple[int, int]],
    numbered: bool,
) -> None:
    folder = changed(FAMILY, "preprocessor_config.json", use_image_id=numbered)
    theirs, spec = load_reference(folder), read(folder)
    made = processor(theirs)
    shown = [picture(*size, seed=i) for i, size in enumerate(shapes)]
    words = "how many " + "".join(f"{IMAGE}\n{i} and " for i in range(len(shapes))) + "fox?"
    wanted = made(images=[PIL.Image.fromarray(each) for each in shown], text=words)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(words).ids
    images = [image_of(spec, size) for size in shapes]
    expanded, _ = spec.expand_prompt(tokens, images)
    assert list(expanded) == wanted.input_ids[0].tolist()
    canvases = [theirs.resize(each) for each in shown]
    assert isinstance(theirs, SliceReference)
    values, sizes = theirs.patches(canvases)  # what the reference is asked with below
    assert sizes.tolist() == wanted.target_sizes.tolist()
    assert values.equal(wanted.pixel_values)


def test_images_are_numbered_up_to_a_thousand(spec: MiniCPMSpec) -> None:
    (content, _), image = spec.placeholder.marks, image_of(spec, (10, 10))
    assert isinstance(spec.placeholder, SlicePlaceholder)
    expanded, _ = spec.expand_prompt([content] * 1000, [image] * 1000)
    number, behind = spec.placeholder.numbers[999], image.num_tokens + 2
    assert expanded[-len(number) - behind : -behind] == number
    with pytest.raises(InvalidRequest, match="has 1001 images; this model numbers at most 1000"):
        spec.expand_prompt([content] * 1001, [image] * 1001)


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "what?"}, {"type": "image"}],
    },
    {"role": "assistant", "content": "a circle"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and here?"}]},
]
WRITTEN = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n<|image_pad|>\nwhat?\n<|image_pad|>"
    "<|im_end|>\n<|im_start|>assistant\na circle<|im_end|>\n<|im_start|>user\n<|image_pad|>\n"
    "and here?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_images_of_a_chat_are_numbered_through_its_turns(
    spec: MiniCPMSpec, theirs: Reference
) -> None:
    tokenizer = TextTokenizer.load(theirs.folder)
    template = ChatTemplate.load(theirs.folder, tokenizer, None, spec.templates)
    assert template.render(CHAT) == WRITTEN
    shown = [picture(*size, seed=i) for i, size in enumerate(SHAPES[:3])]
    wanted = processor(theirs)(
        images=[PIL.Image.fromarray(each) for each in shown], text=WRITTEN
    ).input_ids[0]
    images = [image_of(spec, size) for size in SHAPES[:3]]
    expanded, _ = spec.expand_prompt(tokenizer.encode(WRITTEN), images)
    assert list(expanded) == wanted.tolist()


# ---- the network


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"text": {"num_key_value_heads": 1}}, {"insert_layer_id": 3}),
        ({"vision": {"image_size": 36, "num_attention_heads": 2}}, {"insert_layer_id": 0}),
    ],
    ids=["merged last", "merged first"],
)
def test_rows_become_one_behind_any_layer(
    checkpoint: Callable[..., Path], tmp_path: Path, options: Any, fields: dict[str, Any]
) -> None:
    folder = shutil.copytree(checkpoint(FAMILY, **options), tmp_path / "m")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | fields))
    check_logits(load(folder), load_reference(folder))


def check_logits(net: FamilyNet, theirs: Reference) -> None:
    images = pixels(theirs, 3)
    tensors = [torch.from_numpy(image) for image in images]
    for ours, wanted in zip(encode(net, tensors), theirs.embeddings(images), strict=True):
        assert ours.shape == wanted.shape
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    session = Session(net, prompt(theirs, 2), images[1:], page_size=16)
    torch.testing.assert_close(
        session.prefill(7), theirs.logits(session.tokens, images[1:]), **LOGITS
    )


def test_a_server_may_choose_how_many_tokens_an_image_has(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    """Four times as many, by the option alone, of a checkpoint whose files say otherwise."""
    fine = in_mode(changed, "4x")
    spec, other = read(checkpoint(FAMILY), "downsample_mode=4x"), read(checkpoint(FAMILY))
    assert spec == read(fine)
    net = load_net(spec, checkpoint(FAMILY), dtype=torch.float32, device=CPU)
    check_logits(net, load_reference(fine))
    check_logits(load(fine), load_reference(fine))
    square = spec.recipe(SCALE, SCALE, spec.pixel_bounds)
    assert square.canvas == other.recipe(SCALE, SCALE, other.pixel_bounds).canvas
    assert spec.num_tokens(square.grid) == 36
    assert spec.settings(square) != other.settings(square)
    assert read(fine, "downsample_mode=16x") == other


@pytest.mark.parametrize("limit", [9, 21, 97])
def test_a_view_in_parts_is_the_view(model: Model, limit: int) -> None:
    """Parts end within the four patches that become one; what all pieces cost is what is said."""
    net, vision = model.net, model.net.vision
    canvas = torch.from_numpy(model.reference.resize(picture(100, 230, seed=5)))
    (grid,) = grids(net.spec, [canvas])
    facts = vision.grid_facts(grid)
    rows = vision.embed(canvas, facts)
    whole = encode(net, [canvas])[0]
    cuts = split_segments(facts.segments[0], limit, CPU)
    assert any(cut.rows.start % 4 for cut in cuts) or limit == 97, [cut.rows for cut in cuts]
    pieces, costs = vision.blocks(Pack(rows, facts.places, (cuts,), sdpa_segments)), []
    while True:
        try:
            costs.append(next(pieces))
        except StopIteration as end:
            found = end.value
            break
    assert sum(costs) == len(rows) * vision.depth == len(rows) * net.spec.encoder_blocks
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0.0)
    assert drain(vision.blocks(Pack(rows, facts.places, (cuts,), sdpa_segments))).equal(found)


@pytest.mark.parametrize("mode", ["none", pytest.param("int8", marks=needs_vnni)])
def test_matrices_of_fewer_bits_answer_nearly_as_whole_ones(
    reference: References, mode: QuantizationMode
) -> None:
    """In 16 bits, and the language model's in 8: states add up what rounding does to them."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    theirs = reference(FAMILY, text=sizes)
    spec, tally = load_spec(theirs.folder), LoadTally()
    net = load_net(spec, theirs.folder, dtype=HALF, device=CPU, quantization=mode, tally=tally)
    (shown,) = images = pixels(theirs, 1)
    positions = PositionCache(spec, net.vision, Metrics())
    packed = PackedEncoder(net, positions, EncoderConfig(), torch.empty(0, dtype=HALF))
    (embedding,) = packed.encode([torch.from_numpy(shown)], grids(spec, images))
    (wanted,) = theirs.embeddings(images)
    assert embedding.dtype == HALF
    assert 0 < (embedding.float() - wanted).norm() / wanted.norm() < 0.02
    session = Session(net, list(range(20, 60)), [], 16, HALF)
    answer, exact = session.prefill().float(), theirs.logits(session.tokens)
    assert 0 < (answer - exact).norm() / exact.norm() < (0.2 if mode == "int8" else 0.1)
    made = "17 matrices of the language model in int8"
    assert (made in tally.line(HALF)) == (mode == "int8")


def test_an_image_at_another_place_is_the_same_image(model: Model) -> None:
    """Its number is text before it: other tokens are computed, nothing is decoded or encoded."""
    cases = {
        "alone": Case("look: @ how many?", ((112, 140),)),
        "second": Case("first @ and then @ which?", ((64, 96), (112, 140))),
        "both": Case("@ brown @ and over @ lazy", ((112, 140), (64, 96), (112, 140))),
    }
    harness = Harness(model.net, chunk_tokens=64)
    work, asked = [], {}
    for name, case in cases.items():
        images = [
            harness.image(each, f"{size}") for size, each in zip(case.pictures, model.pixels(case))
        ]
        asked[name] = harness.request(name, model.tokens(case), images, max_tokens=12)
        outcome = harness.run([asked[name]])[name]
        wanted = model.reference.generate(asked[name].tokens, model.pixels(case), max_new_tokens=12)
        assert outcome.tokens == wanted
        work.append((len(harness.decoded), len(harness.encoded)))
    assert work == [(1, 1), (2, 2), (2, 2)]
    numbers = model.net.spec.placeholder.numbers  # type: ignore[attr-defined]
    for name, place in (("alone", 0), ("second", 1), ("both", 2)):
        request = asked[name]
        (first, *_) = [span for span in request.spans if span.image == place]
        before = request.tokens[: first.start - 1]
        assert before[-len(numbers[place]) :] == numbers[place]


# ---- files


def test_the_hubs_files_are_read_as_transformers_reads_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The published configuration names no sections of positions; ties are said of the language
    model, of whose weights there is no head.
    """
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
        "model_type": FAMILY,
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "text_config": {
            "model_type": "qwen3_5_text",
            "head_dim": 256,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "linear_num_value_heads": 16,
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "vocab_size": 248094,
        },
        "vision_config": {
            "model_type": "minicpmv4_6_vision",
            "hidden_size": 1152,
            "image_size": 980,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    del named["extra_special_tokens"]
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    spec = check_hub(folder)
    assert isinstance(spec, MiniCPMSpec)
    assert (spec.hybrid.rotary_dim, spec.text.rope.theta, spec.text.tied) == (64, 1e7, True)
    assert (spec.vision.insert, spec.vision.siglip.across) == (6, 70)
    made = MiniCPMV4_6ImageProcessorPil()
    assert (spec.images.scale, spec.images.most) == (made.scale_resolution, made.max_slice_nums)
    assert spec.images.colours == (tuple(made.image_mean), tuple(made.image_std))
    recipe = spec.recipe(1344, 1344, spec.pixel_bounds)
    assert recipe.grid == (8, 8, 3, 3, 8, 8) and spec.num_tokens(recipe.grid) == 640
    assert spec.encoder_blocks == 13
    assert spec.largest_image.tokens < 1000


def test_the_tokenizer_must_know_the_marks(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    folder = changed(FAMILY, "tokenizer.json")
    shutil.copy(checkpoint("qwen2_vl") / "tokenizer.json", folder)
    with pytest.raises(CheckpointError, match="has no token <image>"):
        load_spec(folder)


def test_other_options_are_refused(checkpoint: Callable[..., Path]) -> None:
    for option in ("downsample_mode=8x", "patch_embed=folded"):
        with pytest.raises(ConfigError, match=f"{option}: minicpmv4_6 has downsample_mode, which"):
            load_spec(checkpoint(FAMILY), [option])


REFUSED: Refusals = {
    "config.json": [
        ({"merger_times": 2}, "merger_times 2 is not supported"),
        ({"insert_layer_id": 4}, "insert_layer_id 4 is not one of the vision encoder's 4"),
        ({"insert_layer_id": -1}, "insert_layer_id -1 is not one"),
        ({"drop_vision_last_layer": True}, "drop_vision_last_layer is not"),
        ({"merge_kernel_size": [3, 3]}, r"merge_kernel_size \[3, 3\] is not"),
        ({"vision_config": {"window_kernel_size": [2, 4]}}, "window_kernel_size"),
        ({"vision_config": {"model_type": "clip"}}, "'clip' is not supported"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "moe_text' is not"),
        (
            {"text_config": {"rope_parameters": {"partial_rotary_factor": 2.0}}},
            "partial_rotary_factor 2.0 of 16 values is not supported",
        ),
        ({"downsample_mode": "8x"}, "downsample_mode '8x' is not supported"),
        ({"downsample_mode": "4x"}, "downsample_mode is 16x, but it is 4x in config"),
        ({"image_token_id": 7}, "image_token_id is 7, but the tokenizer's is"),
    ],
    "preprocessor_config.json": [
        ({"patch_size": 14}, "patch_size is 14, but the vision encoder"),
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"resample": 2}, "resample 2 is not supported"),
        ({"rescale_factor": 1.0}, "rescale_factor 1.0 is not supported"),
        ({"scale_resolution": 10**6}, "must be at most 4096, not"),
        ({"scale_resolution": 0}, "scale_resolution"),
        ({"max_slice_nums": 0}, "max_slice_nums must be at least 1"),
        ({"max_slice_nums": 10**6}, "must be at most 100, not"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
    ],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
