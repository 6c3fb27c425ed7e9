"""Fields of some families that no model has are refused before a tensor is read, by a sentence that
names the field. What all families refuse is in `test_contract.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.conftest import Refused
from tests.fixtures.tiny import tinies


def of_two_kinds(checkpoint: Callable[..., Path]) -> list[str]:
    """Return the architectures whose layers keep tokens or a state."""
    found = []
    for name in tinies():
        data = json.loads((checkpoint(name) / "config.json").read_text())
        if "linear_attention" in data.get("text_config", {}).get("layer_types", ()):
            found.append(name)
    return found


@pytest.mark.parametrize("part", [1e308, 2.0, 0.0, -0.5])
def test_a_head_has_all_the_values_that_are_turned(
    refused: Refused, checkpoint: Callable[..., Path], part: float
) -> None:
    rope = {"partial_rotary_factor": part, "mrope_section": [int(8 * min(part, 2)), 0, 0]}
    for family in of_two_kinds(checkpoint):
        words = "config.json.*rope_parameters"
        refused(family, "config.json", words, text_config={"rope_parameters": rope})


def test_an_axis_of_positions_has_no_less_than_no_values(refused: Refused) -> None:
    rope = {"partial_rotary_factor": 1.0, "mrope_section": [24, -8, -8]}
    words = "config.json.*rope_parameters"
    refused("qwen3_5", "config.json", words, text_config={"rope_parameters": rope})


def test_some_layer_keeps_tokens(refused: Refused, checkpoint: Callable[..., Path]) -> None:
    for family in of_two_kinds(checkpoint):
        text = json.loads((checkpoint(family) / "config.json").read_text())["text_config"]
        count = len(text["layer_types"])
        for kinds in ({"layer_types": [kind] * count} for kind in ("linear_attention", 7)):
            refused(family, "config.json", "layer_types", text_config=text | kinds)
        sparse = {"layer_types": None, "full_attention_interval": 1000}
        refused(family, "config.json", "config.json.*text_config", text_config=text | sparse)
