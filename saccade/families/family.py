"""What the `__init__.py` of a folder in families/ states: a `Family`, or one per generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, found without importing its modules.

    spec: the function that reads a checkpoint's `FamilySpec`. model: the `FamilyModel` for a spec.
    Both are written "module:name".

    architectures: names in config.json. model_types: names in config.json where it has no
    architectures, and the values of `FamilySpec.family`. package: a Python package, and an extra
    with the same name, which serves architectures that no other family names.

    gguf: the `GgufFacts` about its models in GGUF files, written so too.
    """

    spec: str
    model: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    package: str | None = None
    gguf: str | None = None
