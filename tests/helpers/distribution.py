"""A distribution with a plugin, as `pip install` would leave it in a folder of packages."""

from __future__ import annotations

from pathlib import Path


def install_plugin(site: Path, name: str) -> None:
    """Write what names `PLUGIN` in the module `name` as a plugin. The module is the caller's."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[saccade.plugins]\n{name} = {name}:PLUGIN\n")
