"""Adapters as PEFT makes them: random, strong enough to change answers, and the model that PEFT
merges them into.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch

from tests.fixtures.tiny import Reference, reference

LANGUAGE = r".*(language|text)_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj"


@dataclass(frozen=True)
class Trained:
    """An adapter's folder, and the reference with it merged."""

    folder: Path
    merged: Reference


def train(folder: Path, whole: Reference, seed: int, modules: str, **config: Any) -> Trained:
    """modules: a pattern of the layers that it adds to. config: of `peft.LoraConfig`."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by old names
        torch.manual_seed(seed)
        wanted = peft.LoraConfig(target_modules=modules, init_lora_weights=False, **config)
        model = peft.get_peft_model(copy.deepcopy(whole.model), wanted)
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(weight, std=0.3)
        model.save_pretrained(str(folder))
        return Trained(folder, replace(whole, model=model.merge_and_unload()))


def endless(folder: Path) -> Reference:
    """The reference on a checkpoint, made to go on after an end token."""
    whole = reference(folder)
    whole.model.generation_config.eos_token_id = None
    whole.model.generation_config.pad_token_id = 0
    return whole
