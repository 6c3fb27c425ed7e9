"""A model of random weights, for the stages that run one without a server: in 16 bits, or with the
language model's matrices in FP8 as a checkpoint of that kind has them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.checkpoint import make_checkpoint
from saccade.core.family import FamilySpec
from saccade.families.registry import load_spec, net_module
from saccade.kernels.fp8 import LARGEST, Fp8Matrix, to_fp8
from saccade.kernels.linear import Matrix
from saccade.nn.protocol import FamilyNet
from saccade.nn.weights import Part
from saccade.parallel import WHOLE

BLOCK = 128
"""Inputs that share a scale."""


class RandomWeights:
    """Random numbers as fast as memory takes them: one block, repeated. Implements
    `nn.weights.Weights`. `nbytes`: of the language model's matrices, which every step reads.

    eight: whether a canonical name is that of a matrix to be in FP8.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, eight: Callable[[str], bool] | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.nbytes = 0
        self._eight = eight
        generator = torch.Generator(device).manual_seed(0)
        self._block = torch.randn((1 << 22) + 1, generator=generator, device=device)

    def load(self, *parts: Part) -> torch.Tensor:
        shape = (sum(part.wanted[0] for part in parts), *parts[0].wanted[1:])
        if len(shape) == 1:
            bias = parts[0].name.endswith("bias")
            return torch.full(shape, 0.0 if bias else 1.0, dtype=self.dtype, device=self.device)
        whole = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        block = (self._block / math.sqrt(math.prod(shape[1:]))).to(self.dtype)
        for piece in whole.split(len(block)):
            piece.copy_(block[: len(piece)])
        self._count(parts, whole.nbytes)
        return whole.view(shape)

    def load_matrix(self, *parts: Part) -> Matrix:
        weight = self.load(*parts)
        inputs = weight.shape[1]
        if not self._eight or inputs % BLOCK or not all(self._eight(p.name) for p in parts):
            return weight
        groups = weight.float().view(len(weight), inputs // BLOCK, BLOCK)
        scales = (groups.abs().amax(-1) / LARGEST).contiguous()
        values = to_fp8(groups, scales[..., None]).view(weight.shape)
        self._count(parts, values.nbytes - weight.nbytes)
        return Fp8Matrix(values, scales, BLOCK)

    def as_matrix(self, weight: torch.Tensor, part: Part) -> Matrix:  # noqa: ARG002
        return weight

    def _count(self, parts: tuple[Part, ...], nbytes: int) -> None:
        # Of the embedding a step reads its tokens' rows alone, unless it is the head too.
        if not any(part.name.startswith("visual") for part in parts):
            self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class RandomModel:
    """`read_bytes`: what one step of the language model reads of its weights."""

    net: FamilyNet
    spec: FamilySpec
    folder: Path
    read_bytes: int


def make_model(
    preset: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 0,
    fp8: bool = False,
) -> RandomModel:
    """layers: of the language model; 0: all. fp8: its matrices are in 8 bits."""
    folder = Path(tempfile.mkdtemp(prefix="saccade-check-")) / "model"
    make_checkpoint(preset, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if layers:
        config["text_config"]["num_hidden_layers"] = layers
        path.write_text(json.dumps(config))
    spec = load_spec(folder)
    module = net_module(spec)
    weights = RandomWeights(dtype, device, module.projection if fp8 else None)
    net = module.build(spec, weights, WHOLE, WHOLE)
    text = config["text_config"]
    table = text["vocab_size"] * text["hidden_size"] * dtype.itemsize
    tied = config["tie_word_embeddings"]
    return RandomModel(net, spec, folder, weights.nbytes - (0 if tied else table))
