"""Commands that need more than a plain installation has, and what brings it: the one place that
says so. Imports nothing of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from saccade.core.errors import ConfigError

SOURCE = Path(__file__).parents[2]
"""Where `lab/` lies in a source checkout. An installed wheel has none."""
BENCH = "pip install '.[bench]' in the folder of Saccade's source"
LAB = "it is run from Saccade's source: pip install -e '.[dev]' in that folder"

BROUGHT: dict[str, tuple[str, str]] = {
    "bench serve": ("aiohttp", BENCH),
    "bench ab": ("aiohttp", BENCH),
    "bench report": ("matplotlib", BENCH),
    "probe": ("aiohttp", BENCH),
    "eval": ("aiohttp", BENCH),
    "bench media": ("lab", LAB),
    "bench encoder": ("lab", LAB),
    "bench kernels": ("lab", LAB),
    "bench eviction": ("lab", LAB),
    "make-checkpoint": ("lab", LAB),
    "simulate": ("lab", LAB),
}
"""By command: the module that it cannot do without, and what brings that."""


def has_lab() -> bool:
    """Whether this is a source checkout."""
    return (SOURCE / "lab" / "cli.py").is_file()


def check_brought(command: str) -> None:
    """Raises ConfigError where `command` lacks what it needs."""
    module, brings = BROUGHT[command]
    if not (has_lab() if module == "lab" else find_spec(module)):
        what = "" if module == "lab" else f"{module}: "
        raise ConfigError(f"saccade {command} needs more than is installed: {what}{brings}")
