"""`saccade bench limits`: its lower bound of the work matches the checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from saccade.core.errors import ConfigError
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.registry import load_spec
from saccade_bench.lab.limits import bench_limits, matrix_values
from saccade_bench.lab.options import LimitsOptions


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_step_reads_each_matrix_of_the_language_model_once(
    checkpoint: Callable[..., Path], family: str
) -> None:
    folder = checkpoint(family)
    spec = load_spec(folder)
    assert isinstance(spec, QwenVLSpec)
    found = 0
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            rows, *columns = file.get_slice(name).get_shape()
            if len(columns) == 1 and "visual" not in name and "embed_tokens" not in name:
                found += rows * columns[0]
    tied = spec.text.vocab_size * spec.text.hidden if spec.text.tied else 0
    assert matrix_values(spec) == found + tied


@pytest.mark.more
def test_each_work_has_its_limit(checkpoint: Callable[..., Path]) -> None:
    options = LimitsOptions(
        model=checkpoint("qwen3_vl"),
        quantization="none",
        image=(64, 96),
        prompt_tokens=40,
        rows=(1, 2),
        decoded=4,
        repeats=1,
    )
    works = [each.work for each in bench_limits(options)]
    assert works[1:] == ["prompt, 40 tokens", "1 rows of decode", "2 rows of decode"]


def test_a_model_of_other_shapes_is_named(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="--model"):
        bench_limits(LimitsOptions(model=checkpoint("qwen3_vl_moe")))
