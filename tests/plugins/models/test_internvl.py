"""InternVL: the grid of tiles is transformers', and ranks share the larger tower. Qianfan-OCR, its
sibling: a text of templates shows an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from saccade.families.registry import load_spec
from saccade.parallel import Shard
from saccade.plugins.models.internvl.images import TileRules, tile_grid
from saccade.plugins.models.internvl.net import InternVLModel
from saccade.plugins.models.internvl.spec import InternVLSpec
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.text.prompt.special_tokens import Literals
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from tests.families.conftest import Refusals, Refused, listed, refusals_by_name
from tests.families.forwarding import CPU, encode, images_of
from tests.fixtures.families.internvl import LARGER, MAX_TILES, SIDE
from tests.fixtures.rank_group import shards, together
from tests.fixtures.tiny import Reference, picture
from tests.media.pictures import noise

FAMILY, QIANFAN = "internvl", "qianfan_ocr"
References = Callable[..., Reference]


@pytest.fixture(scope="module")
def spec(checkpoint: Callable[..., Path]) -> InternVLSpec:
    found = load_spec(checkpoint(FAMILY))
    assert isinstance(found, InternVLSpec)
    return found


@settings(deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([(1, 12), (1, 6), (1, 1), (3, 7), (12, 12)]),
    st.sampled_from([448, 56]),
)
def test_tiles_are_the_references(
    height: int, width: int, bounds: tuple[int, int], side: int
) -> None:
    half = (0.5, 0.5, 0.5)
    rules = TileRules(side, *bounds, (half, half), "bicubic", tokens=4, patch_unit=17)
    columns, rows = get_optimal_tiled_canvas((height, width), (side, side), *bounds)
    assert tile_grid(height, width, rules) == (rows, columns)


def test_a_request_may_ask_for_fewer_tiles(spec: InternVLSpec) -> None:
    bounds = spec.pixel_bounds
    assert (bounds.least, bounds.max_pixels) == (SIDE**2, MAX_TILES * SIDE**2)
    assert spec.recipe(500, 1000, bounds).grid == (3,)
    fewer = replace(bounds, max_pixels=2 * SIDE**2 - 1)
    assert spec.recipe(500, 1000, fewer).grid == (1,), "alone, a tile is its own thumbnail"
    names = [spec.settings(spec.recipe(500, 1000, each)) for each in (fewer, bounds)]
    assert len(set(names)) == 2
    more = replace(bounds, min_pixels=5 * SIDE**2)
    assert spec.recipe(SIDE, SIDE, more).grid == (7,)
    largest = spec.largest_image
    assert (largest.pixels, largest.tokens) == (7 * SIDE**2, 7 * 4)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_larger_tower(checkpoint: Callable[..., Path], size: int) -> None:
    """Its norms of queries and keys are over the heads of all ranks."""
    folder = checkpoint(FAMILY, vision=LARGER)
    canvas = torch.from_numpy(noise(3 * SIDE, SIDE))

    def run(shard: Shard) -> torch.Tensor:
        spec = load_spec(folder)
        net = load_net(spec, folder, dtype=torch.float32, device=CPU, shard=shard)
        return encode(net, [canvas])[0]

    whole = run(Shard(0, 1))
    for mine in together(run, shards(size)):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=0)


REFUSED: Refusals = {
    "config.json": [
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1"),
        ({"image_seq_length": 256}, "image_seq_length is 256, but a tile of 56"),
        ({"text_config": {"model_type": "llama"}}, "'llama' is not supported"),
        *(({"downsample_ratio": value}, "downsample_ratio") for value in (0, -1, 2, 1e-320)),
    ],
    "preprocessor_config.json": [
        ({"size": {"height": 448}}, "height is 448, but .* requires 56"),
        ({"resample": 1}, "resample 1 is not supported"),
        ({"max_patches": 10**9}, "max_patches"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
    ],
    "tokenizer_config.json": [({"extra_special_tokens": {"end_image_token": "<x>"}}, "'<x>'")],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)


# ---- Qianfan-OCR


class QianfanProcessor(transformers.QianfanOCRProcessor):
    """transformers' own, with an image processor that needs no torchvision."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


def qianfan_processor(theirs: Reference) -> QianfanProcessor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs.folder)
    return QianfanProcessor(theirs.processor, tokenizer, image_seq_length=4)


def test_a_text_of_templates_that_is_no_token_shows_an_image(reference: References) -> None:
    """As transformers' own processor reads it. In a client's text it is text."""
    theirs = reference(QIANFAN)
    spec, tokenizer = load_spec(theirs.folder), TextTokenizer.load(theirs.folder)
    assert tokenizer.backend.token_to_id("<image>") is None
    template = ChatTemplate.load(theirs.folder, tokenizer, None, spec.templates)
    image, ask = {"type": "image"}, {"type": "text", "text": "what?"}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [image, ask, image]},
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": [image, {"type": "text", "text": "and here?"}]},
    ]
    shown = [picture(90, 130 + 80 * at, seed=at) for at in range(3)]
    made = qianfan_processor(theirs)
    text = made.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.count("<image>") == 3
    wanted = made(images=[PIL.Image.fromarray(each) for each in shown], text=[text])
    literals = Literals(tokenizer)
    tokens = literals.encode(literals.render(template, chat))
    images = images_of(spec, theirs.shown(shown))
    assert list(spec.expand_prompt(tokens, images)[0]) == wanted["input_ids"][0]
    ask["text"] = "what is <image> and <IMG_CONTEXT>?"
    written = literals.encode(literals.render(template, chat))
    assert written.count(theirs.mark) == 3
    assert ask["text"] in tokenizer.decode(written)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("file", "fields", "words"),
    listed(
        {
            "config.json": [
                ({"image_token_id": 7}, r"image_token_id is 7, but <IMG_CONTEXT> \(context_image"),
                ({"vision_config": {"attention_bias": False}}, "attention_bias false is not"),
                ({"model_type": "internvl_chat"}, "'internvl_chat' is not supported"),
            ]
        }
    ),
)
def test_what_qianfan_has_not_is_refused_by_name(
    refused: Refused, file: str, fields: dict[str, Any], words: str
) -> None:
    refused(QIANFAN, file, words, **fields)


def test_names_of_the_hubs_files_are_those_of_layers() -> None:
    for stored, canonical in {
        "vision_model.encoder.layers.3.attn.qkv.bias": "encoder.layer.3.attention.qkv.bias",
        "vision_model.encoder.layers.3.ls2": "encoder.layer.3.lambda_2",
        "vision_model.encoder.layers.3.norm1.weight": "encoder.layer.3.layernorm_before.weight",
        "vision_model.embeddings.class_embedding": "embeddings.cls_token",
        "model.vision_tower.layers.3.lambda_1": "encoder.layer.3.lambda_1",
    }.items():
        assert InternVLModel.canonical_name(stored) == f"vision_tower.{canonical}"
    assert InternVLModel.canonical_name("mlp1.3.bias") == "multi_modal_projector.linear_2.bias"
