"""`scripts/install.py`: which torch real pip and uv take, from stand-in indexes on loopback."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.terminal import Terminal

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.py"


def load() -> ModuleType:
    spec = spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()


def wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """A package with nothing in it but who it is."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as file:
        for path, text in texts.items():
            file.writestr(path, text)
        file.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


class Index(ThreadingHTTPServer):
    """A folder as a package index (a listing of a folder is one); `asked`: paths."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                server.asked.append(self.path)

            def log_error(self, *_: object) -> None:
                return None

        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Has the build for CUDA alone, as the public index has."""
    folder = tmp_path_factory.mktemp("public")
    wheel(folder, "torch", "2.13.0", ("nvidia-cublas", "cuda-toolkit", "filelock"))
    for name in ("nvidia-cublas", "cuda-toolkit", "filelock", "thing"):
        wheel(folder, name, "1.0", ("torch>=2.11",) if name == "thing" else ())
    with Index(folder) as index:
        yield index
        index.shutdown()


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the build for CPUs."""
    folder = tmp_path_factory.mktemp("builds")
    wheel(folder, "torch", "2.13.0+cpu", ("filelock",))
    return folder


@pytest.fixture(scope="module")
def cpu(builds: Path) -> Iterator[Index]:
    """The same as PyTorch's index of CPU builds."""
    with Index(builds) as index:
        yield index
        index.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(params=["pip", pytest.param("uv", marks=pytest.mark.slow)])
def tool(request: pytest.FixtureRequest) -> str:
    """An environment has pip, or none but a uv on the PATH."""
    return str(request.param)


class Fresh:
    """A new environment, whose `tool` knows the index at `public` and nothing else. links: a folder
    with wheels.
    """

    def __init__(self, folder: Path, tool: str, public: str, links: Path | None = None) -> None:
        venv.create(folder / "venv", with_pip=False)
        self._python = folder / "venv" / "bin" / "python"
        self._pins = folder / "constraints.txt"
        self._pins.write_text("torch==2.13.0\n")
        kept = {key: value for key, value in os.environ.items() if key[:3] not in ("PIP", "UV_")}
        own = self._pip(folder / "path") if tool == "pip" else self._uv(folder / "cache")
        index = {f"{tool.upper()}_{'INDEX_URL' if tool == 'pip' else 'DEFAULT_INDEX'}": public}
        found = {} if links is None else {f"{tool.upper()}_FIND_LINKS": str(links)}
        self.env = {**kept, **own, **index, **found, "no_proxy": "127.0.0.1"}

    @staticmethod
    def _pip(path: Path) -> dict[str, str]:
        """The tests' own pip, found by way of `path`."""
        spec = find_spec("pip")
        if spec is None or spec.origin is None:
            pytest.skip("no pip to install with")
        path.mkdir()
        (path / "pip").symlink_to(Path(spec.origin).parent)
        quick = {"PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}
        return {"PYTHONPATH": str(path), "PIP_CONFIG_FILE": os.devnull, **quick}

    @staticmethod
    def _uv(cache: Path) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if shutil.which("uv", path=programs) is None:
            pytest.skip("no uv to install with")
        return {"PATH": programs, "PYTHONPATH": "", "UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1"}

    def command(self, *words: str) -> list[str]:
        return [str(self._python), str(SCRIPT), *words, "-c", str(self._pins), "thing"]

    def install(self, *words: str) -> str:
        """What was said, by the script and the tool; they must succeed."""
        done = subprocess.run(
            self.command(*words),
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def has(self) -> set[str]:
        """The packages that are there."""
        (packages,) = self._python.parents[1].glob("lib/python*/site-packages")
        found = distributions(path=[str(packages)])
        return {f"{each.metadata['Name']}=={each.version}" for each in found}


def began(said: str) -> int:
    """Where pip or uv begins to fetch."""
    return said.index("installing torch (1 of 2) ...")


CPU_SET = {"torch==2.13.0+cpu", "filelock==1.0", "thing==1.0"}
CUDA_SET = {"torch==2.13.0", "filelock==1.0", "thing==1.0"} | {
    *("nvidia-cublas==1.0", "cuda-toolkit==1.0")
}


@pytest.mark.more
def test_without_a_driver_torch_comes_from_the_index_of_cpu_builds(
    tool: str, public: Index, cpu: Index, tmp_path: Path
) -> None:
    fresh = Fresh(tmp_path, tool, public.url)
    said = fresh.install("--torch", "cpu", "--cpu-index", cpu.url)
    assert fresh.has() == CPU_SET
    told = said.index("torch 2.13.0+cpu and what it needs: ")
    assert told < began(said), "the size is said before it starts"
    assert "CUDA" not in said
    *_, first, second = said.splitlines()
    assert first == "installing torch (1 of 2) ...", "pip and uv say nothing of success"
    assert second == "installing thing (2 of 2) ..."


@pytest.mark.more
def test_what_cannot_be_installed_is_told(tool: str, public: Index, tmp_path: Path) -> None:
    fresh = Fresh(tmp_path, tool, public.url)
    command = [*fresh.command("--torch", "any"), "no-such-thing"]
    done = subprocess.run(command, env=fresh.env, capture_output=True, text=True)
    assert done.returncode and "no-such-thing" in done.stderr


@pytest.mark.more
def test_with_a_driver_the_index_of_cpu_builds_is_not_asked_and_what_is_there_stays(
    tool: str, public: Index, cpu: Index, tmp_path: Path
) -> None:
    cpu.asked.clear()
    fresh = Fresh(tmp_path, tool, public.url)
    fresh.install("--torch", "any", "--cpu-index", cpu.url)
    assert fresh.has() == CUDA_SET
    assert cpu.asked == []
    said = fresh.install("--torch", "cpu", "--cpu-index", cpu.url)
    assert fresh.has() == CUDA_SET
    assert "what it needs" not in said


@pytest.mark.more
def test_where_the_cpu_index_does_not_answer_a_build_that_is_known_otherwise_is_taken(
    tool: str, public: Index, builds: Path, silent: str, tmp_path: Path
) -> None:
    fresh = Fresh(tmp_path, tool, public.url, builds / "torch")
    said = fresh.install("--torch", "cpu", "--cpu-index", silent)
    assert f"{silent} does not answer" in said
    assert fresh.has() == CPU_SET


@pytest.mark.more
def test_where_there_is_no_cpu_build_it_says_what_comes_instead_and_what_to_do(
    tool: str, public: Index, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    fresh = Fresh(tmp_path, tool, public.url)
    said = fresh.install("--torch", "cpu", "--cpu-index", nobody)
    assert fresh.has() == CUDA_SET
    assert "torch 2.13.0 and what it needs: 0 MB" in said
    told = "2 packages of that are CUDA's, of no use here"
    assert told in said and said.index(told) < began(said)
    python = re.escape(shlex.quote(str(fresh.command()[0])))
    folder = f"{tool.upper()}_FIND_LINKS=FOLDER"
    assert re.search(rf"(?m)^ +{folder} {python} scripts/install\.py thing$", said)
    assert re.search(rf"(?m)^ +{python} scripts/install\.py --cpu-index URL thing$", said)
    assert re.search(r"torch-2\.13\.0\+cpu-cp3\d+-cp3\d+-", said)


@pytest.mark.more
def test_at_a_terminal_it_asks_before_it_fetches_what_is_of_no_use(
    tool: str, public: Index, builds: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    fresh = Fresh(tmp_path, tool, public.url)
    words = fresh.command("--torch", "cpu", "--cpu-index", nobody, "--goal", "make demo")
    with Terminal(words, fresh.env) as terminal:
        said = terminal.until("[y/N] ")
        assert "FIND_LINKS=FOLDER make demo\n" in said and "make demo CPU_INDEX=URL\n" in said
        terminal.type("\n")
        assert terminal.ended() == 1
        assert "nothing was installed" in terminal.shown
    assert fresh.has() == set()
    with Terminal(words, fresh.env) as terminal:
        terminal.until("[y/N] ")
        terminal.type("y\n")
        assert terminal.ended() == 0, terminal.shown
    assert fresh.has() == CUDA_SET


OLD = (3, 10, 13)


def test_a_python_that_is_too_old_is_told_which_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.too_old((3, 11, 0), None) is None
    told = install.too_old(OLD, "make demo")
    assert told.startswith("Saccade needs Python 3.11 or later; this is 3.10.13. No newer Python")
    for name, status in (("python3.12", 127), ("python3.11", 0)):  # as shims of pyenv end
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    assert install.too_old(OLD, "make demo").endswith("3.10.13. Type: make demo PYTHON=python3.11")
    told = install.too_old(OLD, None, ["-e", ".[cpu]"])
    assert told.endswith(
        "Type: python3.11 -m venv .venv && .venv/bin/python scripts/install.py -e '.[cpu]'"
    )


def test_an_older_python_reads_the_script_as_far_as_that_sentence() -> None:
    """Its syntax is what Python 3.8 had, and nothing is imported that came later."""
    source = SCRIPT.read_text()
    ast.parse(source, feature_version=(3, 8))
    imported = re.findall(r"(?m)^(?:import|from) (\w+)", source)
    assert "tomllib" not in imported and "annotations" in source


def test_an_environment_of_an_old_python_is_not_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv"
    python = folder / "bin" / "python"

    def standing_in(version: str) -> None:
        python.parent.mkdir(parents=True, exist_ok=True)
        python.unlink(missing_ok=True)
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)

    def made(folder: Path) -> int:
        status: int = install.make_environment(folder, "make demo")
        return status

    standing_in("3 13 0")
    assert made(folder) == 0 and python.read_text().endswith("3 13 0\n"), "one that will do is kept"
    assert f"{folder} has Python 3.13.0 and is kept" in capfd.readouterr().out or (
        sys.version_info[:2] == (3, 13)
    )
    standing_in("3 10 13")
    with monkeypatch.context() as patch:
        patch.setattr(install.sys, "version_info", OLD)
        assert made(folder) == 2
        assert "this is 3.10.13" in capfd.readouterr().err
        assert install.make_environment(tmp_path / "none", None) != 0
        assert not (tmp_path / "none").exists(), "nothing is made before the sentence"


@pytest.mark.more
def test_an_old_environment_is_made_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3 10 13\n")
    python.chmod(0o755)
    assert install.make_environment(tmp_path / ".venv", None) == 0
    said = capfd.readouterr().out
    assert "has Python 3.10.13: it is made anew" in said
    assert f"making {tmp_path / '.venv'} ..." in said, "pip is installed there, for a while"
    assert install.version_in(tmp_path / ".venv") == sys.version_info[:3]


def test_a_driver_is_known_by_its_files_or_its_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tools = (tmp_path / "version",), tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert not install.has_driver(files)
    files[0].write_text("NVRM version")
    assert install.has_driver(files)
    files[0].unlink()
    (tools / "nvidia-smi").write_text("#!/bin/sh\n")
    (tools / "nvidia-smi").chmod(0o755)
    assert install.has_driver(files)


def test_an_index_that_never_answers_is_given_up(cpu: Index, silent: str) -> None:
    assert install.answers(f"{cpu.url}/torch/")
    assert not install.answers(f"{cpu.url}/nothing/")
    assert not install.answers(silent, patience=0.2)
    assert not install.answers("no url at all")


def test_a_stage_shows_its_seconds_in_a_terminal() -> None:
    code = "import install\nwith install.stage('installing'): input()"
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    with Terminal([sys.executable, "-c", code], env=env) as terminal:
        terminal.until("installing ...")
        terminal.until("1 s")
        terminal.until("2 s")
        terminal.type("\n")
        terminal.ended()


def test_without_pip_and_uv_it_says_that_one_is_needed(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    command = [str(tmp_path / "venv" / "bin" / "python"), str(SCRIPT), "thing"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "this Python has no pip, and there is no uv on the PATH" in done.stderr
