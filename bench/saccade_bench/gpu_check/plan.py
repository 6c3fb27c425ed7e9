"""The exact commands to send to a machine with a GPU, with the files to carry and their time
limits.

    python -m saccade_bench.gpu_check.plan --prepare    (once, with a network: fills .whl, 27 MB)
    python -m saccade_bench.gpu_check.plan              (prints the commands)
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from saccade_bench.gpu_check.machine import COMMIT, ROOT, keep_line
from saccade_bench.gpu_check.stages import COMMANDS, Command

CARRIED = ".whl"
"""Folder of wheels. It is ignored by git, so it must be carried explicitly."""
BEFORE = f"{CARRIED}/a.json"
"""Where later commands look for summary.json of the first one."""
FA3 = "_vllm_fa3_C.abi3.so"
FA3_WHEEL = "vllm==0.21.0"
FA3_MODULE = Path(__file__).parent / "carried" / "flash_attn_interface.py"
"""Wraps the library as a package that `find_fa3` finds. Its wheel has 248 MB, and the library alone
8 MB when compressed by xz.
"""
MAX_CHARACTERS = 2000
MAX_CARRIED_BYTES = 64 << 20
"""Maximum for one command, including tracked files."""
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
"""Packages that are known to be installed there, with their dependencies."""
PLATFORMS = (
    "manylinux_2_31_x86_64",  # llguidance
    "manylinux_2_24_x86_64",  # vllm
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)


def line_of(command: Command) -> str:
    """Return the shell command to run in the repository's root. Files in $OUT are returned."""
    after = f" --after {BEFORE}" if command.name == "c" else ""
    run = (
        f"python3 -u -m saccade_bench.gpu_check --command {command.name} --wheels {CARRIED}{after}"
    )
    return f'set -o pipefail; PYTHONPATH=.:bench {run} --out "$OUT" 2>&1 | tee "$OUT/command.txt"'


def plan() -> Iterator[str]:
    """Yield the lines that describe the commands."""
    folder = ROOT / CARRIED
    wheels = sorted(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in folder.glob("*.*"))
    lacking = len(wheel_names()) - len(wheels)
    whole = size + tracked_bytes()
    yield (
        f"Carry {CARRIED}: {len(wheels)} wheels, {size / 1e6:.1f} MB, with the tree "
        f"{whole / (1 << 20):.1f} of {MAX_CARRIED_BYTES >> 20} MiB."
    )
    if whole > MAX_CARRIED_BYTES:
        yield "NOT READY: that is too much for one command"
    if lacking > 0 or not (folder / COMMIT).is_file():
        yield f"NOT READY: {lacking} wheels or {CARRIED}/{COMMIT} are not there: --prepare"
    for command in COMMANDS.values():
        stages = ", ".join(stage.name for stage in command.stages)
        yield ""
        yield f"{command.name.upper()}, at most {command.seconds:.0f} s: {stages}"
        yield line_of(command)
    yield ""
    yield f"Before C: copy A's summary.json to {BEFORE}: what failed is run again, first."
    yield "Afterwards, before anything is mended, commit all that came back, and fill the table:"
    yield f"  {keep_line('PLACE')} --fill docs/speed.md"


def tracked_bytes() -> int:
    """Return the size of the tracked files, which are sent with each command."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True).stdout
    paths = (ROOT / name.decode() for name in names.split(b"\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def prepare(folder: Path) -> int:
    """Download the wheels and write the commit. Returns an exit status."""
    folder.mkdir(exist_ok=True)
    (folder / Path(BEFORE).name).unlink(missing_ok=True)  # left by an earlier check
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    (folder / COMMIT).write_text(head.stdout)
    return download(folder) or carry_fa3(folder)


# ---- packages, as wheels


def wheel_names() -> list[str]:
    """Return the names of the wheels' packages, without versions."""
    lines = (line.split("#")[0].split("=")[0].strip() for line in LIST.read_text().splitlines())
    return [line for line in lines if line]


def pip_download(out: Path, python: str) -> list[str]:
    """Return pip's command to download wheels for the GPU machine's platform."""
    tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
    which = ("--no-deps", "--only-binary", ":all:", "--python-version", python)
    whole = ("-m", "pip", "download", *which, *tags, "--dest", str(out))
    return [sys.executable, *whole]


def download_command(out: Path, python: str) -> list[str]:
    return [*pip_download(out, python), "--requirement", str(LIST)]


def download(out: Path, python: str = "3.12") -> int:
    """Download the wheels into a folder. Returns pip's exit status."""
    return subprocess.run(download_command(out, python), check=False).returncode


def carry_fa3(folder: Path, python: str = "3.12") -> int:
    """Extract FlashAttention-3's library from vLLM's wheel, which is built for the same torch and
    CUDA. Returns pip's exit status.
    """
    if (packed := folder / f"{FA3}.xz").is_file():
        return 0
    with tempfile.TemporaryDirectory() as name:
        if status := subprocess.run(
            [*pip_download(Path(name), python), FA3_WHEEL], check=False
        ).returncode:
            return status
        (path,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            (member,) = (each for each in wheel.namelist() if each.endswith(FA3))
            packed.write_bytes(lzma.compress(wheel.read(member), preset=9))
    return 0


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpack all wheels of a folder and FlashAttention-3 into `site`, without pip. Return the names
    of files that could not be unpacked.
    """
    spoilt = []
    for path in sorted(folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
        except (OSError, zipfile.BadZipFile):
            spoilt.append(path.name)
    if (packed := folder / f"{FA3}.xz").is_file():
        try:
            (site / FA3).write_bytes(lzma.decompress(packed.read_bytes()))
            shutil.copy(FA3_MODULE, site)
        except (OSError, lzma.LZMAError, EOFError):
            spoilt.append(packed.name)
    return spoilt


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="download what travels")
    args = parser.parse_args(arguments)
    if args.prepare and (status := prepare(ROOT / CARRIED)):
        return status
    print("\n".join(plan()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
