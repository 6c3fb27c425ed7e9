"""Architecture name -> family: each `Family` in the `__init__.py` of a folder next to this file.

Imports the modules of the one family that is asked for. Only `family_model` imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.extras import how_to_install
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import read_checkpoint
from saccade.families.family import Family
from saccade.families.quantization import read_quantization
from saccade.families.unread_fields import refuse_unread

if TYPE_CHECKING:
    from saccade.gguf.kinds import GgufFacts
    from saccade.nn.family_model import FamilyModel


@cache
def families() -> tuple[Family, ...]:
    """Return all families, by the names of their folders."""
    package = import_module("saccade.families")
    folders = (
        import_module(found.name)
        for found in iter_modules(package.__path__, f"{package.__name__}.")
        if found.ispkg
    )
    return tuple(
        each for folder in folders for each in vars(folder).values() if isinstance(each, Family)
    )


def architectures() -> tuple[str, ...]:
    """Return the config.json names of all architectures with a family of their own."""
    return tuple(name for family in families() for name in family.architectures)


def find_family(name: str) -> Family:
    """Return the family for an architecture or a model type, or else the one for all others."""
    for family in families():
        if name in family.architectures or name in family.model_types:
            return family
    return next(family for family in families() if family.package)


@cache
def gguf_facts() -> GgufFacts:
    """Return what all families state about GGUF files."""
    from saccade.gguf.known import join_facts  # here: folders of other files need none of it

    return join_facts(resolve_name(family.gguf) for family in families() if family.gguf)


def load_spec(folder: Path, options: Sequence[str] = ()) -> FamilySpec:
    """Read the facts of the checkpoint in `folder`.

    options: the family's own, NAME=VALUE.

    Raises CheckpointError. For an unknown architecture it lists the known ones, for an unreadable
    quantised checkpoint the known methods. Raises ConfigError for an option that the family does
    not have.
    """
    checkpoint = read_checkpoint(folder)
    read_quantization(checkpoint.config)
    architecture = checkpoint.architecture()
    family = find_family(architecture)
    if family.package and find_spec(family.package) is None:
        raise CheckpointError(
            f"{checkpoint.config.where}: {architecture} is not supported; supported are "
            f"{', '.join(architectures())}, and with {family.package}' own modules many more: "
            + how_to_install(f".[{family.package}]")
        )
    spec: FamilySpec = resolve_name(family.spec)(checkpoint)
    if not family.package:  # whose modules read all fields themselves
        refuse_unread(checkpoint)
    return spec.with_options(_read_options(options)) if options else spec


def _read_options(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not (name and sign):
            raise ConfigError(f"--family-option {option!r}: write it as NAME=VALUE")
        found[name] = value
    return found


def family_model(spec: FamilySpec) -> FamilyModel:
    """Return the network half of the family that read `spec`. Imports torch."""
    model: FamilyModel = resolve_name(find_family(spec.family).model)(spec)
    return model
