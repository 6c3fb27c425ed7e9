"""The engines of the scoreboard: how each is installed, given the demo model, and started.

An engine's environment is a folder of its own, and its packages come from PyPI.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from saccade import __version__
from saccade.core.model_folder import DEMO
from saccade_bench.peers.llama_convert import convert

HERE = Path(__file__).parent
CONVERTER = "llama-cpp-python==0.3.36"
"""Its source archive has llama.cpp's converter."""
NO_TENANTS = "the engine documents no cache_salt"
NO_PARTS = "the engine documents no regions of images"


@dataclass(frozen=True, slots=True)
class ScoredEngine:
    """`serve` and `cold` are command lines with and without caches, in which {python}, {model} and
    {port} are replaced. `make` writes the demo model in the engine's format to a folder.
    `absent`: cases about features that the engine does not have, and why.
    """

    name: str
    package: str
    serve: str
    cold: str
    make: Callable[[Path], Path]
    absent: Mapping[str, str] = field(default_factory=dict)

    def python(self, home: Path) -> Path:
        """Return the interpreter of the engine's environment. Installs it if it is not there."""
        if not self.package:
            return Path(sys.executable)
        folder = home / self.name
        python = folder / "bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", self.package], check=True)
        return python

    def version(self, home: Path) -> str:
        if not self.package:
            return __version__
        name = self.package.partition("==")[0]
        code = f"from importlib.metadata import version; print(version({name!r}))"
        command: list[str | Path] = [self.python(home), "-c", code]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        return f"{name} {found}"


def as_gguf(folder: Path) -> Path:
    """Convert the demo model. Its tokenizer ignores merges and splits digits, as "tekken" does."""
    out = folder / "demo-gguf"
    if not (out / "mmproj-model.gguf").exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        name = CONVERTER.partition("==")[0]
        subprocess.run([*command, name, "-d", folder, CONVERTER], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        convert(source, DEMO, out, "f32", "tekken")
    return out


ENGINES = (
    ScoredEngine(
        "saccade",
        "",
        "{python} -m saccade serve {model} --port {port} --allow-private-media",
        "{python} -m saccade serve {model} --port {port} --tune disable_radix_cache=true "
        "--embedding-cache-device-mb 0 --tune embedding_cache_host_mb=0",
        lambda _folder: DEMO,
    ),
    ScoredEngine(
        "llama.cpp",
        "xllamacpp==2026.10.11549",
        f"{{python}} {HERE / 'llama_server.py'} {{model}} {{port}}",
        f"{{python}} {HERE / 'llama_server.py'} {{model}} {{port}} --cold",
        as_gguf,
        {
            "tenant": NO_TENANTS,
            "uuid": "the engine documents no uuid of images",
            "region": NO_PARTS,
            "page": NO_PARTS,
            "limits": "the engine documents no mm_processor_kwargs",
            "adapter": "no adapter is loaded",
        },
    ),
)
