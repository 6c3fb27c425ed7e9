"""Gemma 3's configuration, typed: what `config.json` and the files of image processor and tokenizer
say, for transformers' Gemma3ForConditionalGeneration and the text-only Gemma3ForCausalLM.

Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.core.recipe import ImageRecipe, Resample
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.config_readers import (
    HALF,
    SiglipDefaults,
    read_colours,
    read_heads,
    read_layer_types,
    read_resample,
    read_siglip,
    text_section,
)
from saccade.nn.siglip_config import Colours, SiglipConfig
from saccade.nn.text_config import RopeConfig, TextConfig

SIGLIP = SiglipDefaults(hidden=768, heads=12, side=224, patch=16)
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
LayerType = Literal["full_attention", "sliding_attention"]
BOI = "<start_of_image>"


@dataclass(frozen=True, slots=True)
class GemmaText:
    """The language model. `shape.rope` is of layers that see all tokens, `local_rope` of those with
    windows. windows: by layer, as `AttentionShape`'s. query_scalar: scores are divided by its
    root.
    """

    shape: TextConfig
    local_rope: RopeConfig
    windows: tuple[int | None, ...]
    query_scalar: float
    activation: str


@dataclass(frozen=True, slots=True)
class SquareRules:
    """The pixels of an image, and its tokens: `begin`, `content` for each row of its embedding,
    `end`. mark: the text of `begin`, which stands for an image in templates.
    """

    colours: Colours
    resample: Resample
    begin: int
    content: int
    end: int
    mark: str

    def fingerprint(self, family: str, recipe: ImageRecipe) -> bytes:
        """16 bytes that differ whenever the pixels handed to the encoder may differ."""
        named = repr((family, self.colours, recipe)).encode()
        return hashlib.blake2b(named, digest_size=16).digest()


NO_TOWER = SiglipConfig(0, 0, 0, 0, "gelu_pytorch_tanh", 1e-6, 0, 1, 1, 0)
NO_TOKEN = -1
"""Stands for no image: to a model without a tower, every token is text."""
NO_IMAGES = SquareRules((HALF, HALF), "bilinear", NO_TOKEN, NO_TOKEN, NO_TOKEN, BOI)


def parse_config(checkpoint: Checkpoint) -> tuple[SiglipConfig, GemmaText, SquareRules]:
    """Raises CheckpointError naming file and field."""
    config = checkpoint.config
    text = _text(config, text_section(config))
    if not config.has("vision_config"):
        return NO_TOWER, text, NO_IMAGES
    vision = _vision(config, config.section("vision_config"), text.shape.hidden)
    return vision, text, _images(checkpoint, vision, text.shape.vocab_size)


def _vision(config: Section, vision: Section, out: int) -> SiglipConfig:
    kind = vision.text("model_type", default="siglip_vision_model")
    if kind != "siglip_vision_model":
        raise CheckpointError(f"{vision.where}: model_type {kind!r} is not supported")
    tokens = config.integer("mm_tokens_per_image", default=256)
    side = vision.integer("image_size", default=SIGLIP.side)
    across = side // max(1, vision.integer("patch_size", default=SIGLIP.patch))
    edge = math.isqrt(max(0, tokens))
    if edge < 1 or edge**2 != tokens or across % edge:
        raise CheckpointError(
            f"{config.where}: mm_tokens_per_image {tokens} is no square that divides "
            f"{across} x {across} patches"
        )
    return read_siglip(vision, across // edge, out, SIGLIP)


def _text(config: Section, text: Section) -> GemmaText:
    for name in ("attention_bias", "use_bidirectional_attention"):
        if text.flag(name, default=False):
            raise CheckpointError(f"{text.where}: {name} is not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if text.has(name):
            raise CheckpointError(
                f"{text.where}: {name} {text.data[name]!r} is not supported (Gemma 3 has none)"
            )
    heads, kv_heads = _heads(text)
    head_dim = text.count("head_dim", default=256)
    layers = text.layers("num_hidden_layers", default=26)
    types = _layer_types(text, layers)
    window = text.count("sliding_window", default=4096)
    shape = TextConfig(
        vocab_size=text.count("vocab_size", default=262208),
        hidden=text.count("hidden_size", default=2304),
        intermediate=text.integer("intermediate_size", default=9216),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps", default=1e-6),
        rope=_rope(text, "full_attention", head_dim),
        context_length=text.count("max_position_embeddings", default=131072),
        qkv_bias=False,
        qk_norm=True,
        tied=config.flag("tie_word_embeddings", default=True),
    )
    return GemmaText(
        shape,
        _rope(text, "sliding_attention", head_dim),
        tuple(window if each == "sliding_attention" else None for each in types),
        text.positive("query_pre_attn_scalar", default=256.0),
        text.text("hidden_activation", default="gelu_pytorch_tanh"),
    )


def _heads(text: Section) -> tuple[int, int]:
    absent = {"num_attention_heads": 8, "num_key_value_heads": 4}
    given = {name: value for name, value in text.data.items() if value is not None}
    return read_heads(Section(text.where, {**absent, **given}))


def _layer_types(text: Section, layers: int) -> tuple[str, ...]:
    """The kind of each layer: as listed, else every sixth sees all."""
    every = text.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = ("full_attention", "sliding_attention")
    return read_layer_types(text, layers, THETAS) or tuple(
        kinds[bool((at + 1) % max(1, every))] for at in range(layers)
    )


def _rope(text: Section, kind: LayerType, head_dim: int) -> RopeConfig:
    """Of one kind of layer, by either age's fields."""
    full = kind == "full_attention"
    rope = text.section("rope_parameters").section(kind)
    if not rope.data and full:
        rope = text.section("rope_scaling")
    name = "rope_theta" if full else "rope_local_base_freq"
    theta = rope.positive("rope_theta", default=text.positive(name, default=THETAS[kind]))
    scaling = rope.text("rope_type", "type", default="default")
    if scaling not in ("default", "linear"):
        raise CheckpointError(
            f"{rope.where}: rope type {scaling!r} is not supported (default and linear are)"
        )
    factor = rope.number("factor") if scaling == "linear" else 1.0
    if factor <= 0:
        raise CheckpointError(f"{rope.where}: factor must be above 0, not {factor}")
    return RopeConfig(theta, (head_dim // 2,), interleaved=False, factor=factor)


def _images(checkpoint: Checkpoint, vision: SiglipConfig, vocab: int) -> SquareRules:
    processor, config = checkpoint.processor, checkpoint.config
    if processor.flag("do_pan_and_scan", default=False):
        raise CheckpointError(
            f"{processor.where}: do_pan_and_scan true is not supported: an image would be several "
            "in the prompt; set it to false, as Google's checkpoints have it"
        )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not processor.flag(name, default=True):
            raise CheckpointError(f"{processor.where}: {name} false is not supported")
    size = processor.section("size")
    found = size.integer("height", default=224), size.integer("width", default=224)
    if found != (vision.side, vision.side):
        raise CheckpointError(
            f"{size.where}: {found[0]} x {found[1]}, but the vision tower was made for "
            f"{vision.side} x {vision.side}"
        )
    length = processor.integer("image_seq_length", default=vision.tokens)
    if length != vision.tokens:
        raise CheckpointError(
            f"{processor.where}: image_seq_length is {length}, but the vision tower makes "
            f"{vision.tokens} tokens of an image"
        )
    begin = config.integer("boi_token_index", "boi_token_id", default=255999)
    content = config.integer("image_token_index", "image_token_id", default=262144)
    end = config.integer("eoi_token_index", "eoi_token_id", default=256000)
    for token in (begin, content, end):
        if not 0 <= token < vocab:
            raise CheckpointError(
                f"{config.where}: image token {token} is beyond the vocabulary of {vocab} tokens"
            )
    colours = read_colours(processor, HALF, HALF)
    resample, mark = read_resample(processor, 2), _written(checkpoint, begin)
    return SquareRules(colours, resample, begin, content, end, mark)


def _written(checkpoint: Checkpoint, token: int) -> str:
    """The text of an added token."""
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    added = settings.section("added_tokens_decoder").section(str(token))
    return added.text("content", default=settings.text("boi_token", default=BOI))
