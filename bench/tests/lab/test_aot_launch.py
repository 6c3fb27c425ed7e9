"""Triton's own JIT launches kernels on a simulated GPU, which reports the errors of a real GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")
from saccade.core.types import Image, ImageKey
from saccade.families.registry import load_spec
from saccade_bench.lab import aot_launch
from saccade_bench.lab.qwen import grids
from tests.helpers.shown import shown_canvas

ROOT = Path(__file__).parents[3]
SCRIPT = """
import ctypes, torch, triton, triton.language as tl
from saccade_bench.lab.aot_launch import stubbed

@triton.jit
def fill(to, n: tl.constexpr):
    at = tl.arange(0, n)
    values = tl.load(to + at[:, None] * n + at[None, :])
    tl.store(to + at, tl.sum(tl.dot(values, values), 0).to(tl.float16))

with stubbed() as stub:
    to = torch.empty((16, 16), dtype=torch.float16)
    for grid, room in (((4, 2), 4096), ((1, 70_000), 4096), ((0,), 4096), ((1,), 64)):
        ctypes.c_int.in_dll(stub.library, "stub_shared").value = room
        try:
            fill[grid](to, 16)
            print("launched", stub.launches, "with", stub.programs, "programs")
        except Exception as error:
            print(type(error).__name__, str(error)[:120])
"""


def run(*command: str) -> str:
    """Run a command in a separate process, because kernels are interpreted in this one."""
    if (why := aot_launch.lacking()) is not None:
        pytest.skip(why)
    environment = {key: each for key, each in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'bench'}"
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


def test_what_no_gpu_takes_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "launches.py"
    script.write_text(SCRIPT)
    first, wide, empty, large = run(str(script)).splitlines()
    assert first == "launched 1 with 8 programs"
    assert "a grid wider than" in wide
    assert "a grid without programs" in empty or empty.startswith("launched 2 "), empty
    assert "more shared memory than" in large


def test_what_was_launched_is_not_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot_launch, "NOTES", tmp_path)
    monkeypatch.setattr(aot_launch, "lacking", lambda: None)
    answers = iter([["it failed"], []])
    done = [aot_launch.once("digest", lambda: next(answers)) for _ in range(3)]
    assert done == [1, 0, 0], "a failure is found again, a success is not looked for twice"
    assert "nothing has changed since" in capsys.readouterr().out


def test_without_a_compiler_it_says_why_nothing_is_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert aot_launch.main([]) == 0
    assert "gcc is not installed" in capsys.readouterr().out


def test_the_digest_follows_kernels_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot_launch, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    kernel = tmp_path / "kernels" / "one.py"
    kernel.write_text("a = 1\n")
    before = aot_launch.digest_of(["kernels"], 90)
    (tmp_path / "kernels" / "notes.pyc").write_text("no source")
    assert aot_launch.digest_of(["kernels"], 90) == before != aot_launch.digest_of(["kernels"], 80)
    kernel.write_text("a = 2\n")
    assert aot_launch.digest_of(["kernels"], 90) != before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_and_every_family_is_launched() -> None:
    """This is part of `make check`. For each family, a worker runs warm-up, graphs, chunks, images
    and sampling.
    """
    for module in ("saccade_bench.lab.aot_launch", "tests.launching"):
        assert "FAILED" not in run("-m", module)


@pytest.mark.more
@pytest.mark.parametrize("family", ["lfm2_vl", "minicpmv4_7", "qwen3_vl"])
def test_a_family_has_an_image_to_launch_kernels_with(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """Its grid is known even if the canvas does not determine it."""
    spec = load_spec(checkpoint(family))
    canvas, mark = shown_canvas(spec)
    (grid,) = grids(spec, [canvas])
    key = ImageKey(bytes(32), bytes(16))
    size = (canvas.shape[0], canvas.shape[1])
    image = Image(key, grid, spec.num_tokens(grid), spec.num_patches(grid), size)
    tokens, spans = spec.expand_prompt([7, mark, 8], [image])
    assert spans and len(tokens) > len([7, mark, 8])
