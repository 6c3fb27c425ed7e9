"""InternVL's `FamilySpec`: sizes, prompts, videos.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import CheckpointError
from saccade.core.family import Cuts, Templates
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.kit.base_spec import DecoderSpec, Placeholder, plain_cuts
from saccade.plugins.models.internvl.config import (
    KINDS,
    InternVisionConfig,
    read_kind,
    read_text,
    read_vision,
)
from saccade.plugins.models.internvl.images import TileRules, read_images
from saccade.plugins.models.internvl.video import read_video

TEMPLATES = Templates(
    tools=Path(__file__).parent / "tools.jinja", marks=("<|im_start|>", "<IMG_CONTEXT>")
)
"""Replaces the checkpoints' own templates, which do not support tools, although their language
models do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLSpec(DecoderSpec):
    """InternVL's `FamilySpec`: sizes, prompt expansion, positions and videos, importable without
    torch.
    """

    vision: InternVisionConfig
    images: TileRules

    @property
    def cuts(self) -> Cuts:
        plain, projector = plain_cuts(self.text, self.vision), self.vision.out_hidden
        return replace(plain, encoder=(*plain.encoder, (projector, "projector values")))


def internvl_spec(checkpoint: Checkpoint) -> InternVLSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    kind, section = read_kind(config), config.section("text_config")
    text = read_text(config)
    vision = read_vision(config, text.hidden)
    images = read_images(checkpoint.processor, vision)
    first = kind == KINDS[0]
    return InternVLSpec(
        family=kind,
        vision=vision,
        text=text,
        images=images,
        tiles=images,
        placeholder=_placeholder(checkpoint),
        templates=TEMPLATES if first else _templates(checkpoint),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        video=read_video(checkpoint, images) if first else None,
    )


def _templates(checkpoint: Checkpoint) -> Templates:
    """Return the templates, with the text that marks an image in Qianfan-OCR's. This text may not
    be a single token.
    """
    processor = read_json(checkpoint.folder / "processor_config.json", required=False)
    mark = processor.text("image_placeholder_token", default="<image>")
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    names, ids = _names(settings), _added_tokens(checkpoint.folder, settings)
    role, content = (
        "context_image_token",
        checkpoint.config.integer("image_token_id", default=151667),
    )
    name = names.text(role, default=settings.text(role, default="<IMG_CONTEXT>"))
    if ids.get(name) != content:
        raise CheckpointError(
            f"{checkpoint.config.where}: image_token_id is {content}, but {name} ({role}) is "
            f"{ids.get(name)}"
        )
    return Templates(shown=(mark, name))


def _placeholder(checkpoint: Checkpoint) -> Placeholder:
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    names = _names(settings)
    ids = _added_tokens(checkpoint.folder, settings)
    found = []
    for role, usual in (("start_image_token", "<img>"), ("end_image_token", "</img>")):
        name = names.text(role, default=settings.text(role, default=usual))
        if name not in ids:
            raise CheckpointError(f"{checkpoint.folder}: the tokenizer has no {role}, {name!r}")
        found.append(ids[name])
    content = checkpoint.config.integer("image_token_id", default=151667)
    return Placeholder((content,), None, (found[0],), (found[1],))


def _names(settings: Section) -> Section:
    """Return the section that maps names to special tokens. This is the entire file if its
    `extra_special_tokens` is only a list.
    """
    named = isinstance(settings.data.get("extra_special_tokens"), dict)
    return settings.section("extra_special_tokens") if named else settings


def _added_tokens(folder: Path, settings: Section) -> dict[str, int]:
    """Return the IDs of added tokens by content.

    Reads them from tokenizer_config.json, or else from tokenizer.json.
    """
    added = settings.section("added_tokens_decoder").data
    if added:
        return {entry["content"]: int(number) for number, entry in added.items()}
    listed = read_json(folder / "tokenizer.json").data.get("added_tokens", [])
    return {entry["content"]: entry["id"] for entry in listed}
