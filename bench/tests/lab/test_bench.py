"""`saccade bench encoder` measures the real path, beside transformers on the same numbers.

What cannot be measured is refused before anything is, and what was measured is kept whatever comes
after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from saccade.core.errors import ConfigError, ImageError, SaccadeError
from saccade.families.qwen_vl.config import PatchEmbedding
from saccade_bench.lab import encoder, machine
from saccade_bench.lab.encoder import EncoderFigure, bench_encoder
from saccade_bench.lab.machine import describe
from saccade_bench.lab.options import (
    EncoderBenchOptions,
    MediaBenchOptions,
)

CPU = torch.device("cpu")
TINY = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_bench_encoder_has_transformers_embeddings_by_either_patch_embedding(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "encoder.json"
    sizes = EncoderBenchOptions(
        TINY[1:], ("float32",), ("160x96",), batch=2, repeats=2, device="cpu", output_file=path
    )
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
        errors[patch_embed] = [
            figure["error"] for figure in figures if figure["mode"] != "transformers"
        ]
        assert max(errors[patch_embed]) < 1e-3
    assert errors["folded"] != errors["exact"], "as exact, not the same bits"


def forbid(*args: object, **kwargs: object) -> None:
    pytest.fail("something is measured")


WRONG: tuple[tuple[dict[str, Any], type[SaccadeError], str], ...] = (
    ({"models": ("tiny-qwen3-vl", "qwen9")}, ConfigError, r"--models qwen9: .*tiny-qwen3-vl"),
    (
        {"resolutions": ("160x96", "0x0")},
        ConfigError,
        "--resolutions 0x0: expected WIDTHxHEIGHT or one of .*1080p",
    ),
    ({"resolutions": ("random:64x64-96x96",)}, ConfigError, "--resolutions random"),
    (
        {"output_file": Path(__file__) / "x.json"},
        ConfigError,
        r"--output-file .*x.json: its folder cannot be made",
    ),
    (
        {"output_file": Path(__file__).parent},
        ConfigError,
        r"--output-file .*: no file can be written there",
    ),
)


@pytest.mark.parametrize(
    ("wrong", "error", "told"), [*WRONG, ({"resolutions": ("8x9000",)}, ImageError, "aspect ratio")]
)
def test_bench_encoder_measures_nothing_before_all_options_are_right(
    wrong: dict[str, Any], error: type[SaccadeError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "ProcessPoolExecutor", forbid)
    with pytest.raises(error, match=told):
        bench_encoder(replace(EncoderBenchOptions(TINY, device="cpu"), **wrong))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (EncoderBenchOptions, ("models", "dtypes")),
        (MediaBenchOptions, ("resolutions", "image_formats", "image_contents")),
    ],
)
def test_an_option_without_values_is_refused(
    options: Callable[..., object], names: tuple[str, ...]
) -> None:
    for name in names:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: name at least one"):
            options(**{name: ()})


def test_what_was_measured_is_shown_and_kept_if_the_next_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(
        options: EncoderBenchOptions, model: str, folder: Path, dtype: str
    ) -> list[EncoderFigure]:
        if dtype == "bfloat16":
            raise MemoryError
        return [EncoderFigure(model, dtype, "160x96", "packed", 1, 15, [1.5])]

    monkeypatch.setattr(
        encoder, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers)
    )
    monkeypatch.setattr(encoder, "_measure", measure)
    path = tmp_path / "encoder.json"
    with pytest.raises(MemoryError):
        bench_encoder(EncoderBenchOptions(TINY[1:], device="cpu", output_file=path))
    assert "tiny-qwen3-vl in float32" in capsys.readouterr().out
    assert [figure["ms"] for figure in json.loads(path.read_text())["figures"]] == [[1.5]]


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert describe(CPU)["torch"] == torch.__version__ and "no-such-package" not in describe(CPU)
