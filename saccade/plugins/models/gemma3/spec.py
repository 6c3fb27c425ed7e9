"""Gemma 3's `FamilySpec`: sizes, prompts, windows.

An image's tokens attend to each other in both directions. Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.core.family import Cuts, KVSpec, Templates, heads_cache
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.kit.base_spec import (
    BLIND,
    NO_TEMPLATES,
    BaseSpec,
    Placeholder,
    ShapedText,
    plain_cuts,
)
from saccade.families.kit.config_readers import (
    SiglipDefaults,
    read_layer_types,
    read_siglip,
    read_text_config,
    read_token,
    refuse_flags,
    require_kind,
    text_section,
)
from saccade.nn.shapes import RopeConfig, SiglipConfig
from saccade.plugins.models.gemma3.images import NO_IMAGES, SquareRules, read_images

SIGLIP = SiglipDefaults(hidden=768, heads=12, side=224, patch=16)
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
ABSENT = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""The values that transformers uses for fields that config.json does not have."""
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class GemmaText(ShapedText):
    """The language model's sizes and options.

    `shape.rope` is for layers with full attention, `local_rope` for layers with a window.
    """

    local_rope: RopeConfig
    windows: tuple[int | None, ...]  # by layer, as in `AttentionShape`
    query_scalar: float  # scores are divided by its square root
    activation: str


NO_TOWER = SiglipConfig(0, 0, 0, 0, "gelu_pytorch_tanh", 1e-6, 0, 1, 1, 0)


def read_vision(config: Section, out: int) -> SiglipConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    if not config.has("vision_config"):
        return NO_TOWER
    vision = config.section("vision_config")
    require_kind(vision, "siglip_vision_model")
    tokens = config.integer("mm_tokens_per_image", default=256)
    side = vision.integer("image_size", default=SIGLIP.side)
    across = side // max(1, vision.integer("patch_size", default=SIGLIP.patch))
    edge = math.isqrt(max(0, tokens))
    if edge < 1 or edge**2 != tokens or across % edge:
        raise CheckpointError(
            f"{config.where}: mm_tokens_per_image {tokens} must be the square of a number that "
            f"divides {across} (patches along an edge)"
        )
    return read_siglip(vision, across // edge, out, SIGLIP)


def read_text(config: Section, text: Section) -> GemmaText:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    refuse_flags(text, "attention_bias", "use_bidirectional_attention")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if text.has(name):
            raise CheckpointError(
                f"{text.where}: {name} {text.data[name]!r} is not supported (Gemma 3 has none)"
            )
    text = text.filled(ABSENT)
    head_dim = text.count("head_dim")
    shape = read_text_config(
        text,
        _rope(text, "full_attention", head_dim),
        head_dim,
        tied=config.flag("tie_word_embeddings", default=True),
        qk_norm=True,
    )
    types, window = _layer_types(text, shape.layers), text.count("sliding_window")
    return GemmaText(
        shape,
        _rope(text, "sliding_attention", head_dim),
        tuple(window if each == "sliding_attention" else None for each in types),
        text.positive("query_pre_attn_scalar"),
        text.text("hidden_activation"),
    )


def _layer_types(text: Section, layers: int) -> tuple[str, ...]:
    """Return each layer's attention type. By default, every sixth layer has full attention."""
    every = text.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = ("full_attention", "sliding_attention")
    return read_layer_types(text, layers, THETAS) or tuple(
        kinds[bool((at + 1) % max(1, every))] for at in range(layers)
    )


def _rope(text: Section, kind: LayerType, head_dim: int) -> RopeConfig:
    full = kind == "full_attention"
    rope = text.section("rope_parameters").section(kind)
    if full:
        older = text.section("rope_scaling")
        rope = rope.changed(older.data) if rope.data else older
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


BOI = "<start_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(BaseSpec):
    """Gemma 3's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: SiglipConfig
    text: GemmaText
    images: SquareRules

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        shape = self.text.shape
        sizes = shape.kv_heads, shape.head_dim, ranks
        return KVSpec(
            tuple(
                heads_cache(*sizes, window=window, both_ways=self.sees_images)
                for window in self.text.windows
            )
        )

    @property
    def cuts(self) -> Cuts:
        return plain_cuts(self.text.shape, self.vision)


def gemma3_spec(checkpoint: Checkpoint) -> Gemma3Spec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    images, placeholder, templates = NO_IMAGES, BLIND, NO_TEMPLATES
    if vision.depth:
        images = read_images(checkpoint.processor, vision)
        placeholder = _placeholder(checkpoint, text.vocab_size)
        # The blank lines around an image are plain text, which is tokenized with its context.
        mark = _written(checkpoint, *placeholder.marks)
        templates = Templates(shown=(mark, f"\n\n{mark}\n\n"))
    return Gemma3Spec(
        family="gemma3" if vision.depth else "gemma3_text",
        vision=vision,
        text=text,
        images=images,
        placeholder=placeholder,
        templates=templates,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _placeholder(checkpoint: Checkpoint, vocab: int) -> Placeholder:
    """Return the placeholder that image tokens replace. Chat templates mark an image with its first
    token.
    """
    config = checkpoint.config
    begin = read_token(config, vocab, "boi_token_index", "boi_token_id", default=255999)
    row = read_token(config, vocab, "image_token_index", "image_token_id", default=262144)
    end = read_token(config, vocab, "eoi_token_index", "eoi_token_id", default=256000)
    return Placeholder((begin,), row, (begin,), (end,))


def _written(checkpoint: Checkpoint, token: int) -> str:
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    added = settings.section("added_tokens_decoder").section(str(token))
    return added.text("content", default=settings.text("boi_token", default=BOI))
