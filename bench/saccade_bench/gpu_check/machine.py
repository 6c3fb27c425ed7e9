"""The machine of a check, and the packages it needs. Only imports the standard library."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""The repository's root. If nothing is installed, the server and this distribution are found
through `PYTHONPATH`.
"""
PATHS = (str(ROOT), str(ROOT / "bench"))
COMMIT = "commit"
"""The file next to the wheels that contains the tree's commit."""

COMMON = ("torch", "numpy", "safetensors", "tokenizers", "tqdm")
ENGINE = (*COMMON, "blake3", "llguidance", "msgspec", "psutil", "uvloop")
SERVER = (
    *ENGINE,
    *("uvicorn", "click", "h11", "starlette", "anyio", "httptools", "httpx", "httpcore", "rich"),
    *("cyclopts", "attrs", "docstring_parser", "rich_rst", "hishel", "cachetools", "msgpack"),
    *("jinja2", "prometheus_client", "python_multipart", "pybase64", "PIL", "simplejpeg"),
    *("pyspng", "aiohttp"),
)
TESTS = (*ENGINE, "pytest", "transformers", "PIL")
PACKAGES = {"PIL": "pillow"}
"""Package names of imports, where they differ."""


def missing(modules: Sequence[str]) -> list[str]:
    """Return the packages of those modules that cannot be imported."""
    return [
        PACKAGES.get(module, module).replace("_", "-")
        for module in dict.fromkeys(modules)
        if importlib.util.find_spec(module) is None
    ]


def explain(absent: Mapping[str, Sequence[str]]) -> str:
    """Describe the missing packages of each stage, and how to provide them."""
    if not absent:
        return ""
    lines = [
        f"{stage} cannot run: not installed: {', '.join(names)}" for stage, names in absent.items()
    ]
    lines.append(
        "Where there is a network: python -m saccade_bench.gpu_check.plan --prepare .whl; here: "
        "--wheels .whl (a package may need others in turn; each run says what is still missing)"
    )
    return "\n".join(lines)


def keep_line(place: str, gpu: str = "") -> str:
    """Return the command that converts the results in `place` to files to commit."""
    words = re.findall(r"\w+", gpu.lower())
    name = next((word for word in words if word not in ("nvidia", "geforce", "rtx")), "GPU")
    module = "PYTHONPATH=.:bench python3 -m saccade_bench.gpu_check.report"
    return f"{module} {place} --out bench/results/{name}"


def hardware() -> dict[str, Any]:
    """Describe this machine without using torch, which may hang if its driver does."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu cores": os.cpu_count(),
    }
    with suppress(OSError):
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        found["cpu"] = names[0] if names else platform.processor()
        found["memory kB"] = int(Path("/proc/meminfo").read_text().split()[1])
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        for line in _said(query).splitlines()[:1]:
            found["gpu"], _, found["driver"] = line.rpartition(", ")
    return found


def versions(wheels: Path | None = None) -> dict[str, str | None]:
    """Return the versions of relevant packages and the commit.

    `wheels` is the folder that was sent with the tree, which may contain the commit.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError, subprocess.SubprocessError):
        found["saccade"] = _said(["git", "rev-parse", "HEAD"]).strip()
    if wheels and "saccade" not in found:
        with suppress(OSError):
            found["saccade"] = (wheels / COMMIT).read_text().strip()
    return found


def _said(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10, cwd=ROOT
    ).stdout
