"""`saccade bench encoder` and `saccade bench kernels` measure the real path, beside transformers on the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from saccade.core.config import PatchEmbedding
from saccade.lab import machine
from saccade.lab.encoder import bench_encoder
from saccade.lab.kernels import bench_kernels
from saccade.lab.machine import describe
from saccade.lab.options import EncoderBenchOptions, KernelBenchOptions

CPU = torch.device("cpu")
TINY = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_bench_kernels_turns_and_places_as_transformers_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    options = KernelBenchOptions(("tiny-qwen2-vl", *TINY), tokens=100, resolutions=("160x96",), repeats=2, device="cpu", output_file=path)
    figures = bench_kernels(options)
    assert "Rotary embedding on 1 CPU threads" in capsys.readouterr().out
    assert figures.notes == [], "the same positions"
    report = json.loads(path.read_text())
    assert describe(CPU).items() <= report.items()
    assert len(report["rotary"]) == 3 * 2 * 2 * 3 and len(report["positions"]) == 3 * 3
    for figure in report["rotary"]:
        size = 4 if figure["dtype"] == "float32" else 2
        assert figure["nbytes"] == figure["tokens"] * figure["heads"] * figure["head_dim"] * size
        assert len(figure["ms"]) == 2 and figure["gb_per_s"] > 0
        if figure["how"] == "saccade":
            assert figure["error"] < (1e-5 if size == 4 else 0.1)
    assert {figure["how"] for figure in report["positions"]} == {"new grid", "seen grid", "transformers"}


def test_bench_encoder_has_transformers_embeddings_by_either_patch_embedding(tmp_path: Path) -> None:
    path = tmp_path / "encoder.json"
    sizes = EncoderBenchOptions(TINY[1:], ("float32",), ("160x96",), batch=2, repeats=2, device="cpu", output_file=path)
    errors = {}
    for patch_embed in get_args(PatchEmbedding):
        bench_encoder(replace(sizes, patch_embed=patch_embed))
        report = json.loads(path.read_text())
        assert report["patch_embed"] == patch_embed
        assert describe(CPU).items() <= report.items()
        figures = report["figures"]
        assert {(figure["pictures"], figure["mode"]) for figure in figures} == {
            ("160x96", "packed"),
            ("160x96", "transformers"),
            ("2 x 160x96", "packed"),
            ("2 x 160x96", "one by one"),
            ("2 x 160x96", "transformers"),
        }
        assert all(figure["model"] == TINY[1] and len(figure["ms"]) == 2 for figure in figures)
        errors[patch_embed] = [figure["error"] for figure in figures if figure["mode"] != "transformers"]
        assert max(errors[patch_embed]) < 1e-3
    assert errors["folded"] != errors["exact"], "as exact, not the same bits"


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert describe(CPU)["torch"] == torch.__version__ and "no-such-package" not in describe(CPU)
