"""Functions that read and check fields of config.json and of image processors' files that families
share.

All functions raise CheckpointError with the file and the field. Runs without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError
from saccade.core.recipe import Resample
from saccade.families.checkpoint import Section
from saccade.nn.shapes import (
    ExpertsConfig,
    RopeConfig,
    SiglipConfig,
    TextConfig,
    Yarn,
    yarn_scale,
)

Colour = tuple[float, float, float]
"""Values for red, green and blue, from 0 to 1."""
HALF: Colour = (0.5, 0.5, 0.5)
RESAMPLES: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Resize filters by Pillow's numbers."""
FIRST_LANCZOS = (2, 12)
"""The first release of PyTorch that supports Lanczos."""
EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""The names of the number of experts. The second one is used since transformers 5."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises CheckpointError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def text_section(config: Section) -> Section:
    """Return the section with the language model's fields, which may be the top level."""
    return config.section("text_config") if config.has("text_config") else config


def refuse_unsupported(text: Section, *flags: str) -> None:
    """Raise CheckpointError if one of `flags` is true, or the activation is not silu."""
    refuse_flags(text, *flags)
    if (activation := text.text("hidden_act", default="silu")) != "silu":
        raise CheckpointError(f"{text.where}: hidden_act {activation!r} is not supported")


def refuse_flags(section: Section, *flags: str) -> None:
    """Raise CheckpointError if one of `flags` is true."""
    for name in flags:
        if section.flag(name):
            raise CheckpointError(f"{section.where}: {name} is not supported")


def require_flags(section: Section, *flags: str) -> None:
    """Raise CheckpointError if one of `flags` is false."""
    for name in flags:
        if not section.flag(name, default=True):
            raise CheckpointError(f"{section.where}: {name} false is not supported")


def require_kind(section: Section, kind: str) -> None:
    """Raise CheckpointError if the section has a `model_type` other than `kind`."""
    if (found := section.text("model_type", default=kind)) != kind:
        raise CheckpointError(f"{section.where}: model_type {found!r} is not supported")


def read_token(config: Section, vocab: int, *names: str, default: int) -> int:
    """Return the id of an image placeholder token.

    Raises CheckpointError if it is not in the vocabulary.
    """
    token = config.integer(*names, default=default)
    if not 0 <= token < vocab:
        raise CheckpointError(
            f"{config.where}: image token {token} is not in the vocabulary of {vocab} tokens"
        )
    return token


def read_heads(text: Section) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads. Raises CheckpointError."""
    heads = text.count("num_attention_heads")
    kv_heads = text.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{text.where}: {heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    return heads, kv_heads


def read_text_config(
    text: Section,
    rope: RopeConfig,
    head_dim: int,
    *,
    tied: bool,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: ExpertsConfig | None = None,
) -> TextConfig:
    """Read the sizes of a language model with standard field names.

    Raises CheckpointError if a field is missing or has the wrong type.
    """
    heads, kv_heads = read_heads(text)
    return TextConfig(
        vocab_size=text.count("vocab_size"),
        hidden=text.count("hidden_size"),
        intermediate=text.integer("intermediate_size"),
        layers=text.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps"),
        rope=rope,
        context_length=text.count("max_position_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied=tied,
        experts=experts,
    )


def read_head_dim(text: Section) -> int:
    """Return `head_dim`, or `hidden_size` divided by the number of heads if it is missing.

    Raises CheckpointError.
    """
    hidden, (heads, _) = text.count("hidden_size"), read_heads(text)
    return text.count("head_dim", default=hidden // heads)


def read_colours(processor: Section, mean: Colour, std: Colour) -> tuple[Colour, Colour]:
    """Return `image_mean` and `image_std`. The defaults are `mean` and `std`.

    Raises CheckpointError.
    """
    means = processor.numbers("image_mean", default=mean)
    stds = processor.numbers("image_std", default=std)
    if len(means) != 3 or len(stds) != 3:
        raise CheckpointError(
            f"{processor.where}: image_mean and image_std must have three values each"
        )
    if min(stds) <= 0:
        raise CheckpointError(f"{processor.where}: image_std must be above 0, not {stds}")
    return (means[0], means[1], means[2]), (stds[0], stds[1], stds[2])


def experts_config(text: Section) -> ExpertsConfig:
    """Read the sizes of the experts, and which layers have them.

    The layers follow the rule of transformers' `Qwen3MoeDecoderLayer`. Raises CheckpointError.
    """
    count, top = text.integer(*EXPERT_COUNTS), text.integer("num_experts_per_tok")
    if not 1 <= top <= count:
        raise CheckpointError(
            f"{text.where}: num_experts_per_tok must be from 1 to {count} (num_experts), not {top}"
        )
    plain = text.integers("mlp_only_layers", default=())
    step = max(1, text.integer("decoder_sparse_step", default=1))
    layers = range(text.layers("num_hidden_layers"))
    sparse = frozenset(i for i in layers if i not in plain and not (i + 1) % step)
    return ExpertsConfig(sparse, count, top, text.integer("moe_intermediate_size"))


def read_rope(text: Section, *kinds: str) -> Section:
    """Return the section of the rotary embedding, after checking its type.

    Raises CheckpointError for other types.

    kinds: the supported types. The default is Qwen-VL's types.
    """
    kinds = kinds or ("default", "mrope")
    rope = rope_section(text)
    kind = rope.text("rope_type", "type", default="default")
    if kind not in kinds:
        raise CheckpointError(
            f"{rope.where}: rope type {kind!r} is not supported ({' and '.join(kinds)} are)"
        )
    return rope


def rope_section(section: Section) -> Section:
    """Return the section of the rotary embedding. Its older name has priority, as in transformers
    5.
    """
    older = section.section("rope_scaling")
    return older if older.data else section.section("rope_parameters")


def read_theta(text: Section, rope: Section) -> float:
    """Return the base of the rotary embedding. Raises CheckpointError.

    rope: the section that `read_rope` returned.
    text: the section that has the base in older files.
    """
    return rope.positive("rope_theta", default=text.positive("rope_theta", default=1e4))


def read_layer_types(text: Section, count: int, kinds: Collection[str]) -> tuple[str, ...]:
    """Return the type of each of `count` layers, or () if the file does not list them.

    Raises CheckpointError unless all are in `kinds`.
    """
    if not text.has("layer_types"):
        return ()
    listed = text.data["layer_types"]
    known = isinstance(listed, list) and set(map(str, listed)) <= set(kinds)
    if not known or len(listed) != count:
        raise CheckpointError(
            f"{text.where}: layer_types must name {count} layers, each one of {', '.join(kinds)}"
        )
    return tuple(listed)


def read_yarn(text: Section, rope: Section, theta: float) -> Yarn | None:
    """Return the parameters of YaRN, or None if the rotary embedding has another type.

    They are read as in transformers' `_compute_yarn_parameters`. Raises CheckpointError.

    rope: the section that `read_rope` returned.
    """
    if rope.text("rope_type", "type", default="default") != "yarn":
        return None
    longest = text.integer("max_position_embeddings", default=2048)
    original = rope.number("original_max_position_embeddings", default=longest)
    factor = rope.number("factor", default=longest / original if original else 0.0)
    # A value of 0 means that the field is not set.
    fast = rope.number("beta_fast", default=0) or 32.0
    slow = rope.number("beta_slow", default=0) or 1.0
    weight, whole = rope.number("mscale", default=0), rope.number("mscale_all_dim", default=0)
    amplitude = yarn_scale(factor)
    if weight and whole:
        divisor = yarn_scale(factor, whole)
        amplitude = yarn_scale(factor, weight) / divisor if divisor else 0.0
    amplitude = rope.number("attention_factor", default=amplitude)
    known = math.isfinite(amplitude)
    if not known or factor < 1 or original < 1 or min(slow, amplitude) <= 0 or fast < slow:
        raise CheckpointError(
            f"{rope.where}: yarn needs factor and original_max_position_embeddings of at least 1, "
            "beta_slow and attention_factor (or what mscale and mscale_all_dim make of it) above "
            "0, and beta_fast of at least beta_slow"
        )
    if theta <= 1:
        raise CheckpointError(f"{rope.where}: rope_theta must be above 1 with yarn, not {theta}")
    return Yarn(factor, original, fast, slow, amplitude, rope.flag("truncate", default=True))


def read_resample(processor: Section, default: int) -> Resample:
    """Return the resize filter. Raises CheckpointError.

    If PyTorch is too old to support Lanczos, this is bicubic instead, as in transformers'
    `TorchvisionBackend`.
    """
    number = processor.integer("resample", default=default)
    if number not in RESAMPLES:
        raise CheckpointError(
            f"{processor.where}: resample {number} is not supported (1, 2 and 3 are)"
        )
    if RESAMPLES[number] == "lanczos" and _torch_release() < FIRST_LANCZOS:
        return "bicubic"
    return RESAMPLES[number]


def _torch_release() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def check_side(vision: Section, side: int, patch: int, merge: int) -> None:
    """Raise CheckpointError unless an image's side is a whole number of tokens.

    A token is merge x merge patches.
    """
    if min(side, patch, merge) < 1 or side % (patch * merge):
        raise CheckpointError(
            f"{vision.where}: image_size {side} must be a multiple of {merge} patches of {patch} "
            "pixels"
        )


def check_made_for(section: Section, **sizes: int) -> None:
    """Raise CheckpointError if a field of the section differs from the vision encoder's size.

    sizes: the required value of each field.
    """
    for name, size in sizes.items():
        if (value := section.integer(name, default=size)) != size:
            raise CheckpointError(
                f"{section.where}: {name} is {value}, but the vision encoder requires {size}"
            )


def check_halves(vision: Section, name: str, hidden: int, heads: int) -> None:
    """Raise CheckpointError unless the head size is divisible by four.

    Each of two axes then rotates half of a head's values in pairs.

    name: the field from which `hidden` was read.
    """
    if hidden % (4 * heads):
        raise CheckpointError(
            f"{vision.where}: {name} {hidden} must be a multiple of 4 values for each of "
            f"{heads} heads"
        )


def check_channels(vision: Section) -> None:
    """Raise CheckpointError unless images have three channels."""
    if vision.integer("num_channels", default=3) != 3:
        raise CheckpointError(f"{vision.where}: num_channels must be 3 (RGB)")


def check_heads(section: Section, hidden: int, heads: int) -> None:
    """Raise CheckpointError unless `hidden` is divisible by `heads`."""
    if hidden % heads:
        raise CheckpointError(
            f"{section.where}: {hidden} values cannot be divided into {heads} heads"
        )


def read_axial(vision: Section) -> Section:
    """Return the section of a vision encoder's 2D rotary embedding.

    Raises CheckpointError if it has another type.
    """
    rope = rope_section(vision)
    if (kind := rope.text("rope_type", default="axial")) != "axial":
        raise CheckpointError(f"{rope.where}: rope type {kind!r} is not supported (axial is)")
    return rope


class SiglipDefaults(NamedTuple):
    """The values that transformers' class uses for missing fields of the vision encoder."""

    hidden: int
    heads: int
    side: int
    patch: int


def read_siglip(vision: Section, merge: int, out: int, absent: SiglipDefaults) -> SiglipConfig:
    """Read the sizes of a SigLIP vision encoder. Raises CheckpointError.

    merge: merge x merge patches become one token.
    out: the number of values of a token.
    absent: the values of missing fields.
    """
    side = vision.integer("image_size", default=absent.side)
    patch = vision.integer("patch_size", default=absent.patch)
    # Remaining pixels that do not fill a patch are ignored, as by a convolution.
    if min(patch, merge) < 1 or side < patch or side // patch % merge:
        check_side(vision, side, patch, merge)
    return siglip_shape(vision, side, patch, merge, out, absent)


def siglip_shape(
    vision: Section, side: int, patch: int, merge: int, out: int, absent: SiglipDefaults
) -> SiglipConfig:
    """Read the remaining sizes of a SigLIP vision encoder whose sizes in pixels are known.

    Raises CheckpointError.
    """
    check_channels(vision)
    hidden = vision.count("hidden_size", default=absent.hidden)
    heads = vision.count("num_attention_heads", default=absent.heads)
    check_heads(vision, hidden, heads)
    return SiglipConfig(
        depth=vision.layers("num_hidden_layers", default=12),
        hidden=hidden,
        heads=heads,
        intermediate=vision.integer("intermediate_size", default=3072),
        activation=vision.text("hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        side=side,
        patch=patch,
        merge=merge,
        out_hidden=out,
    )


def read_axes(rope: Section, head_dim: int, usual: tuple[int, int, int]) -> tuple[int, ...]:
    """Return how many of a head's rotary angles depend on time, on the row and on the column.

    Raises CheckpointError.

    usual: the default.
    """
    sections = rope.integers("mrope_section", default=usual)
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise CheckpointError(
            f"{rope.where}: mrope_section {list(sections)} must be three numbers that sum to "
            f"{head_dim // 2}"
        )
    return sections
