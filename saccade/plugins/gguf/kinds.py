"""Types with which a model family describes the GGUF files of its models.

Each folder in families/ may have a `gguf.py` with `FACTS`, to which its `Family` refers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.made import Made

NamedTensors = Iterator[tuple[str, Made]]
"""Pairs of a tensor's name in transformers and the tensor. Unknown tensors keep their names."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """How to read a language model with a certain `general.architecture`."""

    # returns its part of config.json, from the metadata and the names of all tensors
    config: Callable[[MetadataFields, Collection[str]], dict[str, Any]]
    names: Callable[[GgufFile], NamedTensors]
    # special tokens of SentencePiece after which a space is kept; after others, it is removed.
    # None: it is always kept
    keep_space: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model with a vision encoder."""

    model: GgufFile
    sight: MetadataFields  # the vision encoder's metadata
    text: Mapping[str, Any]  # the language model's part of config.json
    kind: str  # the vision encoder's projector type

    def check_width(self, name: str) -> int:
        """Return the size of an image token's embedding, which is the output size of tensor `name`.

        Raises CheckpointError if it is not the language model's hidden size.
        """
        out, taken = self.sight.tensor(name).shape[0], self.text["hidden_size"]
        if out != taken:
            raise self.sight.file.refuse(
                f"the tower puts out {out} values, the language model takes {taken}: give the "
                "--mmproj file of the same model"
            )
        return out


@dataclass(frozen=True, slots=True)
class Seen:
    """What the file of a vision encoder adds to a checkpoint."""

    config: Mapping[str, Any]  # fields of config.json other than text_config
    files: Mapping[str, Mapping[str, Any]]  # further JSON files, by name
    defaults: tuple[str, ...] = ()  # fields that no file sets, for log messages


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model with or without a separate vision encoder."""

    architecture: str  # as in config.json
    model_type: str  # as in config.json
    see: Callable[[Source], Seen] | None = None  # reads the vision encoder's file


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """All models of a family."""

    # by `general.architecture` and projector type, which is "" without a vision encoder
    models: Mapping[tuple[str, str], ModelKind]
    texts: Mapping[str, TextKind] = field(default_factory=dict)  # by `general.architecture`
    # names of tensors by `clip.projector_type`
    towers: Mapping[str, Callable[[GgufFile], NamedTensors]] = field(default_factory=dict)
