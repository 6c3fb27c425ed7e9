"""Sizes and numbers that no model has are refused before a tensor is read, by a sentence that names
the field.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec

HUGE = 10**400
"""A number in JSON, and none of Python's floats."""
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
KEYS = (*SIZES, "num_key_value_heads")
SIGHT = SIZES[1:]
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3_vl": ("text_config", (*KEYS, "head_dim")),
    "qwen3_5": ("text_config", (*KEYS, "head_dim")),
    "internvl": ("text_config", KEYS),
    "smolvlm": ("text_config", KEYS),
    "gemma3": ("text_config", (*KEYS, "head_dim")),
    "gemma4": ("text_config", (*KEYS, "head_dim")),
    "deepseek_vl_v2": ("language_config", KEYS),
    "minicpmv4_6": ("text_config", (*KEYS, "head_dim")),
}
TOWERS: dict[str, tuple[str, ...]] = {
    "qwen3_vl": ("hidden_size", "num_heads", "depth"),
    "internvl": SIGHT,
    "smolvlm": SIGHT,
    "gemma3": SIGHT,
    "gemma4": (*SIGHT, "head_dim"),
    "deepseek_vl_v2": ("width", "heads", "layers"),
    "minicpmv4_6": SIGHT,
}
PLACES = [
    *((family, section, name) for family, (section, names) in TEXTS.items() for name in names),
    *((family, "vision_config", name) for family, names in TOWERS.items() for name in names),
]


@pytest.fixture
def refuses(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[[str, str, str, Any], None]:
    """Checks that a field of a file with a value is refused by name."""

    def check(family: str, section: str, name: str, value: Any, file: str = "config.json") -> None:
        folder = tmp_path / family
        if not folder.exists():
            shutil.copytree(checkpoint(family), folder)
        data = json.loads((checkpoint(family) / file).read_text())
        (data[section] if section else data)[name] = value
        (folder / file).write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match=rf"{file}.*{name}"):
            load_spec(folder)

    return check


@pytest.mark.parametrize(("family", "section", "name"), PLACES)
def test_nothing_counts_less_than_one(
    refuses: Callable[..., None], family: str, section: str, name: str
) -> None:
    for value in (0, -1):
        refuses(family, section, name, value)


@pytest.mark.parametrize("family", TEXTS)
def test_no_model_has_a_billion_layers(refuses: Callable[..., None], family: str) -> None:
    refuses(family, TEXTS[family][0], "num_hidden_layers", 10**9)


@pytest.mark.parametrize("value", [HUGE, float("nan"), float("inf")])
@pytest.mark.parametrize("family", TEXTS)
def test_numbers_are_finite(refuses: Callable[..., None], family: str, value: float) -> None:
    refuses(family, TEXTS[family][0], "rms_norm_eps", value)


@pytest.mark.parametrize("value", [0, -1.0])
def test_what_is_divided_by_is_above_zero(refuses: Callable[..., None], value: float) -> None:
    refuses("gemma3", "text_config", "query_pre_attn_scalar", value)
    refuses("deepseek_vl_v2", "language_config", "rope_theta", value)


def test_a_tower_has_an_mlp_of_some_width(refuses: Callable[..., None]) -> None:
    for value in (HUGE, float("nan"), float("inf")):
        refuses("deepseek_vl_v2", "vision_config", "mlp_ratio", value)


@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_6"])
@pytest.mark.parametrize("part", [1e308, 2.0, 0.0, -0.5])
def test_a_head_has_all_the_values_that_are_turned(
    refuses: Callable[..., None], family: str, part: float
) -> None:
    rope = {"partial_rotary_factor": part, "mrope_section": [int(8 * min(part, 2)), 0, 0]}
    refuses(family, "text_config", "rope_parameters", rope)


def test_an_axis_of_positions_has_no_less_than_no_values(refuses: Callable[..., None]) -> None:
    rope = {"partial_rotary_factor": 1.0, "mrope_section": [24, -8, -8]}
    refuses("qwen3_5", "text_config", "rope_parameters", rope)


@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_6"])
def test_some_layer_keeps_tokens(
    refuses: Callable[..., None], checkpoint: Callable[..., Path], family: str
) -> None:
    text = json.loads((checkpoint(family) / "config.json").read_text())["text_config"]
    for fields in (
        {"layer_types": ["linear_attention"] * len(text["layer_types"])},
        {"layer_types": None, "full_attention_interval": 1000},
    ):
        refuses(family, "", "text_config", text | fields)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5", "minicpmv4_6"])
def test_kinds_of_layers_are_words(
    refuses: Callable[..., None], checkpoint: Callable[..., Path], family: str
) -> None:
    data = json.loads((checkpoint(family) / "config.json").read_text())
    refuses(family, "text_config", "layer_types", [[]] * len(data["text_config"]["layer_types"]))


def test_a_type_that_the_architecture_does_not_have_is_refused(
    refuses: Callable[..., None],
) -> None:
    refuses("smolvlm", "", "model_type", "paligemma")


@pytest.mark.parametrize("value", [0, -1, 2, 1e-320])
def test_patches_are_brought_together_by_a_share(
    refuses: Callable[..., None], value: float
) -> None:
    refuses("internvl", "", "downsample_ratio", value)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("internvl", "max_patches", 10**9),
        ("internvl", "image_std", [0.5, 0.0, 0.5]),
        ("gemma3", "image_std", [0.5, 0.5, float("nan")]),
        ("minicpmv4_6", "image_std", [0.5, 0.0, 0.5]),
        ("minicpmv4_6", "scale_resolution", 0),
        ("minicpmv4_6", "max_slice_nums", 10**9),
    ],
)
def test_a_processor_s_fields_are_looked_at(
    refuses: Callable[..., None], family: str, name: str, value: Any
) -> None:
    refuses(family, "", name, value, "preprocessor_config.json")
