"""What config.json says of quantisation: methods and settings that are not supported are refused by
name; which modules are meant.
"""

from __future__ import annotations

from typing import Any

import pytest

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.plugins.quantized.quantization import Scheme, read_quantization
from tests.packing import AWQ, GPTQ, PACKED, packing
from tests.quantising import FORMATS, compressed, token


def read(settings: Any, name: str = "quantization_config") -> Any:
    return read_quantization(Section("config.json", {name: settings}))


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "gguf", "mxfp4", "fbgemm_fp8", "hqq", "quark", "modelopt"],
)
def test_other_methods_are_refused_by_name_with_what_is_supported(method: str) -> None:
    wanted = (
        rf"config\.json: quantization_config: .*\({method}\).*fp8 .*compressed-tensors.*awq.*gptq"
    )
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
        ({}, r"quantized \(no method named\)"),
        ({"quant_method": "fp8"}, "fp8 without weight_block_size"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            "weight_block_size must be two",
        ),
        (changed(f"{WEIGHTS}.num_bits", 4), r"weights of 4 bits \(int\) are not supported"),
        (changed(f"{WEIGHTS}.symmetric", False), "zero points are not supported"),
        (changed(f"{WEIGHTS}.actorder", "group"), "actorder 'group' is not supported"),
        (changed(f"{WEIGHTS}.strategy", "tensor_group"), "strategy 'tensor_group' is not"),
        (changed(f"{WEIGHTS}.strategy", "block"), "block_structure is missing"),
        (changed("config_groups.group_0.weights", None), "num_bits is missing"),
        (changed("config_groups", {}), "config_groups is missing"),
        (packing("tensor", 4), "strategy 'tensor' of packed weights"),
        (packing("group", 4, group_size=0), "strategy group needs sizes"),
        (packing("group", 3, group_size=32), r"packed weights of 3 bits \(int\)"),
        (packing("group", 4, group_size=32, type="float"), r"packed weights of 4 bits \(float\)"),
        (packing("group", 4, group_size=32, actorder="odd"), "actorder 'odd'"),
        (AWQ | {"bits": 3}, "awq of 3 bits"),
        (AWQ | {"version": "gemv"}, "awq of 4 bits, version 'gemv'"),
        (AWQ | {"zero_point": False}, "awq without zero points"),
        (AWQ | {"group_size": 0}, "group_size must be at least 1, or -1, not 0"),
        (AWQ | {"group_size": "128"}, "group_size must be an integer"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "gptq with dynamic"),
        (
            changed("sparsity_config", {"format": "sparse-24-bitmask"}),
            "sparsity_config: this is not",
        ),
        (
            changed("transform_config", {"config_groups": {"R1": {}}}),
            "transform_config: this is not",
        ),
        (changed("ignore", "lm_head"), "ignore must be a list of names"),
        (changed("ignore", ["re:("]), r"'re:\(' is not a valid pattern"),
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


@pytest.mark.parametrize("name", list(PACKED))
def test_packed_formats_are_read(name: str) -> None:
    found = read(dict(PACKED[name].settings))
    packed = found.scheme("model.language_model.layers.0.mlp.up_proj")
    assert (packed.bits, packed.group) == (PACKED[name].bits, PACKED[name].group)
    assert packed.order == PACKED[name].shuffled and packed.zeros == PACKED[name].zeros
    if PACKED[name].layout != "gptq":  # has no list: what is not quantised is stored plain
        assert found.scheme("visual.blocks.0.attn.qkv") is None


def test_gguf_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(CheckpointError, match=r"pass its \*\.gguf file.*as --mmproj"):
        read({"quant_method": "gguf"})
