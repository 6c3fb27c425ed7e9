"""Architecture name -> family: each `Family` in the `__init__.py` of a folder next to this file, or
of one that a plugin names. Also a model's folder, and the format of its files, in formats of
plugins too (`Plugin.formats`).

The records of plugins are imported if no family of the core's has the name, and then the modules of
the one family that is asked for. Only `family_model` imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.extras import how_to_install
from saccade.core.family import FamilySpec
from saccade.core.model_folder import resolve_model
from saccade.families.checkpoint import Section, read_checkpoint
from saccade.plugin import CheckpointFormat, Family
from saccade.plugins import plugins

if TYPE_CHECKING:
    from saccade.nn.family_model import FamilyModel


def stated_in(name: str) -> Iterator[Family]:
    """Yield the families that a package states, and those of its folders, by their names."""
    package = import_module(name)
    folders = [each.name for each in iter_modules(package.__path__, f"{name}.") if each.ispkg]
    for module in (package, *map(import_module, folders)):
        yield from (each for each in vars(module).values() if isinstance(each, Family))


@cache
def core_families() -> tuple[Family, ...]:
    """Return the families that are no plugin's."""
    return tuple(stated_in("saccade.families"))


@cache
def families() -> tuple[Family, ...]:
    """Return all families, the core's first."""
    packages = [plugin.families for plugin in plugins() if plugin.families]
    return (*core_families(), *(each for name in packages for each in stated_in(name)))


def architectures() -> tuple[str, ...]:
    """Return the config.json names of all architectures with a family of their own."""
    return tuple(name for family in families() for name in family.architectures)


def find_family(name: str) -> Family:
    """Return the family for an architecture or a model type, or else the one for all others.

    Raises CheckpointError, which lists the known ones, if there is none, or its package is missing.
    """
    for known in (core_families, families):
        for family in known():
            if name in family.architectures or name in family.model_types:
                return family
    supported = f"{name} is not supported; supported are {', '.join(architectures())}"
    other = next((each for each in families() if each.package), None)
    if other is None or other.package is None:
        raise CheckpointError(supported)
    if find_spec(other.package) is None:
        raise CheckpointError(
            f"{supported}, and with {other.package}' own modules many more: "
            + how_to_install(f".[{other.package}]")
        )
    return other


def load_spec(folder: Path, options: Sequence[str] = (), *, checked: bool = False) -> FamilySpec:
    """Read the facts of the checkpoint in `folder`.

    options: the family's own, NAME=VALUE. checked: another process has done so with success, and
    what is only refused need not be looked for.

    Raises CheckpointError. For an unknown architecture it lists the known ones, for an unreadable
    quantised checkpoint the known methods. Raises ConfigError for an option that the family does
    not have.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint.mentions_quantization and not checked:
        _check_quantization(checkpoint.config)
    architecture = checkpoint.architecture()
    try:
        family = find_family(architecture)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.config.where}: {error}") from None
    spec: FamilySpec = resolve_name(family.spec)(checkpoint)
    if not (family.package or checked):  # transformers' modules read all fields themselves
        from saccade.families.unread_fields import refuse_unread

        refuse_unread(checkpoint)
    if not checked:
        from saccade.families.unread_fields import refuse_generation

        refuse_generation(checkpoint.generation)
    return spec.with_options(_read_options(options)) if options else spec


def _check_quantization(config: Section) -> None:
    """Raise CheckpointError unless a plugin can read the quantised matrices."""
    checks = [plugin.quantization for plugin in plugins() if plugin.quantization]
    if not checks:
        raise CheckpointError(f"{config.where}: no installed plugin reads quantised checkpoints")
    for check in checks:
        resolve_name(check)(config)


def _read_options(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not (name and sign):
            raise ConfigError(f"--family-option {option!r}: expected NAME=VALUE")
        found[name] = value
    return found


def family_model(spec: FamilySpec) -> FamilyModel:
    """Return the network half of the family that read `spec`. Imports torch."""
    model: FamilyModel = resolve_name(find_family(spec.family).model)(spec)
    return model


def find_format(path: Path) -> CheckpointFormat | None:
    """Return the format of a file with weights. None: safetensors."""
    if path.suffix == ".safetensors":
        return None  # without a look at plugins
    formats = (each for plugin in plugins() for each in plugin.formats)
    return next((each for each in formats if each.suffix == path.suffix), None)


def resolve_checkpoint(
    model: str, revision: str | None = None, tower_file: str | None = None
) -> Path:
    """Return the checkpoint folder of `model`: "demo", a folder, a hub id, or a file or name that a
    plugin's format (GGUF) turns into a folder. `tower_file`: the separate file of the vision
    encoder (--mmproj), for formats that have one.

    Raises CheckpointError.
    """
    for plugin in plugins():
        for each in plugin.formats:
            if _may_be(each, model, tower_file):
                folder: Path | None = resolve_name(each.folder)(model, revision, tower_file)
                if folder is not None:
                    return folder
    if tower_file:
        raise CheckpointError(
            f"--mmproj {tower_file}: {model} is not in a format with a separate vision file"
        )
    return resolve_model(model, revision)


def _may_be(each: CheckpointFormat, model: str, tower_file: str | None) -> bool:
    """Return True if a model may be in a format, so that its modules have to be asked."""
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        return any(path.glob(f"*{each.suffix}"))
    named = each.suffix.removeprefix(".") in model.lower() or (":" in model and not path.exists())
    return named or bool(tower_file)
