"""What config.json says of quantisation: methods and settings that are not supported are refused by
name; which modules are meant.
"""

from __future__ import annotations

from typing import Any

import pytest

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.quantization import Scheme, read_quantization
from tests.quantising import FORMATS, compressed, token


def read(settings: Any, name: str = "quantization_config") -> Any:
    return read_quantization(Section("config.json", {name: settings}))


@pytest.mark.parametrize(
    "method",
    ["awq", "gptq", "bitsandbytes", "gguf", "mxfp4", "fbgemm_fp8", "hqq", "quark", "modelopt"],
)
def test_other_methods_are_refused_by_name_with_what_is_supported(method: str) -> None:
    wanted = rf"config\.json: quantization_config: .*\({method}\).*fp8 .*compressed-tensors"
    with pytest.raises(CheckpointError, match=wanted):
        read({"quant_method": method, "bits": 4})


def changed(path: str, value: Any) -> Any:
    settings = compressed("int", "channel", token("int"))
    *way, last = path.split(".")
    inner = settings
    for name in way:
        inner = inner[name]
    inner[last] = value
    return settings


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, r"quantised \(no method named\)"),
        ({"quant_method": "fp8"}, "fp8 without weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be rows"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be rows"),
        (changed(f"{WEIGHTS}.num_bits", 4), r"weights of 4 bits \(int\) are not supported"),
        (changed(f"{WEIGHTS}.symmetric", False), "zero points are not supported"),
        (changed(f"{WEIGHTS}.actorder", "group"), "actorder 'group' is not supported"),
        (changed(f"{WEIGHTS}.strategy", "tensor_group"), "strategy 'tensor_group' is not"),
        (changed(f"{WEIGHTS}.strategy", "block"), "block_structure is missing"),
        (changed("config_groups.group_0.weights", None), "num_bits is missing"),
        (changed("config_groups", {}), "config_groups is missing"),
        (changed("config_groups.group_0.format", "pack-quantized"), "format pack-quantized"),
        (changed("sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config: it is not"),
        (changed("transform_config", {"config_groups": {"R1": {}}}), "transform_config: it is not"),
        (changed("ignore", "lm_head"), "ignore must be a list of names"),
        (changed("ignore", ["re:("]), r"'re:\(' is no pattern"),
    ],
)
def test_settings_that_are_not_supported_are_named(settings: Any, wrong: str) -> None:
    with pytest.raises(CheckpointError, match=wrong):
        read(settings)


def test_no_settings_are_no_quantisation() -> None:
    assert read_quantization(Section("config.json", {"text_config": {}})) is None
    assert read(None) is None


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats_are_read(name: str) -> None:
    format = FORMATS[name]
    found = read(dict(format.settings))
    scheme = found.scheme("model.language_model.layers.0.mlp.up_proj")
    assert (scheme.block, scheme.suffix) == (format.block, format.suffix)
    assert scheme.int8_rows == (name == "w8a8 int8")
    assert found.scheme("model.visual.blocks.0.attn.qkv") is None
    assert found.scheme("lm_head") is None


def test_groups_and_ignored_modules_are_told_apart() -> None:
    settings = compressed("int", "channel", token("int"))
    settings["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 4]},
    }
    settings["ignore"] = ["model.layers.1", "re:.*k_proj"]
    found = read(settings, "compression_config")
    up, down = (found.scheme(f"model.layers.10.mlp.{name}_proj") for name in ("up", "down"))
    assert up == Scheme("I8", (1, 0), "weight_scale", int8_rows=True)
    assert down == Scheme("F8_E4M3", (8, 4), "weight_scale")
    assert down.scales((17, 4)) == (3, 1)
    assert found.scheme("model.layers.1.mlp.up_proj") is None
    assert found.scheme("model.layers.10.self_attn.k_proj") is None
