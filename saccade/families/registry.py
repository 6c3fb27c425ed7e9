"""Architecture name -> family: one line per architecture.

The spec side imports no torch: a family's network is named by its module, and imported when it is
built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import Checkpoint, read_checkpoint
from saccade.families.quantization import read_quantization
from saccade.families.qwen_vl.spec import qwen_vl_spec

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Family:
    """`spec` reads a checkpoint's facts. `net` is a module with `build(spec, weights, shard,
    encoder_shard, patch_embed) -> FamilyNet`, `build_tower(spec, weights, encoder_shard,
    patch_embed) -> TowerNet`, `canonical_name(name)`, `harmless(name, spec)` and
    `projection(name)`.
    """

    spec: Callable[[Checkpoint], FamilySpec]
    net: str


QWEN_VL = Family(qwen_vl_spec, "saccade.families.qwen_vl.net")

ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLForConditionalGeneration": QWEN_VL,
}
MODEL_TYPES = {"qwen2_vl": QWEN_VL, "qwen2_5_vl": QWEN_VL, "qwen3_vl": QWEN_VL}


def load_spec(folder: Path) -> FamilySpec:
    """The facts of the checkpoint in `folder`.

    Raises CheckpointError; for an unknown architecture it lists the known ones, for a quantised
    checkpoint that cannot be read the known methods.
    """
    checkpoint = read_checkpoint(folder)
    read_quantization(checkpoint.config)
    architecture = checkpoint.architecture()
    family = ARCHITECTURES.get(architecture) or MODEL_TYPES.get(architecture)
    if family is None:
        raise CheckpointError(
            f"{checkpoint.config.where}: {architecture} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return family.spec(checkpoint)


def net_module(spec: FamilySpec) -> ModuleType:
    """The module that builds the network of `spec` (imports torch)."""
    return importlib.import_module(MODEL_TYPES[spec.family].net)
