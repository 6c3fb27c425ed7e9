"""What a family declares about the GGUF files of its models.

A family's `gguf.py` exports `FACTS`, which its `Family` refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.made import Made

NamedTensors = Iterator[tuple[str, Made]]
"""Tensors with their names in transformers. Unknown tensors keep their own names."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """How to read a type of language model. `general.architecture` identifies the type."""

    # creates its part of config.json from the metadata and the names of all tensors
    config: Callable[[MetadataFields, Collection[str]], dict[str, Any]]
    names: Callable[[GgufFile], NamedTensors]
    # special tokens of SentencePiece after which a space is preserved; it is removed after others.
    # None: it is preserved after all.
    keep_space: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What `ModelKind.see` gets: the parsed files of a model with a vision encoder."""

    model: GgufFile
    sight: MetadataFields  # the vision encoder's metadata
    text: Mapping[str, Any]  # the language model's part of config.json
    kind: str  # the vision encoder's projector type

    def check_width(self, name: str) -> int:
        """Return the number of output values of the vision encoder, from its tensor `name`.

        Raises CheckpointError if the language model's width differs.
        """
        out, taken = self.sight.tensor(name).shape[0], self.text["hidden_size"]
        if out != taken:
            raise self.sight.file.refuse(
                f"the vision encoder's output has {out} values, but the language model expects "
                f"{taken}: pass the --mmproj file of the same model"
            )
        return out


@dataclass(frozen=True, slots=True)
class Seen:
    """The parts of a checkpoint's configuration that are read from the vision encoder's file."""

    config: Mapping[str, Any]  # fields of config.json other than text_config
    files: Mapping[str, Mapping[str, Any]]  # other JSON files, by name
    defaults: tuple[str, ...] = ()  # fields that no file sets, to be logged


@dataclass(frozen=True, slots=True)
class ModelKind:
    """How to read a model that has a language model and possibly a vision encoder."""

    architecture: str  # in config.json
    model_type: str  # in config.json
    see: Callable[[Source], Seen] | None = None  # reads the vision encoder's file


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Everything that a family declares about GGUF files."""

    # by the language model's architecture and the projector type, which is "" without a vision
    # encoder
    models: Mapping[tuple[str, str], ModelKind]
    texts: Mapping[str, TextKind] = field(default_factory=dict)  # by `general.architecture`
    # functions that name the tensors, by `clip.projector_type`
    towers: Mapping[str, Callable[[GgufFile], NamedTensors]] = field(default_factory=dict)
