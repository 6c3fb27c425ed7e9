"""Architecture name -> family: one line per architecture.

The spec side imports no torch: a family's network is named by its module, and imported when it is
built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import Checkpoint, read_checkpoint
from saccade.families.internvl.spec import internvl_spec
from saccade.families.quantization import read_quantization
from saccade.families.qwen3_5.spec import qwen3_5_spec
from saccade.families.qwen_vl.spec import qwen_vl_spec

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Family:
    """`spec` reads a checkpoint's facts. `net` is a module with `build(spec, weights, shard,
    encoder_shard) -> FamilyNet`, `build_tower(spec, weights, encoder_shard) -> TowerNet`,
    `canonical_name(name)`, `harmless(name, spec)` and
    `projection(name)`.
    """

    spec: Callable[[Checkpoint], FamilySpec]
    net: str


QWEN_VL = Family(qwen_vl_spec, "saccade.families.qwen_vl.net")
QWEN3_5 = Family(qwen3_5_spec, "saccade.families.qwen3_5.net")
INTERNVL = Family(internvl_spec, "saccade.families.internvl.net")

ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "InternVLForConditionalGeneration": INTERNVL,
}
MODEL_TYPES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), QWEN3_5),
    "internvl": INTERNVL,
}


def load_spec(folder: Path, options: Sequence[str] = ()) -> FamilySpec:
    """The facts of the checkpoint in `folder`. `options`: the family's own, NAME=VALUE.

    Raises CheckpointError; for an unknown architecture it lists the known ones, for a quantised
    checkpoint that cannot be read the known methods. Raises ConfigError for an option that the
    family does not have.
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
    spec = family.spec(checkpoint)
    return spec.with_options(_read_options(options)) if options else spec


def _read_options(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not (name and sign):
            raise ConfigError(f"--family-option {option!r}: write it as NAME=VALUE")
        found[name] = value
    return found


def net_module(spec: FamilySpec) -> ModuleType:
    """The module that builds the network of `spec` (imports torch)."""
    return importlib.import_module(MODEL_TYPES[spec.family].net)
