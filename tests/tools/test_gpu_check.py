"""`make gpu-check` says what it cannot do and why, keeps its budget, and, on tiny models, runs all
of its stages without a GPU too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check

DRY = ("--device", "cpu", "--quick")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_what_is_not_installed_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_check,
        "NEEDS",
        {name: (*needs, "no_such_module") for name, needs in gpu_check.NEEDS.items()},
    )
    assert gpu_check.main(["--out", str(tmp_path), *DRY]) == 2
    said = capsys.readouterr().out
    assert (
        "encoder cannot run: not installed: no-such-module" in said
        and "--target site wheels/*.whl" in said
    )


def test_what_finds_no_time_is_skipped_and_said_to_be(tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path), *DRY, "--budget", "1"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["skipped"]) == {"tests", "kernels", "encoder", "chat-160x96"}
    assert all("of the budget are left" in why for why in summary["skipped"].values())
    assert (
        summary["versions"]["torch"] == torch.__version__ and summary["hardware"]["cpu cores"] > 0
    )


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    check = gpu_check.Check(gpu_check.parse(["--out", str(tmp_path), *DRY]))
    stage = check.run("kernels", 1, ["sleep", "60"], limit=1)
    assert stage.status == "timed out" and stage.seconds < 30
    assert gpu_check.write_summary(check, {}) == 1


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_stage_runs_on_tiny_models(tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path), *DRY]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(
        ("tests", "kernels", "encoder", "chat-160x96"), "ok"
    )
    assert stages["tests"]["figures"]["tests"] > 100 and stages["tests"]["figures"]["failures"] == 0
    assert len(stages["chat-160x96"]["figures"]["ttft ms by round"]) == 2
    assert stages["chat-160x96"]["figures"]["failed requests"] == 0
    assert "saccade serve" in stages["chat-160x96"]["command"]
    assert set(stages["encoder"]["figures"]["ms per picture"]) >= {
        "160x96, packed",
        "160x96, transformers",
    }
