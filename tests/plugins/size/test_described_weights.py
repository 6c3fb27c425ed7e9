"""A network that is described from its files' headers takes the bytes of the loaded one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from saccade.core.config import QuantizationMode
from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec
from saccade.plugins.gguf.folder import write_folder
from saccade.plugins.size.described_weights import (
    NumberFormats,
    WeightBytes,
    count_weights,
    storage_bytes,
)
from saccade.runtime.memory import DTYPES
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from saccade.runtime.weights.tensors import TensorFiles
from tests.families.every import EVERY
from tests.fixtures.gguf_files import write_files
from tests.helpers.processor import needs_int8
from tests.packing import PACKED, quantise_packed
from tests.quantising import FORMATS, quantise

CPU = torch.device("cpu")


def no_values(*_: object) -> torch.Tensor:
    raise AssertionError("values of a tensor are read")


def describe(
    folder: Path, formats: NumberFormats, patch: pytest.MonkeyPatch
) -> tuple[int, WeightBytes, str]:
    """(bytes of the loaded network, what is counted without it, words on its few bits)."""
    spec, tally, dtype = load_spec(folder), LoadTally(), DTYPES[formats.dtype]
    net = load_net(
        spec, folder, dtype=dtype, device=CPU, quantization=formats.quantization, tally=tally
    )
    with patch.context() as within:
        within.setattr(TensorFiles, "read_slice", no_values)
        found = count_weights(spec, folder, CPU, formats)
    assert (found.tower > 0) == spec.sees_images
    return storage_bytes(net), found, tally.line(dtype)


@pytest.mark.parametrize("family", EVERY)
def test_each_family_has_the_bytes_of_the_loaded_network(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, of which no packing pads a matrix."""
    loaded, found, _ = describe(checkpoint(family), NumberFormats("float32"), monkeypatch)
    assert found.language + found.tower == loaded


def kinds(line: str) -> list[str]:
    """Of a line on few bits: how many matrices, of what, in what, whence. Not those made whole."""
    said = (part.partition(":")[0] for part in line.split("; "))
    return [part for part in said if " of the language model in " in part]


@needs_int8
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_matrices_are_made_in_few_bits_as_at_load(
    quantization: QuantizationMode, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = NumberFormats("bfloat16", quantization)
    _, found, said = describe(checkpoint("qwen3_vl"), formats, monkeypatch)
    assert kinds(found.quantised) == kinds(said) != []


@needs_int8
@pytest.mark.parametrize("name", [*FORMATS, *PACKED])
def test_stored_matrices_keep_the_bits_that_they_keep_at_load(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint("qwen3_vl")
    if name in FORMATS:
        folder, _ = quantise(whole, FORMATS[name], tmp_path)
    else:
        folder, _ = quantise_packed(whole, PACKED[name], tmp_path)
    _, found, said = describe(folder, NumberFormats("bfloat16"), monkeypatch)
    assert kinds(found.quantised) == kinds(said)


@needs_int8
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_blocks_of_a_gguf_file_become_what_they_become_at_load(
    kind: str,
    gguf_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = write_files(gguf_checkpoint("qwen3_vl"), tmp_path, Kind[kind], Kind.F32)
    folder = write_folder([files.model], files.mmproj)
    _, found, said = describe(folder, NumberFormats("bfloat16"), monkeypatch)
    assert kinds(found.quantised) == kinds(said)


def test_a_missing_tensor_is_refused_as_by_the_server(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_vl")
    monkeypatch.setattr(TensorFiles, "__contains__", lambda _, name: "layers.1" not in name)
    with pytest.raises(CheckpointError, match="no file has the tensor"):
        count_weights(load_spec(folder), folder, CPU, NumberFormats("float32"))
