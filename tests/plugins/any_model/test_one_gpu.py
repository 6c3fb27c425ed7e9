"""Models of transformers' own modules on one GPU, as far as a machine without any can tell: loading
runs prompts and images through `generate` and through the adapter, and mixes no devices.
`tests/kernels/test_any_model.py` has the kernels.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from saccade.core.config import EncoderConfig, Hardware, StepGraphSizes
from saccade.core.settings import EngineSettings
from saccade.engine.sizing import resolve_encoder, resolve_step_graphs
from saccade.families.registry import load_spec
from saccade.kernels.reference.ops import Ops
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.tiny_any import make_any
from tests.helpers.pretended_gpu import GPU, OnGpu, pretended_gpu

KINDS = (
    "phi4_multimodal",
    *(pytest.param(name, marks=pytest.mark.more) for name in ("llava", "mistral3", "phi3")),
)
GIB = 1 << 30


def test_tensors_of_both_devices_are_refused() -> None:
    with pretended_gpu():
        there, here = torch.ones(3, device=GPU), torch.ones(3)
        assert isinstance(there + 1, OnGpu) and (there + 1).tolist() == [2.0, 2.0, 2.0]
        assert not isinstance(there.to("cpu"), OnGpu)
        with pytest.raises(RuntimeError, match="add: tensors on cuda:0 and cpu"):
            there + here


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_loads_on_a_gpu(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends in an error if a prompt, an image or a decode step differs, or mixes devices."""
    caplog.set_level(logging.WARNING, "saccade")
    spec = load_spec(make_any(tmp_path / kind, kind))
    with pretended_gpu():
        net = load_net(spec, tmp_path / kind, dtype=torch.float32, device=GPU, ops=Ops())
        decoder = net.text.decoder  # type: ignore[attr-defined]
        assert all(isinstance(each, OnGpu) for each in decoder.parameters())
    assert "CUDA graphs, several ranks" in caplog.text


def test_a_gpu_captures_nothing_of_it(tmp_path: Path) -> None:
    spec = load_spec(make_any(tmp_path / "phi4", "phi4_multimodal"))
    settings, gpu = EngineSettings(), Hardware("cuda", "", 64 * GIB, 60 * GIB, 120 * GIB)
    assert resolve_step_graphs(settings.cuda, 8, 512, spec, "bfloat16", gpu) == StepGraphSizes()
    encoder = resolve_encoder(settings, spec, cuda=True, half=True, arch=90)
    assert encoder == EncoderConfig(encoder.attention, ())
