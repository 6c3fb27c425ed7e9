"""Creates a checkpoint's JSON files from the metadata in its GGUF files.

Families map metadata to fields (`kinds.py`), and read the result like any other checkpoint.
`tokenizer.py` creates the tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, read_generation
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.kinds import ModelKind, Source
from saccade.plugins.gguf.known import gguf_facts, projector, text_kind


@dataclass(frozen=True, slots=True)
class Configs:
    """The JSON files of a checkpoint by name, except for the tokenizer's.

    defaults: the fields that no file sets, which are logged.
    """

    files: Mapping[str, Mapping[str, Any]]
    defaults: tuple[str, ...] = ()


def make_configs(model: GgufFile, tower: GgufFile | None, tensors: set[str]) -> Configs:
    """Create a checkpoint's JSON files from the metadata of a language model and its vision
    encoder.

    model: the language model's file, which is the first one of a split model.
    tensors: the names of all tensors.

    Raises CheckpointError with the file and field if a field is invalid, or if the files do not
    belong together.
    """
    kind = text_kind(model)
    projected = projector(tower) if tower else ""
    found = _model(model, tower, projected)
    text = kind.config(MetadataFields(model, f"{model.architecture}."), tensors)
    config: dict[str, Any] = {
        "architectures": [found.architecture],
        "model_type": found.model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    files: dict[str, Mapping[str, Any]] = {"generation_config.json": read_generation(model)}
    if tower is None or found.see is None:
        return Configs({"config.json": config | text, **files})
    seen = found.see(Source(model, MetadataFields(tower, "clip.vision."), text, projected))
    config |= {"text_config": text, **seen.config}
    return Configs({"config.json": config, **files, **seen.files}, seen.defaults)


def _model(model: GgufFile, tower: GgufFile | None, kind: str) -> ModelKind:
    arch, models = model.architecture, gguf_facts().models
    if (arch, kind) in models:
        return models[arch, kind]
    if tower is None:
        raise model.refuse(
            f"{arch} has a separate file for the vision encoder: pass it as --mmproj"
        )
    raise tower.refuse(
        f"the vision encoder's type {kind} does not belong to {arch} ({model.path.name}): "
        "pass the --mmproj file of the same model"
    )
