"""Finds the model family of an architecture, the directory of a model, and the format of its weight
files.

Families are the `Family` records in the `__init__.py` of the directories next to this file, and of
packages that plugins list. Plugins can also add formats and ways to find directories
(`plugin.Checkpoints`). Plugins' records are imported only if no core family supports the
architecture. Then only the modules of the family that is used are imported. Only `family_model`
imports torch.
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
from saccade.plugins import import_field, plugins

if TYPE_CHECKING:
    from saccade.nn.family_model import FamilyModel


def stated_in(name: str) -> Iterator[Family]:
    """Yield the `Family` records in the `__init__.py` of a package and of its subpackages."""
    package = import_module(name)
    folders = [each.name for each in iter_modules(package.__path__, f"{name}.") if each.ispkg]
    for module in (package, *map(import_module, folders)):
        yield from (each for each in vars(module).values() if isinstance(each, Family))


@cache
def core_families() -> tuple[Family, ...]:
    """Return the families of the core, without those of plugins."""
    return tuple(stated_in("saccade.families"))


@cache
def families() -> tuple[Family, ...]:
    """Return all families. Those of the core come first."""
    packages = [name for each in plugins() if (name := each.checkpoints.families)]
    return (*core_families(), *(each for name in packages for each in stated_in(name)))


def architectures() -> tuple[str, ...]:
    """Return the names of all architectures that a family lists, as they occur in config.json."""
    return tuple(name for family in families() for name in family.architectures)


def find_family(name: str) -> Family:
    """Return the family that lists an architecture or a model type.

    If there is none, return the family that runs any model with another package's code. Raises
    CheckpointError with a list of the supported architectures if there is no such family, or its
    package is not installed.
    """
    for known in (core_families, families):
        for family in known():
            if name in family.architectures or name in family.model_types:
                return family
    supported = f"{name} is not supported (supported: {', '.join(architectures())})"
    other = next((each for each in families() if each.package), None)
    if other is None or other.package is None:
        raise CheckpointError(supported)
    if find_spec(other.package) is None:
        raise CheckpointError(
            f"{supported}. Many others run on {other.package}' own modules: "
            + how_to_install(f".[{other.package}]")
        )
    return other


def load_spec(folder: Path, options: Sequence[str] = (), *, checked: bool = False) -> FamilySpec:
    """Return the spec of the checkpoint in `folder`: its sizes, image preprocessing, prompts and so
    on.

    Raises CheckpointError, with a list of supported architectures or quantization methods if that
    is the reason, and ConfigError if the family has no such option.

    options: family options, as NAME=VALUE.
    checked: True if another process has read the spec successfully. Checks for unsupported settings
        are then skipped.
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
    if not (family.package or checked):  # transformers' modules read all fields
        from saccade.families.unread_fields import refuse_unread

        refuse_unread(checkpoint)
    if not checked:
        from saccade.families.unread_fields import refuse_generation

        refuse_generation(checkpoint.generation)
    return spec.with_options(_read_options(options)) if options else spec


def _check_quantization(config: Section) -> None:
    checks = import_field(lambda plugin: plugin.checkpoints.quantization)
    if not checks:
        raise CheckpointError(f"{config.where}: no installed plugin reads quantized checkpoints")
    for check in checks:
        check(config)


def _read_options(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not (name and sign):
            raise ConfigError(f"--family-option {option!r}: expected NAME=VALUE")
        found[name] = value
    return found


def family_model(spec: FamilySpec) -> FamilyModel:
    """Return the object that builds the network of `spec`. This imports torch."""
    model: FamilyModel = resolve_name(find_family(spec.family).model)(spec)
    return model


def find_format(path: Path) -> CheckpointFormat | None:
    """Return the plugin's format of a weight file, or None for safetensors and unknown formats."""
    if path.suffix == ".safetensors":
        return None  # does not import plugins
    formats = (each for plugin in plugins() for each in plugin.checkpoints.formats)
    return next((each for each in formats if each.suffix == path.suffix), None)


def resolve_checkpoint(
    model: str, revision: str | None = None, tower_file: str | None = None
) -> Path:
    """Return the directory of the checkpoint `model`. Raises CheckpointError.

    model: "demo", a directory, a hub id, or a file or name in a plugin's format (GGUF). For the
        latter, a directory is created.
    revision: the revision to download from the hub, or None for the default.
    tower_file: a separate file with the vision encoder (--mmproj), for formats that have it.
    """
    for plugin in plugins():
        for each in plugin.checkpoints.formats:
            if _may_be(each, model, tower_file):
                folder: Path | None = resolve_name(each.folder)(model, revision, tower_file)
                if folder is not None:
                    return folder
    if tower_file:
        raise CheckpointError(
            f"--mmproj {tower_file}: {model} is not in a format with a separate file for the "
            "vision encoder"
        )
    return resolve_model(model, revision)


def _may_be(each: CheckpointFormat, model: str, tower_file: str | None) -> bool:
    """Return True if the format's module must be imported to check whether `model` has this
    format.
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        return any(path.glob(f"*{each.suffix}"))
    named = each.suffix.removeprefix(".") in model.lower() or (":" in model and not path.exists())
    return named or bool(tower_file)
