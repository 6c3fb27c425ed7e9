"""Creates the spec of a ColQwen checkpoint: a Qwen-VL checkpoint with a projection to vectors.

Supports two formats. In that of transformers, `vlm_config` contains the fields of Qwen-VL. In that
of colpali-engine, fields and tensors are the same as in Qwen-VL. Runs without torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from saccade.core.errors import CheckpointError
from saccade.core.family import LateInteraction
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.kit.config_readers import text_section
from saccade.families.qwen_vl.config import read_variant
from saccade.families.qwen_vl.spec import TEMPLATES, QwenVLSpec, qwen_vl_spec

TEMPLATE = Path(__file__).parent / "vectors.jinja"
QUERY_PREFIX = "Query: "
PAGE_PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
WIDTH = 128
"""Default number of values per vector."""


def colqwen_spec(checkpoint: Checkpoint) -> QwenVLSpec:
    """Create the spec from a ColQwen checkpoint's JSON files. Raises CheckpointError with the file
    and the field.
    """
    config = checkpoint.config
    _check_prompts(read_json(checkpoint.folder / "processor_config.json", required=False))
    inner = config.section("vlm_config") if config.has("vlm_config") else config
    if read_variant(inner) == "qwen3_vl":
        raise CheckpointError(f"{inner.where}: only Qwen2-VL and Qwen2.5-VL have vectors per token")
    spec = qwen_vl_spec(replace(checkpoint, config=inner))
    width = config.count("embedding_dim", default=WIDTH)
    return replace(
        spec,
        family="colqwen2",
        # retrieval needs no output head, so a checkpoint may have none
        text=replace(spec.text, tied=True),
        templates=replace(TEMPLATES, scores=None, late=LateInteraction(width, TEMPLATE)),
        dtype=checkpoint.dtype(text_section(inner)),
    )


def _check_prompts(processor: Section) -> None:
    """Raise CheckpointError if the checkpoint was trained with prompts other than those in
    `TEMPLATE`.
    """
    for name, usual in (("query_prefix", QUERY_PREFIX), ("visual_prompt_prefix", PAGE_PROMPT)):
        if processor.has(name) and processor.text(name) != usual:
            raise CheckpointError(
                f"{processor.where}: {name} {processor.text(name)!r} is not supported: only "
                f"{usual!r} is"
            )
