"""Architecture name -> family: one line per architecture.

The spec side imports no torch: a family's network half is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.extras import how_to_install
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import Checkpoint, read_checkpoint
from saccade.families.deepseek_vl2.spec import DeepseekSpec, deepseek_spec
from saccade.families.gemma3.spec import Gemma3Spec, gemma3_spec
from saccade.families.gemma4.spec import Gemma4Spec, gemma4_spec
from saccade.families.internvl.spec import InternVLSpec, internvl_spec
from saccade.families.minicpm.spec import MiniCPMSpec, minicpm_spec
from saccade.families.quantization import read_quantization
from saccade.families.qwen_vl.qwen3_5.spec import Qwen35Spec, qwen3_5_spec
from saccade.families.qwen_vl.spec import QwenVLSpec, qwen_vl_spec
from saccade.families.smolvlm.spec import SmolVLMSpec, smolvlm_spec
from saccade.families.transformers_any.proven import PROVEN
from saccade.families.transformers_any.spec import AnySpec, transformers_spec

if TYPE_CHECKING:
    from saccade.nn.family_model import FamilyModel


@dataclass(frozen=True, slots=True)
class Family:
    """spec: reads a checkpoint's facts. model: the network half; only its call imports torch."""

    spec: Callable[[Checkpoint], FamilySpec]
    model: Callable[[FamilySpec], FamilyModel]


def _qwen_vl(spec: FamilySpec) -> FamilyModel:
    from saccade.families.qwen_vl.net import QwenVLModel

    assert isinstance(spec, QwenVLSpec)
    return QwenVLModel(spec)


def _qwen3_5(spec: FamilySpec) -> FamilyModel:
    from saccade.families.qwen_vl.qwen3_5.net import Qwen35Model

    assert isinstance(spec, Qwen35Spec)
    return Qwen35Model(spec)


def _internvl(spec: FamilySpec) -> FamilyModel:
    from saccade.families.internvl.net import InternVLModel

    assert isinstance(spec, InternVLSpec)
    return InternVLModel(spec)


def _smolvlm(spec: FamilySpec) -> FamilyModel:
    from saccade.families.smolvlm.net import SmolVLMModel

    assert isinstance(spec, SmolVLMSpec)
    return SmolVLMModel(spec)


def _gemma3(spec: FamilySpec) -> FamilyModel:
    from saccade.families.gemma3.net import Gemma3Model

    assert isinstance(spec, Gemma3Spec)
    return Gemma3Model(spec)


def _deepseek_vl2(spec: FamilySpec) -> FamilyModel:
    from saccade.families.deepseek_vl2.net import DeepseekModel

    assert isinstance(spec, DeepseekSpec)
    return DeepseekModel(spec)


def _gemma4(spec: FamilySpec) -> FamilyModel:
    from saccade.families.gemma4.net import Gemma4Model

    assert isinstance(spec, Gemma4Spec)
    return Gemma4Model(spec)


def _minicpm(spec: FamilySpec) -> FamilyModel:
    from saccade.families.minicpm.net import MiniCPMModel

    assert isinstance(spec, MiniCPMSpec)
    return MiniCPMModel(spec)


def _transformers_any(spec: FamilySpec) -> FamilyModel:
    from saccade.families.transformers_any.net import AnyModel

    assert isinstance(spec, AnySpec)
    return AnyModel(spec)


QWEN_VL = Family(qwen_vl_spec, _qwen_vl)
QWEN3_5 = Family(qwen3_5_spec, _qwen3_5)
INTERNVL = Family(internvl_spec, _internvl)
SMOLVLM = Family(smolvlm_spec, _smolvlm)
GEMMA3 = Family(gemma3_spec, _gemma3)
DEEPSEEK_VL2 = Family(deepseek_spec, _deepseek_vl2)
GEMMA4 = Family(gemma4_spec, _gemma4)
MINICPM = Family(minicpm_spec, _minicpm)
TRANSFORMERS_ANY = Family(transformers_spec, _transformers_any)
"""Of architectures without a line: the extra `transformers`."""

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
    "Idefics3ForConditionalGeneration": SMOLVLM,
    "SmolVLMForConditionalGeneration": SMOLVLM,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3ForCausalLM": GEMMA3,
    "DeepseekVLV2ForCausalLM": DEEPSEEK_VL2,
    "DeepseekV2ForCausalLM": DEEPSEEK_VL2,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4ForCausalLM": GEMMA4,
    "MiniCPMV4_6ForConditionalGeneration": MINICPM,
}
MODEL_TYPES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), QWEN3_5),
    "internvl": INTERNVL,
    **dict.fromkeys(("idefics3", "smolvlm"), SMOLVLM),
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    **dict.fromkeys(("deepseek_vl_v2", "deepseek_v2"), DEEPSEEK_VL2),
    **dict.fromkeys(("gemma4", "gemma4_text"), GEMMA4),
    "minicpmv4_6": MINICPM,
    "transformers_any": TRANSFORMERS_ANY,
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
    family = ARCHITECTURES.get(architecture) or MODEL_TYPES.get(architecture, TRANSFORMERS_ANY)
    if family is TRANSFORMERS_ANY and find_spec("transformers") is None:
        raise CheckpointError(
            f"{checkpoint.config.where}: {architecture} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}, and with transformers' own modules many more: "
            + how_to_install(".[transformers]")
        )
    spec = family.spec(checkpoint)
    return spec.with_options(_read_options(options)) if options else spec


def unproven(spec: FamilySpec) -> str:
    """Return the architecture's name if no test compares its answers with transformers' own, else
    "".
    """
    name = spec.facts.architecture if isinstance(spec, AnySpec) else ""
    return "" if name in PROVEN else name


def _read_options(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not (name and sign):
            raise ConfigError(f"--family-option {option!r}: write it as NAME=VALUE")
        found[name] = value
    return found


def family_model(spec: FamilySpec) -> FamilyModel:
    """The network half of the family that read `spec` (imports torch)."""
    return MODEL_TYPES[spec.family].model(spec)
