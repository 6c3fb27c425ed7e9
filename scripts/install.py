"""Installs Saccade into the Python that runs this: `python scripts/install.py PIP-ARGUMENTS`, for
example `'.[cpu]'`. PyTorch comes first.

Owns the choice of PyTorch's build: the public index has the one for CUDA, gigabytes that a machine
without an NVIDIA driver cannot use. There PyTorch's own index of CPU builds is offered to pip
beside what it is configured for, if that index answers. Says what will be fetched, and how large it
is, before pip begins. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Documented by PyTorch: https://pytorch.org/get-started/locally."""
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PATIENCE = 5.0
"""Seconds that an index or a file's server has to answer: only a choice, and a figure, wait."""
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
CUDA_PACKAGES = ("nvidia-", "cuda-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of pip."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "any"),
        default="auto",
        help="cpu: a CPU build where one can be had; any: what pip prefers; auto: cpu where there "
        "is no NVIDIA driver",
    )
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="index of PyTorch's CPU builds")
    parser.add_argument("--constraint", "-c", type=Path, default=CONSTRAINTS)
    options, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("name what to install, as for pip: '.[cpu]'")
    cpu = options.torch == "cpu" or (options.torch == "auto" and not has_driver())
    constraints = ["-c", str(options.constraint)]
    try:
        wanted = [*constraints, *(index_options(options.cpu_index) if cpu else ()), "torch"]
        for line in announce(wanted, cpu):
            print(line, flush=True)
        return pip(*wanted) or pip(*constraints, *rest)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def has_driver(files: Sequence[Path] = DRIVER_FILES) -> bool:
    """Whether this machine has an NVIDIA driver (under WSL only its tool shows)."""
    return any(path.exists() for path in files) or shutil.which("nvidia-smi") is not None


def index_options(index: str) -> list[str]:
    """Options that offer `index` to pip, beside what it is configured for; none if it does not
    answer, for pip would ask it again and again. A CPU build's version (2.13.0+cpu) is above that
    of the plain one, so pip takes it from whichever place has it.
    """
    if answers(f"{index.rstrip('/')}/torch/"):
        return ["--extra-index-url", index]
    print(f"{index} does not answer: pip takes the torch that it finds elsewhere", flush=True)
    return []


def answers(url: str, patience: float = PATIENCE) -> bool:
    """Whether `url` can be read, known within `patience` seconds whatever names and proxies do."""
    found = threading.Event()
    asked = threading.Event()

    def ask() -> None:
        with suppress(OSError, ValueError):
            with urlopen(url, timeout=patience):
                found.set()
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    asked.wait(patience)
    return found.is_set()


def announce(wanted: Sequence[str], cpu: bool) -> Iterator[str]:
    """What pip is going to fetch for torch, and its size; nothing where torch is there already."""
    packages = resolve(wanted)
    torch = next((each for each in packages if each["metadata"]["name"] == "torch"), None)
    if torch is None:
        return
    sizes = list(ThreadPoolExecutor(16).map(size_of, (url_of(each) for each in packages)))
    told = f"{sum(sizes) / 1e6:,.0f} MB" + ("" if all(sizes) else " and more (not all tell)")
    yield f"torch {torch['metadata']['version']} and what it needs: {told}"
    cuda = [each for each in packages if each["metadata"]["name"].startswith(CUDA_PACKAGES)]
    if cuda and cpu:
        yield (
            f"{len(cuda)} packages of that are CUDA's, of no use here: to do without, name an "
            "index of PyTorch's CPU builds (--cpu-index URL), or a folder with one to pip "
            "(PIP_FIND_LINKS=FOLDER)"
        )


def resolve(wanted: Sequence[str]) -> list[dict[str, dict[str, str]]]:
    """What pip would install, as its report has it; nothing where it cannot say, which the
    installation itself will explain.
    """
    print("asking pip which torch it finds ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        ask = ("--dry-run", "--quiet", "--report", str(report))
        if pip(*ask, *wanted, silent=True):
            return []
        packages: list[dict[str, dict[str, str]]] = json.loads(report.read_text())["install"]
        return packages


def url_of(package: dict[str, dict[str, str]]) -> str:
    return package["download_info"]["url"]


def size_of(url: str) -> int:
    """Bytes of a file, local or not; 0 where nobody says."""
    with suppress(OSError, ValueError, TypeError):
        if url.startswith("file:"):
            return Path(unquote(urlsplit(url).path)).stat().st_size
        with urlopen(Request(url, method="HEAD"), timeout=PATIENCE) as reply:
            return int(reply.headers["Content-Length"])
    return 0


def pip(*arguments: str, silent: bool = False) -> int:
    """`pip install`; its exit status. `silent`: its output is dropped."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    return subprocess.run(command, capture_output=silent).returncode


if __name__ == "__main__":
    sys.exit(main())
