"""The engines of the scoreboard: how each is installed, given the demo model, and started.

An engine's environment is a folder of its own, and its packages come from PyPI.
"""

from __future__ import annotations

import json
import shutil
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
LACKING = {
    "tenant": "the engine documents no cache_salt",
    "uuid": "the engine documents no uuid of images",
    "region": "the engine documents no regions of images",
    "page": "the engine documents no regions of images",
    "limits": "the engine documents no mm_processor_kwargs",
    "adapter": "no adapter is loaded",
}
"""Cases about features that most engines do not have."""


@dataclass(frozen=True, slots=True)
class ScoredEngine:
    """`serve` and `cold` are command lines with and without caches, in which {python}, {model},
    {port} and {scratch}, an empty folder, are replaced. `packages`: the engine's own comes first.
    `make` writes the demo model in the engine's format to a folder. `absent`: cases about features
    that the engine does not have, and why.
    """

    name: str
    packages: tuple[str, ...]
    serve: str
    cold: str
    make: Callable[[Path], Path]
    absent: Mapping[str, str] = field(default_factory=dict)

    def python(self, home: Path) -> Path:
        """Return the interpreter of the engine's environment. Installs it if it is not there."""
        if not self.packages:
            return Path(sys.executable)
        folder = home / self.name
        python = folder / "bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *self.packages], check=True)
        return python

    def version(self, home: Path) -> str:
        if not self.packages:
            return __version__
        name = self.packages[0].partition("==")[0]
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


def as_published(folder: Path) -> Path:
    """Copy the demo model with the names that Qwen3-VL's published configurations have.

    mlx-vlm reads these alone. vllm-mlx knows a vision model by its folder's name.
    """
    out = folder / "Qwen3-VL-demo"
    shutil.copytree(DEMO, out, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = {**rope, "type": "default"}
    config["vision_config"]["model_type"] = "qwen3_vl"
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def vllm_mlx(name: str, *packages: str, options: str = "", **absent: str) -> ScoredEngine:
    serve = f"{{python}} -m vllm_mlx.cli serve {{model}} --port {{port}}{options}"
    cold = f"{serve} --disable-prefix-cache"
    return ScoredEngine(name, packages, serve, cold, as_published, {**LACKING, **absent})


MLX_VLM = (
    "{python} -m mlx_vlm.server --model {model} --host 127.0.0.1 --port {port} --top-logprobs-k 5"
)
ENGINES = (
    ScoredEngine(
        "saccade",
        (),
        "{python} -m saccade serve {model} --port {port} --allow-private-media "
        "--embedding-cache-dir {scratch}/embeddings:256MiB",
        "{python} -m saccade serve {model} --port {port} --tune disable_radix_cache=true "
        "--embedding-cache-device-mb 0 --tune embedding_cache_host_mb=0",
        lambda _folder: DEMO,
    ),
    ScoredEngine(
        "llama.cpp",
        ("xllamacpp==2026.10.11549",),
        f"{{python}} {HERE / 'llama_server.py'} {{model}} {{port}}",
        f"{{python}} {HERE / 'llama_server.py'} {{model}} {{port}} --cold",
        as_gguf,
        LACKING,
    ),
    ScoredEngine(
        "mlx-vlm",
        ("mlx-vlm==0.7.10", "mlx[cpu]==0.32.4"),
        f"env APC_ENABLED=1 APC_DISK_PATH={{scratch}} {MLX_VLM}",
        f"env APC_ENABLED=0 {MLX_VLM} --vision-cache-size 0",
        as_published,
        {**LACKING, "tenant": f"{LACKING['tenant']}: a header names the tenant"},
    ),
    vllm_mlx("vllm-mlx", "vllm-mlx==0.6.0", "mlx[cpu]==0.32.4", options=" --mllm"),
    vllm_mlx(
        "vllm-mlx-0.2.6",
        "vllm-mlx==0.2.6",
        "mlx[cpu]==0.30.6",
        "mlx-vlm==0.3.12",
        "mlx-lm==0.30.7",
        "transformers==5.3.0",
        aborted="requests after an aborted stream got no answer within 4 minutes",
    ),
)
