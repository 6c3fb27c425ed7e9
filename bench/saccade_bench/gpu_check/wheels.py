"""What a CUDA machine without network lacks: downloaded as wheels on one with network, and unpacked
there (6 MB).
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

LIST = Path(__file__).with_name("wheels.txt")
THERE = frozenset(
    {
        *("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "pytest"),
        *("huggingface-hub", "tqdm", "psutil", "uvloop", "jinja2", "pillow", "prometheus-client"),
        *("httpx", "httpcore", "h11", "anyio", "click", "rich", "attrs", "aiohttp", "msgpack"),
        *("packaging", "pyyaml", "filelock", "requests", "fsspec", "regex", "typing-extensions"),
        *("certifi", "idna", "sniffio", "markupsafe", "markdown-it-py", "pygments", "mdurl"),
        *("aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl"),
        *("iniconfig", "pluggy", "docutils", "setuptools", "hf-xet", "sympy", "networkx"),
        *("mpmath", "typer", "shellingham"),
    }
)
"""Packages that such a machine is known to have, with what these need in turn."""
PLATFORMS = (
    "manylinux_2_31_x86_64",  # llguidance
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)


def names() -> list[str]:
    lines = (line.split("#")[0].strip() for line in LIST.read_text().splitlines())
    return [line for line in lines if line]


def command(out: Path, python: str) -> list[str]:
    """pip's, for a machine other than this one."""
    tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
    which = ("--no-deps", "--only-binary", ":all:", "--python-version", python)
    whole = ("-m", "pip", "download", *which, *tags, "--dest", str(out))
    return [sys.executable, *whole, "--requirement", str(LIST)]


def download(out: Path, python: str = "3.12") -> int:
    """The wheels into a folder; pip's status."""
    return subprocess.run(command(out, python), check=False).returncode


def unpack(folder: Path, site: Path) -> list[str]:
    """All wheels of a folder into `site`, without pip; names of those that could not be."""
    spoilt = []
    for path in sorted(folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
        except (OSError, zipfile.BadZipFile):
            spoilt.append(path.name)
    return spoilt
