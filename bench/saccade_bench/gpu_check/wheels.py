"""Downloads what a CUDA machine without network lacks, on one with network:

    python -m saccade_bench.gpu_check.wheels --out .wheels     (6 MB)

and there, before a check:

    python3 -m pip install --no-index --no-deps --target site .wheels/*.whl
    export PYTHONPATH=.:site
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".wheels"), help="(%(default)s)")
    parser.add_argument("--python", default="3.12", help="of that machine (%(default)s)")
    args = parser.parse_args(arguments)
    return subprocess.run(command(args.out, args.python), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
