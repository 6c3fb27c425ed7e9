"""What a family states about GGUF files of its models: the socket that shared code reads.

Each folder in families/ may have a `gguf.py` with `FACTS`, which its `Family` names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.made import Made

NamedTensors = Iterator[tuple[str, Made]]
"""Tensors by transformers' names. Unknown ones keep their own."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """A language model, by `general.architecture`."""

    # makes its part of config.json from the metadata and all tensors' names
    config: Callable[[MetadataFields, Collection[str]], dict[str, Any]]
    names: Callable[[GgufFile], NamedTensors]
    # special tokens of SentencePiece that keep the space behind them, which others take. None: all
    # keep it.
    keep_space: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model with a tower."""

    model: GgufFile
    sight: MetadataFields  # the tower's metadata
    text: Mapping[str, Any]  # the language model's part of config.json
    kind: str  # the tower's projector

    def check_width(self, name: str) -> int:
        """Return the values of a token, of which tower's tensor `name` makes all.

        Raises CheckpointError if the language model takes another number.
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
    """What a tower's file adds to a checkpoint."""

    config: Mapping[str, Any]  # fields of config.json beside text_config
    files: Mapping[str, Mapping[str, Any]]  # its other JSON files, by name
    defaults: tuple[str, ...] = ()  # fields that no file sets, for messages


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model of one file, or of two, by both their kinds."""

    architecture: str  # architecture, model_type: config.json's
    model_type: str
    see: Callable[[Source], Seen] | None = None  # reads the tower's file


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """All of a family."""

    models: Mapping[tuple[str, str], ModelKind]  # by both, the second "" without a tower
    texts: Mapping[str, TextKind] = field(default_factory=dict)  # by `general.architecture`
    # names of tensors by `clip.projector_type`
    towers: Mapping[str, Callable[[GgufFile], NamedTensors]] = field(default_factory=dict)
