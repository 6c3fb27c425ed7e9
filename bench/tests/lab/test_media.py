"""`saccade bench media` measures the real path: its byte counts are exact, its stages add up to the
total, and a repeated image sends no pixels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.model_folder import DEMO
from saccade_bench.lab import machine
from saccade_bench.lab.machine import CpuClock, describe
from saccade_bench.lab.media import bench_media
from saccade_bench.lab.options import MediaBenchOptions

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from pathlib import Path
from saccade_bench.lab.media import bench_media
from saccade_bench.lab.options import MediaBenchOptions
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sizes = ("160x96", "200x150")
    bench_media(MediaBenchOptions(sizes, ("jpeg", "png"), ("random",), repeats=2,
        output_file=folder / "media.json"))
"""


@pytest.mark.slow
def test_bench_media_measures_every_stage(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "160x96 JPEG noise" in run.stdout
    report = json.loads((tmp_path / "media.json").read_text())
    assert report["machine"] == describe() | {"threads": 1}
    cases = {(case["case"]["width"], case["case"]["format"]): case for case in report["cases"]}
    assert set(cases) == {(160, "jpeg"), (160, "png"), (200, "jpeg"), (200, "png")}
    assert "resize" not in cases[160, "jpeg"]["stages"], "160 x 96 is a multiple of 32 already"
    for (width, _), case in cases.items():
        pixels = {160: 160 * 96, 200: 192 * 160}[width]
        assert case["new"]["nbytes"] == pixels * 3, "resized uint8 RGB"
        assert case["seen"]["nbytes"] == 0
        assert case["usual_stages"]["sha256"]["nbytes"] == pixels * 3 * 4 * 2, (
            "float32, twice for the two frames of a patch"
        )
        assert case["usual"]["nbytes"] > pixels * 3 * 4 * 2
        assert all(
            stage["ms"] >= 0 for stage in (*case["stages"].values(), *case["usual_stages"].values())
        )
        assert sum(stage["ms"] for stage in case["usual_stages"].values()) > 0
        assert case["stages"]["digest"]["nbytes"] == case["usual_stages"]["decode"]["nbytes"] + 8, (
            "new bytes each time"
        )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(
            ({name: ()}, f"--{name.replace('_', '-')}: name at least one")
            for name in ("resolutions", "image_formats", "image_contents")
        ),
        ({"resolutions": ("random:64x64-96x96",)}, "--resolutions random"),
        ({"output_file": Path(__file__) / "x.json"}, r"x\.json: its folder cannot be made"),
        ({"output_file": Path(__file__).parent}, "--output-file .*: no file can be written there"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_first(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bench_media(MediaBenchOptions(**wrong))


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert describe()["torch"] == torch.__version__ and "no-such-package" not in describe()


def test_a_folder_without_a_models_files_is_refused(tmp_path: Path) -> None:
    options = MediaBenchOptions(model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no config\.json: MODEL must be the directory"):
        bench_media(options)
    shutil.copy(DEMO / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"--model .*preprocessor_config\.json"):
        bench_media(options)


def test_the_clock_counts_what_other_processes_compute() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "sum(range(3_000_000)); print(flush=True); input()"],
        stdin=-1,
        stdout=-1,
    ) as child:
        clock = CpuClock(child.pid)
        alone = CpuClock()
        begun, own = clock.ms(), alone.ms()
        assert child.stdout is not None
        child.stdout.readline()
        other = clock.ms() - begun - (alone.ms() - own)
        child.communicate(b"go\n")
    assert other > 1, "three million additions"
