"""Gemma 4: layers of two shapes, keys and values that layers share, images that see themselves in
some layers alone, and a budget of tokens for an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.gemma4_unified.modeling_gemma4_unified import (
    get_block_sequence_ids_for_mask,
)

from saccade.core.errors import ConfigError, ImageError
from saccade.core.family import PixelBounds
from saccade.families.kit.base_spec import Placeholder
from saccade.families.registry import load_spec
from saccade.nn.protocol import Pack
from saccade.plugins.models.gemma4.images import fit
from saccade.plugins.models.gemma4.spec import Gemma4Spec
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families import answers
from tests.families.answers import ASKED, check_rank_group
from tests.families.conftest import Changed, Refusals, Refused, check_hub, listed, refusals_by_name
from tests.families.forwarding import CPU, encode, load, pixels, prompt
from tests.families.image_files import canvas_of, files
from tests.fixtures.families.gemma4 import (
    E2B,
    EXPERTS,
    FULL,
    LAYERS,
    NEAR,
    SHARED,
    TOKENS,
    published_masks,
)
from tests.fixtures.harness import Harness
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, picture
from tests.media.pictures import decoded

FAMILY, UNIFIED = "gemma4", "gemma4_unified"
References = Callable[..., Reference]


@pytest.fixture(scope="module")
def spec(checkpoint: Callable[..., Path]) -> Gemma4Spec:
    found = load_spec(checkpoint(FAMILY))
    assert isinstance(found, Gemma4Spec)
    return found


# ---- images


def test_pillow_s_pixels_are_a_level_or_two_of_255_away(
    spec: Gemma4Spec, reference: References
) -> None:
    furthest, resize = 0, reference(FAMILY).processor.aspect_ratio_preserving_resize
    for data in files()[:30:10]:
        canvas, _ = canvas_of(spec, data)
        planes = decoded(data).transpose(2, 0, 1)
        pillow = resize(planes, 16, 9 * TOKENS, 3, PIL.Image.Resampling.BICUBIC)
        assert pillow.shape[1:] == canvas.shape[:2]
        furthest = max(furthest, int(abs(pillow.transpose(1, 2, 0).astype(int) - canvas).max()))
    assert furthest <= 2


@pytest.mark.parametrize("budget", [70, 280, 1120])
def test_sizes_are_those_of_transformers(budget: int) -> None:
    """Long ones too, of which a side would be nothing, and those that fill the budget exactly."""
    rng = np.random.default_rng(0)
    sizes = [(48, 48), (1, 1), (7, 9000), (9000, 7), (3360, 48), (480, 336), (10**5, 3), (2, 10**5)]
    sizes += [tuple(each) for each in rng.integers(1, 5000, (300, 2)).tolist()]
    for height, width in sizes:
        wanted = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        rows, columns = fit(height, width, budget, 48)
        assert (48 * rows, 48 * columns) == wanted
        assert rows * columns <= budget


def test_a_request_with_fewer_pixels_takes_the_next_smaller_budget(spec: Gemma4Spec) -> None:
    spec, token = replace(spec, images=replace(spec.images, budget=280)), 48**2
    bounds = spec.pixel_bounds
    assert bounds == PixelBounds(70 * token, 70 * token, 280 * token)
    assert spec.num_tokens(spec.recipe(600, 600, bounds).grid) == 16 * 16
    few = PixelBounds(bounds.least, bounds.min_pixels, 150 * token)
    assert spec.num_tokens(spec.recipe(600, 600, few).grid) == 11 * 11  # of 140
    with pytest.raises(ImageError, match=r"min_pixels is 334080, .* 322560 pixels \(140 tokens\)"):
        spec.recipe(600, 600, PixelBounds(bounds.least, 145 * token, 150 * token))


# ---- the embedder of 12B


@pytest.fixture(scope="module")
def unified(checkpoint: Callable[..., Path]) -> Gemma4Spec:
    found = load_spec(checkpoint(UNIFIED))
    assert isinstance(found, Gemma4Spec)
    return found


def test_an_image_without_a_tower_has_a_patch_for_each_token(unified: Gemma4Spec) -> None:
    recipe = unified.recipe(300, 500, unified.pixel_bounds)
    assert (unified.num_patches(recipe.grid), unified.patch_unit) == (recipe.grid[0] * 3, 1)
    assert unified.encoder_blocks == 1 and unified.tiles is None
    assert recipe.canvas == (recipe.grid[0] * 48, recipe.grid[1] * 48)


def test_every_rank_has_the_whole_embedder(unified: Gemma4Spec) -> None:
    """So that several ranks take images of their own."""
    assert unified.cuts.encoder_obstacles(2) == ("1 image embedder",)
    assert unified.cuts.obstacles(2) == ()


def test_bytes_are_told_apart_in_16_bits(reference: References) -> None:
    """Normalised in float32: the embedding of half floats is as near as its weights are."""
    theirs = reference(UNIFIED)
    half = load_net(load_spec(theirs.folder), theirs.folder, dtype=torch.bfloat16, device=CPU)
    (shown,) = pixels(theirs, 1)
    bright = (shown // 32 + 200).astype(np.uint8)  # steps of one byte, near white
    wanted = theirs.embeddings([bright])[0]
    facts = half.vision.grid_facts(half.spec.images.grid(*bright.shape[:2]))  # type: ignore[attr-defined]
    rows = half.vision.embed(torch.from_numpy(bright), facts)
    pieces = half.vision.blocks(Pack(rows, facts.places, (), half.ops.towers["sdpa"]))
    assert next(pieces) == len(rows)
    with pytest.raises(StopIteration) as end:
        next(pieces)
    found = end.value.value
    assert (found.float() - wanted).norm() / wanted.norm() < 0.02


def test_masks_are_those_that_the_model_makes_before_it_generates(reference: References) -> None:
    """transformers' `forward` lets images see themselves in layers without windows, too, which its
    own masks before a static cache, and the published code, do not.
    """
    theirs = reference(UNIFIED)
    asked = theirs.inputs(prompt(theirs, 1), ())
    ids = torch.tensor([[*asked["input_ids"][0].tolist(), *[theirs.mark] * 4, 9]])
    told = {
        "inputs_embeds": torch.zeros(1, ids.shape[1], 4),
        "attention_mask": torch.ones_like(ids),
        "past_key_values": None,
        "position_ids": None,
    }
    types = (ids == theirs.mark).int()
    own = theirs.model.create_masks_for_generate(
        theirs.model.config, mm_token_type_ids=types, **told
    )
    found = published_masks(
        get_block_sequence_ids_for_mask(types, device=CPU),
        config=theirs.model.config.get_text_config(),
        **told,
    )
    for kind in (FULL, NEAR):
        both = own[kind], found[kind]
        assert both == (None, None) or torch.equal(*both)


HUB_12B: dict[str, Any] = {
    "config.json": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "audio_config": {"model_type": "gemma4_unified_audio"},
        "text_config": {
            "model_type": "gemma4_unified_text",
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
    },
    "processor_config.json": {"image_processor": {"image_seq_length": 280}},
}


def test_the_hubs_files_of_12b_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for name, data in HUB_12B.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, Gemma4Spec)
    assert spec.family == UNIFIED and spec.kv_spec().whole_images
    windows = [layer.window for layer in spec.text.layers]
    assert windows == ([1024] * 5 + [None]) * 8
    assert [layer.kv_heads for layer in spec.text.layers[4:6]] == [8, 1]
    assert (spec.context_length, spec.text.per_layer) == (262144, None)
    assert (spec.vision.hidden, spec.vision.unit, spec.vision.longest) == (3840, 48, 1120)
    assert load_spec(tmp_path, ["max_soft_tokens=1120"]).largest_image.tokens == 1120


UNIFIED_REFUSED: Refusals = {
    "config.json": [
        ({"vision_config": {"model_type": "gemma4_vision"}}, "'gemma4_vision' is not supported"),
        ({"vision_config": {"output_proj_dims": 64}}, "output_proj_dims 64 is not supported"),
        ({"vision_config": {"mm_posemb_size": 8}}, "8 positions are too few for an image with 9"),
        ({"vision_config": {"patch_size": 0}}, "3 patches of 0 pixels are not a valid token"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "'all' is not supported"),
    ],
    "preprocessor_config.json": [
        ({"do_normalize": True}, "only pixels from 0 to 1"),
        ({"patch_size": 8}, "3 patches of 8 pixels, but"),
    ],
}


@pytest.mark.whole
@pytest.mark.parametrize(("file", "fields", "words"), listed(UNIFIED_REFUSED))
def test_what_12b_has_not_is_refused_by_name(
    refused: Refused, file: str, fields: dict[str, Any], words: str
) -> None:
    refused(UNIFIED, file, words, **fields)


# ---- layers


def test_layers_that_share_a_cache_take_no_memory(spec: Gemma4Spec) -> None:
    kept = spec.kv_spec()
    assert [len(layer) for layer in kept.layers] == [2, 2, 2, 2, 0, 0, 0]
    assert [layer[0].shape for layer in kept.layers[:2]] == [(2, 16), (1, 24)]
    assert kept.kv_layers == len(LAYERS) - SHARED
    assert [layer.source for layer in spec.text.layers] == [0, 1, 2, 3, 2, 2, 3]
    both_ways = [shape.both_ways for shape in kept.attention.values()]
    assert both_ways == [kind == NEAR for kind in LAYERS] and kept.whole_images


@pytest.mark.parametrize("zeros", [1, 2, 4])
def test_numbers_of_layers_may_have_zeros_in_front(
    changed: Changed, checkpoint: Callable[..., Path], spec: Gemma4Spec, zeros: int
) -> None:
    """As transformers writes those of ten layers and more."""
    text = json.loads((checkpoint(FAMILY) / "config.json").read_text())["text_config"]
    own = {key.zfill(zeros): fields for key, fields in text["per_layer_config"].items()}
    assert load_spec(changed(FAMILY, "config.json", text_config={"per_layer_config": own})) == spec


def test_random_weights_clamp_nothing(reference: References) -> None:
    """`--load-format dummy`: limits are infinite."""
    theirs = reference(FAMILY)
    net = load_net(
        load_spec(theirs.folder),
        theirs.folder,
        dtype=torch.float32,
        device=CPU,
        load_format="dummy",
    )
    (rows,) = encode(net, [torch.from_numpy(pixels(theirs, 1)[0])])
    assert rows.isfinite().all() and rows.std() > 0


@pytest.mark.more
def test_images_that_see_one_way_are_cut_where_a_chunk_ends(reference: References) -> None:
    """E2B and E4B: chunks of 5 tokens within images of 9."""
    theirs = reference(FAMILY, text=E2B)
    net = load(theirs.folder)
    shown = [theirs.resize(picture(300, 300, seed=3))]
    harness = Harness(net, chunk_tokens=5, page_size=2)
    asked = harness.request("x", prompt(theirs, 1), [harness.image(shown[0], "A")], max_tokens=12)
    (span,) = asked.spans
    assert span.length == TOKENS and not net.spec.kv_spec().whole_images
    wanted = theirs.generate(asked.tokens, shown, max_new_tokens=12)
    for _ in range(2):
        assert harness.run([asked])["x"].tokens == wanted
    assert len(harness.encoded) == 1


@pytest.mark.slow
def test_experts_beside_mlps_answer_as_transformers_in_ranks_too(
    checkpoint: Callable[..., Path],
) -> None:
    """Cut by their width, or whole on one of two ranks."""
    model = answers.load(checkpoint(FAMILY, text=EXPERTS), ASKED)
    for runs in (1, 2):
        check_rank_group(
            model, ThreadRankGroup(model.reference.folder, 2, "data", expert_runs=runs)
        )


# ---- files


HUB: dict[str, Any] = {
    "config.json": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": {"model_type": "gemma4_audio"},
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_key_value_heads": 1,
            "use_double_wide_mlp": True,
            "layer_types": [FULL if at % 5 == 4 else NEAR for at in range(35)],
        },
        "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
    },
    "processor_config.json": {"image_processor": {"image_seq_length": 280}},
}
"""Of a small model, of which only sizes are told; it hears, and here does not."""


def test_the_hubs_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for name, data in HUB.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, Gemma4Spec)
    for at, layer in enumerate(spec.text.layers):
        assert (layer.source != at) == (at >= 15)
        assert layer.intermediate == 6144 * (2 if at >= 15 else 1)
        assert layer.window == (None if at % 5 == 4 else 512)
    assert {layer.source for layer in spec.text.layers[15:]} == {13, 14}
    assert (spec.text.near.share, spec.text.cap, spec.text.tied) == (1.0, None, True)
    assert spec.text.per_layer is not None
    assert spec.images.budget == 280 and spec.largest_image.tokens == 280
    assert spec.placeholder == Placeholder((258880,), None, (255999,), (258882,))
    assert spec.eos_token_ids == (1, 106)
    assert not spec.kv_spec().whole_images


def test_a_budget_is_an_option(changed: Changed, checkpoint: Callable[..., Path]) -> None:
    wide = changed(FAMILY, "config.json", vision_config={"position_embedding_size": 1000})
    assert load_spec(wide, ["max_soft_tokens=140"]).largest_image.tokens == 140
    for option in ("max_soft_tokens=141", "max_soft_tokens=560", "patch_embed=folded"):
        with pytest.raises(ConfigError, match=r"has max_soft_tokens, which is 70 or 140 or 280$"):
            load_spec(wide, [option])
    with pytest.raises(ConfigError, match="gemma4 has no options"):
        load_spec(checkpoint(FAMILY), ["max_soft_tokens=70"])


YARN = {FULL: {"rope_type": "yarn"}}
REFUSED: Refusals = {
    "config.json": [
        (
            {"text_config": EXPERTS | {"top_k_experts": 9}},
            r"top_k_experts must be from 1 to 8 \(num_experts\), not 9",
        ),
        (
            {"text_config": {"use_bidirectional_attention": "all"}},
            "use_bidirectional_attention 'all' is not supported",
        ),
        ({"text_config": {"layer_types": ["x"] * 7}}, "must name 7 layers"),
        ({"text_config": {"layer_types": [[]] * 7}}, "layer_types"),
        (
            {"text_config": {"num_kv_shared_layers": 6}},
            "leaves no layer of type full_attention with its own cache",
        ),
        (
            {"text_config": {"per_layer_config": {"1": {"sliding_window": 3}}}},
            "sliding_window is not supported per layer",
        ),
        (
            {"text_config": {"per_layer_config": {"1": {"head_dim": 32}}}},
            "layers of one type have different head_dim",
        ),
        ({"text_config": {"rope_parameters": YARN}}, "rope type 'yarn' is not supported"),
        (
            {"text_config": {"per_layer_config": {"full": {"head_dim": 32}}}},
            "'full' is not a layer index",
        ),
        ({"image_token_id": 600}, "600 is not in the vocabulary of 600"),
        ({"text_config": {"pad_token_id": 600}}, "pad_token_id 600 is not in"),
        ({"vision_config": {"model_type": "clip"}}, "'clip' is not supported"),
        ({"vision_config": {"num_key_value_heads": 2}}, "4 heads of 12 values with"),
        ({"vision_config": {"position_embedding_size": 20}}, "20 positions are too"),
    ],
    "preprocessor_config.json": [
        ({"do_normalize": True}, "only pixels from 0 to 1"),
        ({"pooling_kernel_size": 2}, "2 patches of 16 pixels, but"),
        ({"max_soft_tokens": 5000}, "must be from 1 to 1120"),
    ],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
