"""Qwen3.5's configuration, typed. The vision tower is read as Qwen3-VL's, whose extra levels it
has not. Knows nothing of torch.
"""

from __future__ import annotations

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.config_readers import text_section
from saccade.families.hybrid import read_hybrid
from saccade.families.qwen_vl.config import (
    NO_IMAGES,
    NO_VISION,
    ImageRules,
    VisionConfig,
    image_rules,
    vision_config,
)
from saccade.nn.hybrid_config import HybridConfig
from saccade.nn.text_config import TextConfig

TEXT_ONLY = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Architectures, and model types, of checkpoints that hold the language model alone. The fields of
their config.json are those of the others' `text_config`.
"""


def parse_config(
    checkpoint: Checkpoint,
) -> tuple[VisionConfig, TextConfig, HybridConfig, ImageRules]:
    """All that the JSON files say. Raises CheckpointError naming file and field."""
    config = checkpoint.config
    text, hybrid = read_hybrid(config, text_section(config))
    if checkpoint.architecture() in TEXT_ONLY:
        return NO_VISION, text, hybrid, NO_IMAGES
    section = config.section("vision_config")
    # Some files name the levels that the tower has not got: an empty list of them.
    levels: dict[str, list[int]] = {"deepstack_visual_indexes": []}
    vision = vision_config("qwen3_vl", Section(section.where, {**section.data, **levels}))
    if vision.out_hidden != text.hidden:
        raise CheckpointError(
            f"{config.where}: the vision tower puts out {vision.out_hidden} values, the text "
            f"model takes {text.hidden}"
        )
    return vision, text, hybrid, image_rules("qwen3_vl", vision, checkpoint.processor)
