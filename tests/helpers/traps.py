"""A folder whose files note that they were imported: one for each module that a process could
import by its name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import packages_distributions
from pathlib import Path

CODE = "open({marker!r}, 'a').write(__name__ + '\\n')\nraise ImportError(__name__)\n"
SITE = {"sitecustomize", "usercustomize"}


def lay_traps(folder: Path, only: Collection[str] = ()) -> Path:
    """Fill `folder`, if need be with the modules `only`. Returns the file with the names of those
    that were imported.
    """
    marker = folder.parent / f"imported-from-{folder.name}"
    marker.touch()
    folder.mkdir()
    modules = {*sys.stdlib_module_names, *packages_distributions(), *SITE, "saccade"}
    for module in only or modules:
        path = folder / f"{module}.py"
        if module == "saccade":
            path = folder / module / "__init__.py"
            path.parent.mkdir()
        if "/" not in module:
            path.write_text(CODE.format(marker=str(marker)))
    (folder / ".numba_config.yaml").write_text("debug: [")
    return marker
