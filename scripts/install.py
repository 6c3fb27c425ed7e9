"""Installs Saccade into the Python that runs this: `python scripts/install.py PIP-ARGUMENTS`, for
example `'.[cpu]'`. PyTorch comes first. It is installed by pip, or by uv if this Python has no pip,
as in the environments that uv creates.

The public index has PyTorch's build for CUDA, with gigabytes that a machine without an NVIDIA
driver cannot use. On such a machine, PyTorch's own index of CPU builds is added to the indexes of
pip or uv, if it responds. If no CPU build is found, the user is asked to confirm, unless there is
no terminal. What will be downloaded is printed first, with its size. The script only uses the
standard library, because nothing is installed yet. Older versions of Python can parse it, so that
they can report that they are too old.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Documented by PyTorch: https://pytorch.org/get-started/locally."""
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
OLDEST = (3, 11)
"""The minimum version of Python, as in pyproject.toml."""
NEWER = tuple(f"python3.{minor}" for minor in (12, 13, 11, 14))
"""Names of suitable Python programs, the best tested first."""
PATIENCE = 5.0
"""Timeout in seconds for an index or a file's server, which only improve the choice of a build."""
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
CUDA_PACKAGES = ("nvidia-", "cuda-")
UNPACKED = 2.0
"""Size of torch's CUDA build on disk, relative to the download's size."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of pip or uv, 2 if it cannot start, or 1 if the user declined."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "any"),
        default="auto",
        help="cpu: a CPU build where one can be had; any: what pip or uv prefers; auto: cpu where "
        "there is no NVIDIA driver",
    )
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="index of PyTorch's CPU builds")
    parser.add_argument("--constraint", "-c", type=Path, default=CONSTRAINTS)
    parser.add_argument(
        "--venv", type=Path, help="only make an environment there, or keep the one that is there"
    )
    parser.add_argument("--goal", help="what was typed, if make runs this: for messages")
    options, rest = parser.parse_known_args(arguments)
    goal = options.goal
    if options.venv is not None:
        return make_environment(options.venv, goal)
    if reason := too_old(sys.version_info[:3], goal, rest):
        parser.exit(2, f"{reason}\n")
    if not rest:
        parser.error("name what to install, as for pip: '.[cpu]'")
    tool = installer()
    if tool is None:
        parser.error("this Python has no pip, and there is no uv on the PATH: install one of them")
    cpu = options.torch == "cpu" or (options.torch == "auto" and not has_driver())
    constraints = ["-c", str(options.constraint)]
    try:
        index = tool.beside(options.cpu_index) if cpu and offers(options.cpu_index) else ()
        wanted = [*constraints, *index, "torch"]
        with stage(f"asking {tool.name} which torch it finds"):
            found = tool.resolve(wanted)
        for line in announce(found):
            print(line, flush=True)
        if cpu and any(is_cuda(each) for each in found):
            for line in without_cuda(found, tool.folder, goal, rest):
                print(line, flush=True)
            if not wants_to_go_on():
                return 1
        with stage("installing torch (1 of 2)"):
            status = tool.install(*wanted)
        if status:
            return status
        with stage(f"installing {shlex.join(rest)} (2 of 2)"):
            return tool.install(*constraints, *rest)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def too_old(version: tuple[int, ...], goal: str | None, rest: Sequence[str] = ()) -> str | None:
    """Return an error message for a Python that cannot run Saccade, or None."""
    if version[:2] >= OLDEST:
        return None
    newer = next((each for each in NEWER if runs(each)), None)
    word = newer or NEWER[0]
    typed = f"{goal} PYTHON={word}"
    if not goal:
        again = shlex.join((".venv/bin/python", "scripts/install.py", *rest))
        typed = f"{word} -m venv .venv && {again}"
    oldest, this = (".".join(map(str, each)) for each in (OLDEST, version))
    missing = "" if newer else "No newer Python is on the PATH: install one. "
    return f"Saccade needs Python {oldest} or later; this is {this}. {missing}Type: {typed}"


def runs(python: str) -> bool:
    """Return True if a program with this name exists and runs."""
    with suppress(OSError):
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    return False


def make_environment(folder: Path, goal: str | None) -> int:
    """Create a virtual environment in `folder`, or keep an existing one if its Python is new
    enough.

    Returns 0 if it was kept, 2 if this Python is too old, and else the status of `python -m venv`.
    """
    there = version_in(folder)
    if there[:2] >= OLDEST:
        if there[:2] != sys.version_info[:2]:
            told = ".".join(map(str, there))
            print(f"{folder} has Python {told} and is kept (make clean removes it)", flush=True)
        return 0
    if reason := too_old(sys.version_info[:3], goal):
        print(reason, file=sys.stderr)
        return 2
    if folder.exists():
        told = f"Python {'.'.join(map(str, there))}" if there else "no Python that runs"
        print(f"{folder} has {told}: it is made anew", flush=True)
    status = 1
    try:
        command = [sys.executable, "-m", "venv", "--clear", str(folder)]
        with stage(f"making {folder}"):
            status = subprocess.run(command).returncode
    finally:
        if status:  # remove an incomplete environment, which would be kept the next time
            shutil.rmtree(folder, ignore_errors=True)
    return status


def version_in(environment: Path) -> tuple[int, ...]:
    """Return the version of an environment's Python, or () if it does not run."""
    ask = "import sys; print(*sys.version_info[:3])"
    with suppress(OSError, ValueError):
        command = [str(environment / "bin" / "python"), "-c", ask]
        done = subprocess.run(command, capture_output=True, text=True)
        return tuple(map(int, done.stdout.split()))
    return ()


def has_driver(files: Sequence[Path] = DRIVER_FILES) -> bool:
    """Return True if this machine has an NVIDIA driver. Under WSL, only nvidia-smi reveals it."""
    return any(path.exists() for path in files) or shutil.which("nvidia-smi") is not None


def offers(index: str) -> bool:
    """Return True if `index` responds. Otherwise, pip or uv would retry it many times.

    A CPU build's version (2.13.0+cpu) sorts after the plain one, so it is preferred on any index.
    """
    if answers(f"{index.rstrip('/')}/torch/"):
        return True
    print(f"{index} does not answer: torch comes from elsewhere", flush=True)
    return False


def answers(url: str, patience: float = PATIENCE) -> bool:
    """Return whether `url` can be read within `patience` seconds, including DNS and proxies."""
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


class Package(NamedTuple):
    """A package to be installed. `size` is in bytes, or 0 if unknown."""

    name: str
    version: str
    size: int


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the name of a step, and on a terminal its elapsed time."""
    print(f"{name} ...", flush=True)
    ended = threading.Event()

    def tick() -> None:
        began = time.monotonic()
        while not ended.wait(1):
            print(f"\r{time.monotonic() - began:.0f} s ", end="", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    if sys.stdout.isatty():
        ticker.start()
    try:
        yield
    finally:
        ended.set()
        if ticker.is_alive():
            ticker.join()
            print(flush=True)


class Installer(Protocol):
    """A package installer. `folder` is its environment variable for a directory of wheels."""

    name: str
    folder: str

    def beside(self, index: str) -> Sequence[str]:
        """Return the options that add `index` to its configured ones."""
        ...

    def resolve(self, wanted: Sequence[str]) -> list[Package]:
        """Return the packages that it would install. The list is empty if this fails, in which case
        the installation will report the reason.
        """
        ...

    def install(self, *arguments: str) -> int:
        """Install packages and return the exit status. Quiet unless `arguments` contain -v."""
        ...


class Pip:
    """This Python's pip."""

    name = "pip"
    folder = "PIP_FIND_LINKS"
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")

    def beside(self, index: str) -> Sequence[str]:
        return ("--extra-index-url", index)

    def resolve(self, wanted: Sequence[str]) -> list[Package]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            ask = (*self.command, "--dry-run", "--quiet", "--report", str(report), *wanted)
            if subprocess.run(ask, capture_output=True).returncode:
                return []
            packages = json.loads(report.read_text())["install"]
        sizes = ThreadPoolExecutor(16).map(
            size_of, (each["download_info"]["url"] for each in packages)
        )
        return [
            Package(each["metadata"]["name"], each["metadata"]["version"], size)
            for each, size in zip(packages, sizes, strict=True)
        ]

    def install(self, *arguments: str) -> int:
        return subprocess.run([*self.command, "--quiet", *arguments]).returncode


class Uv:
    """The uv program, installing into this Python's environment."""

    name = "uv"
    folder = "UV_FIND_LINKS"

    def __init__(self, program: str) -> None:
        self._program = program

    def beside(self, index: str) -> Sequence[str]:
        """Search all indexes, as pip does, because torch's has outdated dependencies."""
        return ("--index", index, "--index-strategy", "unsafe-best-match")

    def resolve(self, wanted: Sequence[str]) -> list[Package]:
        *options, torch = wanted
        ask = self._pip("install", "--dry-run", *wanted)
        done = subprocess.run(ask, capture_output=True, text=True)
        new = {line[3:] for line in done.stderr.splitlines() if line.startswith(" + ")}
        lock = self._pip("compile", "--quiet", "--format", "pylock.toml", *options, "-")
        done = subprocess.run(lock, input=torch, capture_output=True, text=True)
        if not new or done.returncode:
            return []
        import tomllib  # not at the top, because older versions of Python lack it

        packages = tomllib.loads(done.stdout)["packages"]
        return [
            Package(each["name"], each["version"], size_in_lock(each))
            for each in packages
            if f"{each['name']}=={each['version']}" in new
        ]

    def install(self, *arguments: str) -> int:
        return subprocess.run(self._pip("install", "--quiet", *arguments)).returncode

    def _pip(self, verb: str, *arguments: str) -> list[str]:
        return [self._program, "pip", verb, "--python", sys.executable, *arguments]


def installer() -> Installer | None:
    """Return pip if this Python has it, or else uv if it is on the PATH."""
    if find_spec("pip") is not None:
        return Pip()
    program = shutil.which("uv")
    return None if program is None else Uv(program)


def announce(packages: Sequence[Package]) -> Iterator[str]:
    """Yield messages on the download of torch and its size, or none if it is already installed."""
    torch = next((each for each in packages if each.name == "torch"), None)
    if torch is None:
        return
    sizes = [each.size for each in packages]
    told = f"{sum(sizes) / 1e6:,.0f} MB" + ("" if all(sizes) else " and more (not all tell)")
    yield f"torch {torch.version} and what it needs: {told}"


def is_cuda(package: Package) -> bool:
    return package.name.startswith(CUDA_PACKAGES)


def without_cuda(
    packages: Sequence[Package], folder: str, goal: str | None, rest: Sequence[str]
) -> Iterator[str]:
    """Yield messages on how to avoid a CUDA build on a machine that cannot use it."""
    count = sum(map(is_cuda, packages))
    disk = sum(each.size for each in packages) * UNPACKED / 1e9
    yield (
        f"{count} packages of that are CUDA's, of no use here: this machine has no NVIDIA driver. "
        f"On disk it will be about {disk:.1f} GB."
    )
    direct = f"{shlex.quote(sys.executable)} scripts/install.py"
    typed = goal or f"{direct} {shlex.join(rest)}"
    by_index = f"{goal} CPU_INDEX=URL" if goal else f"{direct} --cpu-index URL {shlex.join(rest)}"
    yield "To do without (0.2 GB instead), type one of these:"
    yield f"    {folder}=FOLDER {typed}"
    yield f"    {by_index}"
    torch = next((each.version for each in packages if each.name == "torch"), "VERSION")
    tag = "cp{}{}".format(*sys.version_info)
    yield (
        f"FOLDER has torch-{torch}+cpu-{tag}-{tag}-*_{platform.machine()}.whl, fetched where "
        f"{CPU_INDEX} can be reached; URL is another index that has it."
    )


def wants_to_go_on() -> bool:
    """Ask the user to confirm. Returns True if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    if input("Fetch it all the same? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print("nothing was installed")
    return False


def size_in_lock(package: dict[str, Any]) -> int:
    """Return the size of a package's wheel in bytes, from its entry in a lock file."""
    wheels: list[dict[str, Any]] = package.get("wheels") or [package.get("archive", {})]
    wheel = wheels[0]
    if "size" in wheel:
        return int(wheel["size"])
    path = wheel.get("path")
    return size_of(Path(path).resolve().as_uri() if path else wheel.get("url", ""))


def size_of(url: str) -> int:
    """Return the size of a local or remote file in bytes, or 0 if unknown."""
    with suppress(OSError, ValueError, TypeError):
        if url.startswith("file:"):
            return Path(unquote(urlsplit(url).path)).stat().st_size
        with urlopen(Request(url, method="HEAD"), timeout=PATIENCE) as reply:
            return int(reply.headers["Content-Length"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
