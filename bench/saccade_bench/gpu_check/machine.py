"""What a check runs on, what it needs, and what is missing. Loads torch only when asked."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""Of the repository: on a machine with nothing installed, the server and this distribution are
found by `PYTHONPATH`.
"""
PATHS = (str(ROOT), str(ROOT / "bench"))

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
"""What an import is called as a package, where that differs."""


def missing(modules: Sequence[str]) -> list[str]:
    """Packages without which these cannot be imported."""
    return [
        PACKAGES.get(module, module).replace("_", "-")
        for module in dict.fromkeys(modules)
        if importlib.util.find_spec(module) is None
    ]


def explain(absent: Mapping[str, Sequence[str]]) -> str:
    """What lacks for which stage, and what to do."""
    if not absent:
        return ""
    lines = [
        f"{stage} cannot run: not installed: {', '.join(names)}" for stage, names in absent.items()
    ]
    names = " ".join(sorted({name for each in absent.values() for name in each}))
    target = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines += (
        "Where there is a network:  pip download --no-deps --only-binary=:all: "
        f"--python-version {target} -d wheels {names}",
        "Here:                      python3 -m pip install --no-index --no-deps --target "
        "site wheels/*.whl; export PYTHONPATH=site",
        "(a package may need others in turn; each run says what is still missing)",
    )
    return "\n".join(lines)


def hardware() -> dict[str, Any]:
    """Of this machine, as far as it says."""
    import torch

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
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": card.name,
            "gpus": torch.cuda.device_count(),
            "gpu memory": card.total_memory,
            "compute capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
        }
        with suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = _said(query).split("\n")[0]
    return found


def versions() -> dict[str, str | None]:
    """Of what figures depend on."""
    import torch

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "transformers", "numpy", "safetensors", "tokenizers", "msgspec"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError, subprocess.SubprocessError):
        found["saccade"] = _said(["git", "rev-parse", "HEAD"]).strip()
    return found


def _said(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT
    ).stdout
