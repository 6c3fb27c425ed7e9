"""Gemma 4's `FamilySpec`: sizes, prompts, windows.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.core.family import Cuts, KVSpec, heads_cache
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.kit.base_spec import BLIND, BaseSpec, FamilyOptions, Placeholder, read_options
from saccade.families.kit.config_readers import read_token, text_section
from saccade.plugins.models.gemma4.config import (
    EmbedderConfig,
    Gemma4Text,
    TowerConfig,
    read_kind,
    read_text,
    read_vision,
)
from saccade.plugins.models.gemma4.images import BUDGETS, NO_IMAGES, BudgetRules, read_images


@dataclass(frozen=True, slots=True)
class Gemma4Options(FamilyOptions):
    """max_soft_tokens: the maximum tokens of an image, one of `BUDGETS` that the vision encoder has
    positions for. The default is the image processor's value.
    """

    max_soft_tokens: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Spec(BaseSpec):
    """Gemma 4's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: TowerConfig | EmbedderConfig
    text: Gemma4Text
    images: BudgetRules

    def with_options(self, options: Mapping[str, str]) -> Gemma4Spec:
        budgets = {str(each): each for each in BUDGETS if each <= self.vision.longest}
        chosen = read_options(Gemma4Options, self.family, options, max_soft_tokens=budgets)
        budget = budgets.get(chosen.max_soft_tokens, self.images.budget)
        return replace(self, images=replace(self.images, budget=budget))

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        text, found = self.text, []
        for at, layer in enumerate(text.layers):
            both_ways = text.both_ways and layer.window is not None
            sizes = layer.kv_heads, layer.head_dim, ranks
            shape = heads_cache(*sizes, window=layer.window, both_ways=both_ways)
            found.append(replace(shape, owns=layer.source == at))
        return KVSpec(tuple(found))

    @property
    def cuts(self) -> Cuts:
        text, vision, experts = self.text, self.vision, self.text.experts
        widths = sorted({layer.intermediate for layer in text.layers})
        return Cuts(
            text=((text.heads, "attention heads"), *((each, "MLP values") for each in widths)),
            heads=text.heads,
            kv_heads=min(layer.kv_heads for layer in text.layers),
            encoder=vision.cuts,
            encoder_width=vision.hidden,
            experts=experts.count if experts else 0,
            expert_width=experts.width if experts else 0,
            lasting=len(text.layers) * text.per_layer.width if text.per_layer else 0,
        )


def gemma4_spec(checkpoint: Checkpoint) -> Gemma4Spec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    images, placeholder = NO_IMAGES, BLIND
    if vision.depth:
        images = read_images(checkpoint.processor, vision)
        placeholder = _placeholder(config, text.vocab_size)
        if images.budget > vision.longest:
            raise CheckpointError(
                f"{config.where}: {vision.places} positions are too few for an image with "
                f"{images.budget} tokens in one row"
            )
    return Gemma4Spec(
        family=read_kind(config) if vision.depth else f"{read_kind(config)}_text",
        vision=vision,
        text=text,
        images=images,
        placeholder=placeholder,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _placeholder(config: Section, vocab: int) -> Placeholder:
    begin = read_token(config, vocab, "boi_token_id", default=255999)
    content = read_token(config, vocab, "image_token_id", default=258880)
    end = read_token(config, vocab, "eoi_token_id", "eoi_token_index", default=258882)
    return Placeholder((content,), None, (begin,), (end,))
