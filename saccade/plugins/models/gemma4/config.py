"""Reads the sizes of Gemma 4's language model and vision encoder from `config.json`.

Supports transformers' Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration, which
has an embedder instead of a vision encoder, and the text-only variants of both. Does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.family import Divisible
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import read_axial, refuse_flags, require_kind
from saccade.nn.shapes import ExpertsConfig
from saccade.plugins.models.gemma4.layers import LayerShape, Rope, read_layers, read_ropes

KINDS = ("gemma4", "gemma4_unified")
ABSENT: dict[str, dict[str, object]] = {
    "gemma4": {},
    "gemma4_unified": {
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "use_bidirectional_attention": "vision",
    },
}
"""For each model type, the defaults of missing fields in which transformers' classes differ."""


@dataclass(frozen=True, slots=True)
class PerLayer:
    """A second token embedding, with `width` values per layer for tokens below `vocab_size`."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Silent:
    """IDs of placeholder tokens. They are embedded like the `padding` token because image
    embeddings replace theirs.
    """

    tokens: tuple[int, ...]
    padding: int


@dataclass(frozen=True, slots=True)
class Gemma4Text:
    """The language model's sizes and options."""

    # sizes
    vocab_size: int
    hidden: int
    heads: int
    layers: tuple[LayerShape, ...]
    # positions and masks
    near: Rope  # the rotary embedding of layers with windows
    far: Rope  # that of layers with full attention
    both_ways: bool  # in layers with windows, an image's tokens attend in both directions
    context_length: int
    # values
    rms_eps: float
    activation: str
    tied: bool
    cap: float | None  # a soft cap on logits, or None
    # tokens' embeddings
    per_layer: PerLayer | None
    silent: Silent
    experts: ExpertsConfig | None  # in addition to the MLPs, in all layers or none


@dataclass(frozen=True, slots=True)
class TowerHeads:
    """The sizes of the vision encoder's attention heads.

    theta: the base of the rotary embedding on both axes.
    """

    count: int
    dim: int
    theta: float


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """The sizes of the vision encoder.

    merge x merge adjacent patches become one token of `out` values.
    """

    depth: int
    hidden: int
    heads: TowerHeads
    intermediate: int
    activation: str
    norm_eps: float
    patch: int
    merge: int
    places: int  # learned positions per axis
    clipped: bool  # the inputs and outputs of matrices are clamped
    standardised: bool  # tokens are standardised by a learned mean and deviation
    out: int

    @property
    def unit(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * self.merge

    @property
    def pooled(self) -> int:
        """The edge, in patches, of the square that becomes one token, as the image processor counts
        them.
        """
        return self.merge

    @property
    def longest(self) -> int:
        """The maximum number of tokens along an edge, as limited by the learned positions."""
        return self.places // self.merge

    @property
    def cuts(self) -> Divisible:
        return (
            (self.heads.count, "vision attention heads"),
            (self.intermediate, "vision MLP values"),
        )


@dataclass(frozen=True, slots=True)
class EmbedderConfig:
    """The sizes of the embedder that replaces a vision encoder and projects pixels directly to
    embeddings.
    """

    hidden: int
    # the edge of a patch in pixels and of a token in patches, as the image processor counts them
    patch: int
    pooled: int
    places: int  # learned positions per axis
    norm_eps: float
    out: int

    depth = 1  # its projection counts as one block
    merge = 1

    @property
    def unit(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * self.pooled

    @property
    def longest(self) -> int:
        return self.places

    @property
    def cuts(self) -> Divisible:
        """The divisor 1: the embedder is replicated on every rank, so any number of ranks
        is valid.
        """
        return ((1, "image embedder"),)


NO_TOWER = TowerConfig(
    0, 0, TowerHeads(0, 0, 1.0), 0, "gelu_pytorch_tanh", 1e-6, 0, 1, 0, False, False, 0
)


def read_kind(config: Section) -> str:
    """Return the model type, one of `KINDS`. A text-only checkpoint has one of them, too."""
    kind = config.text("model_type", default=KINDS[0]).removesuffix("_text")
    return kind if kind in KINDS else KINDS[0]


def read_text(config: Section, text: Section) -> Gemma4Text:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    # A null is explicit, and not a default: attention within images is causal then.
    text = text.changed({**ABSENT[read_kind(config)], **text.data})
    refuse_flags(text, "attention_bias")
    sight = text.text("use_bidirectional_attention", default="")
    if sight not in ("", "vision"):
        raise CheckpointError(
            f"{text.where}: use_bidirectional_attention {sight!r} is not supported (null and "
            "'vision' are)"
        )
    heads = text.count("num_attention_heads", default=8)
    layers = read_layers(text, heads)
    near, far = read_ropes(text)
    vocab = text.count("vocab_size", default=262144)
    cap = text.positive("final_logit_softcapping") if text.has("final_logit_softcapping") else None
    sees = config.has("vision_config")
    return Gemma4Text(
        vocab_size=vocab,
        hidden=text.count("hidden_size", default=2304),
        heads=heads,
        layers=layers,
        near=near,
        far=far,
        both_ways=sees and sight == "vision",
        rms_eps=text.number("rms_norm_eps", default=1e-6),
        activation=text.text("hidden_activation", default="gelu_pytorch_tanh"),
        context_length=text.count("max_position_embeddings", default=131072),
        tied=config.flag("tie_word_embeddings", default=True),
        cap=cap,
        per_layer=_per_layer(text, vocab),
        silent=_silent(config, text, vocab),
        experts=_experts(text, len(layers)) if text.flag("enable_moe_block") else None,
    )


def _per_layer(text: Section, vocab: int) -> PerLayer | None:
    width = text.get("hidden_size_per_layer_input", 256)
    if not width:
        return None
    found = PerLayer(
        text.integer("hidden_size_per_layer_input", default=256),
        text.integer("vocab_size_per_layer_input", default=262144),
    )
    if found.vocab_size < vocab:
        raise CheckpointError(
            f"{text.where}: vocab_size_per_layer_input {found.vocab_size} is less than vocab_size "
            f"{vocab}"
        )
    return found


def _experts(text: Section, layers: int) -> ExpertsConfig:
    count, top = text.integer("num_experts"), text.integer("top_k_experts")
    if not 1 <= top <= count:
        raise CheckpointError(
            f"{text.where}: top_k_experts must be from 1 to {count} (num_experts), not {top}"
        )
    width = text.integer("moe_intermediate_size")
    return ExpertsConfig(frozenset(range(layers)), count, top, width)


def _silent(config: Section, text: Section, vocab: int) -> Silent:
    padding = text.integer("pad_token_id", default=0)
    if not 0 <= padding < vocab:
        raise CheckpointError(
            f"{text.where}: pad_token_id {padding} is not in the vocabulary of {vocab} tokens"
        )
    if not config.has("text_config"):
        return Silent((), padding)
    tokens = (
        config.integer("image_token_id", default=258880),
        config.integer("video_token_id", default=258884),
        config.integer("audio_token_id", default=258881),
    )
    return Silent(tokens, padding)


def read_vision(config: Section, out: int) -> TowerConfig | EmbedderConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    if not config.has("vision_config"):
        return NO_TOWER
    vision, kind = config.section("vision_config"), read_kind(config)
    require_kind(vision, f"{kind}_vision")
    patch, merge = (
        vision.integer(name, default=default)
        for name, default in (("patch_size", 16), ("pooling_kernel_size", 3))
    )
    if min(patch, merge) < 1:
        raise CheckpointError(
            f"{vision.where}: {merge} patches of {patch} pixels are not a valid token"
        )
    read = _read_tower if kind == KINDS[0] else _read_embedder
    return read(vision, patch, merge, out)


def _read_embedder(vision: Section, patch: int, pooled: int, out: int) -> EmbedderConfig:
    hidden = vision.count("mm_embed_dim", default=3840)
    if (projected := vision.count("output_proj_dims", default=3840)) != hidden:
        raise CheckpointError(
            f"{vision.where}: output_proj_dims {projected} is not supported; it must be {hidden} "
            "(mm_embed_dim)"
        )
    return EmbedderConfig(
        hidden=hidden,
        patch=patch,
        pooled=pooled,
        places=vision.integer("mm_posemb_size", default=1120),
        norm_eps=vision.number("rms_norm_eps", default=1e-6),
        out=out,
    )


def _read_tower(vision: Section, patch: int, merge: int, out: int) -> TowerConfig:
    refuse_flags(vision, "attention_bias")
    hidden = vision.count("hidden_size", default=768)
    heads = vision.count("num_attention_heads", default=12)
    kv_heads = vision.count("num_key_value_heads", default=12)
    dim = vision.count("head_dim", default=64)
    if kv_heads != heads or dim % 4:
        raise CheckpointError(
            f"{vision.where}: {heads} heads of {dim} values with {kv_heads} key heads are not "
            "supported (supported: as many key heads as query heads, with a multiple of 4 values)"
        )
    rope = read_axial(vision)
    return TowerConfig(
        depth=vision.layers("num_hidden_layers", default=16),
        hidden=hidden,
        heads=TowerHeads(heads, dim, rope.positive("rope_theta", default=100.0)),
        intermediate=vision.integer("intermediate_size", default=3072),
        activation=vision.text("hidden_activation", default="gelu_pytorch_tanh"),
        norm_eps=vision.number("rms_norm_eps", default=1e-6),
        patch=patch,
        merge=merge,
        places=vision.integer("position_embedding_size", default=10240),
        clipped=vision.flag("use_clipped_linears"),
        standardised=vision.flag("standardize"),
        out=out,
    )
