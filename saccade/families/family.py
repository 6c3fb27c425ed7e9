"""What a folder of families/ states of itself, as `FAMILY` in its `__init__.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, found without an import of its modules.

    spec: the function that reads a checkpoint's `FamilySpec`; model: the `FamilyModel` of a spec;
    each as "module:name". architectures: names in config.json. model_types: names in config.json
    where it has no architectures, and what `FamilySpec.family` says. package: serves architectures
    that no other family names, by this Python package, an extra of the same name.
    """

    spec: str
    model: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    package: str | None = None
