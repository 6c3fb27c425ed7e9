"""Rejects models that transformers' own modules compute, but that Saccade cannot serve, with the
reason.

Saccade's paged attention, caches or batches would change the answers of these models. Reads
configurations created by transformers, without importing it.
"""

from __future__ import annotations

from typing import Any

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import read_heads
from saccade.plugins.any_model.facts import TextFacts

BOTH_WAYS = "its images use bidirectional attention, which none of its layers requests"
PREFIX = "its prompts use bidirectional attention, so their KV cannot be cached in pages"
SEVERAL = (
    "its vision encoder attends to several images at once, so an image has no separate embedding"
)
CROSS = "its images are used by cross-attention, not as tokens"
REFUSED = {
    "gemma3": BOTH_WAYS,
    "gemma3n": "it processes audio, and its layers share KV caches",
    "gemma4_unified": BOTH_WAYS,
    "molmo2": BOTH_WAYS,
    "paligemma": PREFIX,
    "diffusion_gemma": PREFIX,
    "mllama": CROSS,
    "git": SEVERAL,
    "blip": CROSS,
    "blip-2": "its queries depend on the question",
    "instructblip": "its queries depend on the question",
    "kosmos-2": "its images have tokens of two kinds",
    "florence2": "it has an encoder, whose output does not fit into KV pages",
    "qwen2_5_omni": "it processes and generates audio",
    "qwen3_omni_moe": "it processes and generates audio",
    "gpt_oss": "it uses attention sinks, which paged attention does not support",
    "llama4": "its layers attend to chunks of the context",
}
"""Reasons for rejecting a model type, for types whose configuration has no field that
reveals it.
"""
HEARING = ("audio_config", "speech_config")
DEAF = frozenset({"phi4_multimodal"})
"""Model types that are served without their audio part."""
GENTLE_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Types of rotary embedding that depend only on the position of a token."""
LONGROPE = "longrope"
"""A type of rotary embedding that also depends on the length of the text. One of its two sets of
factors is selected at load.
"""
NEAR = "sliding_attention"
"""Name of the type of layer that has a window."""
MAX_CONTEXT = 1 << 24
"""Maximum context length in tokens. `check.py` evaluates the mask of a layer at each position."""
DESCRIBED_BY = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
"""Fields of a language model that transformers can map to each configuration's own names."""
SCORES_CAP = "attn_logit_softcapping"
MASKS, MODELS = "create_masks_for_generate", "transformers.models."
"""The function that a model's class overrides if its masks are not just causal with windows, and
the prefix of modules in which it may do so.
"""


class Unservable(Exception):
    """Raised with the reason why a checkpoint cannot be served."""


def refuse_type(config: Any, model: Any) -> None:
    """Raise Unservable for a model type that is known not to work."""
    if reason := REFUSED.get(config.model_type):
        raise Unservable(f"{model.__name__} is not served: {reason}")
    said = config.to_dict()
    if any(map(said.get, HEARING)) and config.model_type not in DEAF:
        raise Unservable(
            f"{model.__name__} is not served: it processes audio, which is not supported"
        )
    if said.get("is_encoder_decoder"):
        raise Unservable(
            f"{model.__name__} is not served: it has an encoder, whose output does not fit into "
            "KV pages"
        )
    if any(MASKS in vars(each) for each in model.__mro__ if each.__module__.startswith(MODELS)):
        raise Unservable(
            f"{model.__name__} is not served: it has masks of its own ({MASKS}), which the KV "
            "cache does not support"
        )
    if said.get("quantization_config"):
        raise Unservable(
            f"{model.__name__} runs on transformers' modules, which do not support quantized "
            "checkpoints: use the unquantized checkpoint"
        )


def check_config(text: Any) -> None:
    """Raise Unservable for a property that Saccade's attention or output head does not support."""
    said = text.to_dict()
    kinds = set(said.get("layer_types") or ())
    if others := sorted(kinds - {"full_attention", NEAR}):
        raise Unservable(
            f"its layers of kind {others[0]} keep state that does not fit into KV pages"
        )
    if said.get(SCORES_CAP):
        raise Unservable(f"its {SCORES_CAP} is {said[SCORES_CAP]}, which is not supported")
    for rope in ropes(said):
        kind = rope.get("rope_type", "default")
        if kind not in GENTLE_ROPES and not (kind == LONGROPE and len(ropes(said)) == 1):
            raise Unservable(
                f"its rotary embedding is {kind}, which depends on the length of the sequence: "
                "answers would depend on the batch"
            )


def ropes(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rotary embeddings in a configuration: one, or one per type of layer."""
    found = said.get("rope_parameters") or {}
    nested = [each for each in found.values() if isinstance(each, dict)]
    return nested or [found]


def read_text(text: Any) -> TextFacts:
    """Read the language model's sizes, except for the number of position axes.

    Raises CheckpointError with the field if a value is wrong, and Unservable if a field is missing.
    """
    said = text.to_dict()
    said |= {name: said.get(own) for name, own in text.attribute_map.items() if own in said}
    if missing := [name for name in DESCRIBED_BY if said.get(name) is None]:
        raise Unservable(
            f"{text.model_type} models are not served: their configuration has no "
            f"{missing[0]}, which is required for the KV cache"
        )
    config, rope = Section("its language model", said), Section("its rope", ropes(said)[0])
    heads, kv_heads = read_heads(config)
    hidden, layers = config.count("hidden_size"), config.layers("num_hidden_layers")
    if (context := config.count("max_position_embeddings")) > MAX_CONTEXT:
        raise CheckpointError(
            f"{config.where}: max_position_embeddings must be at most {MAX_CONTEXT}, not {context}"
        )
    long = rope.data.get("rope_type") == LONGROPE
    near = rope.count("original_max_position_embeddings") if long else None
    return TextFacts(
        vocab_size=config.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.count("head_dim", default=hidden // heads),
        context_length=context,
        windows=read_windows(said, layers, context),
        near=near if near is not None and near < context else None,
    )


def read_windows(said: dict[str, Any], layers: int, context: int) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, with None for full attention. Empty if no layer
    has a window.

    If the types of layers are not specified, all layers have the window.
    """
    window, kinds = said.get("sliding_window"), said.get("layer_types")
    if window is None or window >= context or not said.get("use_sliding_window", True):
        return ()
    found = tuple(int(window) if each == NEAR else None for each in kinds or (NEAR,) * layers)
    return found if any(found) else ()
