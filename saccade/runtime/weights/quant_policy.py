"""Decides which matrices are quantized in memory at load, and counts them for the startup log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade.kernels.matrix import (
    DenseMatrix,
    Fp8Experts,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
)
from saccade.kernels.processor import runs_int8
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import of_language
from saccade.nn.weights import Part

INT4_GROUP = 32
"""The group size (inputs per scale) of matrices that are quantized to 4 bits at load."""
HEADS = ("lm_head.weight", "embed_tokens.weight")
"""Name suffixes of output heads. The second is the token embedding, which may be tied to
the head.
"""
Made = Literal["int8", "int4"]
"""The formats to which matrices can be quantized at load."""
Kind = Literal["int8", "int4", "fp8"]
Where = Literal["language model", "vision encoder"]
COSTS: Mapping[Kind, str] = {
    "int8": "a trained model of 135 M parameters lost 0.4 % of its perplexity so",
    "int4": "a trained model of 135 M parameters lost about 27 % of its perplexity so",
}
"""What quantization at load costs, for the startup log. See docs/speed.md."""


@dataclass(slots=True)
class KindTally:
    """Counts the quantized matrices of one format."""

    count: int = 0
    made: int = 0  # how many were quantized at load; the others are quantized in the checkpoint
    nbytes: int = 0
    dense: int = 0  # their size if they were not quantized, in the network's dtype

    def add_matrix(self, nbytes: int, dense: int, made: bool) -> None:
        self.count += 1
        self.made += made
        self.nbytes += nbytes
        self.dense += dense

    def line(self, where: Where, kind: Kind, name: str) -> str:
        """Return one line about the matrices for the startup log.

        name: the network's dtype.
        """
        whence = "made at load" if self.made else "as the checkpoint has them"
        told = self.made and where == "language model" and kind in COSTS
        cost = f" ({COSTS[kind]})" if told else ""
        return (
            f"{self.count} matrices of the {where} in {kind}, {whence}: "
            f"{self.nbytes / MIB:.0f} MiB, {self.dense / MIB:.0f} in {name}{cost}"
        )


@dataclass(slots=True)
class LoadTally:
    """Counts a checkpoint's quantized matrices on this rank."""

    # the language model's quantized matrices
    kinds: dict[Kind, KindTally] = field(default_factory=dict)
    tower: KindTally = field(default_factory=KindTally)  # the vision encoder's int8 matrices
    # matrices that are quantized in the checkpoint, and were dequantized at load
    restored: int = 0
    restored_bytes: int = 0  # in memory
    stored_bytes: int = 0  # in the checkpoint
    # why some were dequantized although the device supports quantized matrices
    reasons: set[str] = field(default_factory=set)
    # relative rms errors of int8 matrices that were converted from a GGUF file, by name
    losses: dict[str, float] = field(default_factory=dict)

    def count_int8(self, matrix: Int8Matrix, item: int, *, made: bool = False) -> None:
        """Count an int8 matrix. Call this before the matrix is packed.

        item: the bytes per value in the network's dtype.
        made: True if the matrix was quantized at load.
        """
        self._int8(self.kinds.setdefault("int8", KindTally()), matrix, item, made)

    def count_tower(self, matrix: Int8Matrix, item: int) -> None:
        """Count a matrix of the vision encoder that was quantized at load. Call this before it is
        packed.
        """
        self._int8(self.tower, matrix, item, made=True)

    def count_int4(self, matrix: Int4Matrix, item: int, *, made: bool = False) -> None:
        values = matrix.words.shape[0] * matrix.inputs
        kept = self.kinds.setdefault("int4", KindTally())
        kept.add_matrix(matrix.nbytes, values * item, made)

    def count_fp8(self, matrix: Fp8Matrix | Fp8Experts, item: int) -> None:
        nbytes = matrix.values.nbytes + matrix.scales.nbytes
        kept = self.kinds.setdefault("fp8", KindTally())
        kept.add_matrix(nbytes, matrix.values.numel() * item, made=False)

    def _int8(self, kept: KindTally, matrix: Int8Matrix, item: int, made: bool) -> None:
        values = matrix.values.numel()
        kept.add_matrix(values + matrix.scales.nbytes, values * item, made)

    def count_restored(self, stored: int, target: torch.Tensor) -> None:
        """Count a matrix that was dequantized to `target`.

        stored: the size of the matrix in the checkpoint, in bytes.
        """
        self.restored += 1
        self.restored_bytes += target.nbytes
        self.stored_bytes += stored

    def line(self, dtype: torch.dtype) -> str:
        """Return a text about the quantized matrices for the startup log, or "" if there are
        none.
        """
        name = str(dtype).removeprefix("torch.")
        said = []
        for kind in get_args(Kind):
            if (kept := self.kinds.get(kind)) is not None:
                said.append(kept.line("language model", kind, name))
        if self.tower.count:
            said.append(self.tower.line("vision encoder", "int8", name))
        if self.restored:
            said.append(
                f"{self.restored} quantized matrices of the checkpoint converted to {name} at "
                f"load: {self.restored_bytes / MIB:.0f} MiB, {self.stored_bytes / MIB:.0f} as "
                "stored" + "".join(f" ({reason})" for reason in sorted(self.reasons))
            )
        if self.losses:
            worst = max(self.losses, key=self.losses.__getitem__)
            mean = sum(self.losses.values()) / len(self.losses)
            said.append(
                f"{len(self.losses)} matrices of the file are off by {mean:.2%} in int8, at most "
                f"{self.losses[worst]:.2%} ({worst}); --quantization none disables this"
            )
        return "; ".join(said)


def check_int8(said: str, instead: str, device: torch.device) -> None:
    """Raise ConfigError if the device does not support int8 matrices.

    said: the option that requires int8, for the message.
    instead: an alternative, for the message.
    """
    if device.type != "cpu" or not runs_int8():
        raise ConfigError(
            f"{said}: it needs --device cpu and an x86 CPU with VNNI (avx512_vnni or avx_vnni); "
            f"use {instead}"
        )


def check_made(made: Made, device: torch.device, ops: Ops) -> None:
    """Raise ConfigError if the device does not support matrices quantized to `made`."""
    check_int8(f"--quantization {made}", "--quantization auto", device)
    if made == "int4" and not ops.takes_int4:
        raise ConfigError(
            "--quantization int4: it needs a CPU with avx512_vnni, and llvmlite "
            f"({how_to_install('.[cpu]')}), or use --quantization int8"
        )


@dataclass(frozen=True, slots=True)
class QuantPolicy:
    """Decides which matrices are quantized in memory, and converts them."""

    projection: Callable[[str], bool]  # whether a matrix, by canonical name, may be quantized
    made: Made | None  # the format to which all of these are quantized at load
    native: bool  # keep matrices that are stored in int8
    tally: LoadTally
    fp8: bool = False  # keep matrices that are stored in FP8
    few: bool = False  # keep matrices that are stored in 4 bits, except experts
    tower: bool = False  # quantize the vision encoder to int8

    def int4(self, name: str) -> bool:
        """Return True if a matrix that is stored in 4 bits stays in 4 bits.

        Experts do not, because on a GPU all experts are one tensor.
        """
        return self.few and self.projection(name) and ".experts." not in name

    def make(self, weight: torch.Tensor, parts: Sequence[Part], ops: Ops) -> Matrix:
        """Return `weight`, which was loaded for `parts`, as a matrix in the chosen format.

        Output heads are quantized to 8 bits at least, because they choose among many tokens.
        """
        if self.tower and not of_language(parts[0].name):
            matrix = ops.quantise_int8(weight)
            self.tally.count_tower(matrix, weight.itemsize)
            return matrix
        if not (self.made and all(self.projection(part.name) for part in parts)):
            return DenseMatrix(weight)
        if self.made == "int4" and not parts[0].name.endswith(HEADS):
            few = ops.quantise_int4(weight, INT4_GROUP)
            self.tally.count_int4(few, weight.itemsize, made=True)
            return few
        matrix = ops.quantise_int8(weight)
        self.tally.count_int8(matrix, weight.itemsize, made=True)
        return matrix


AS_STORED = QuantPolicy(lambda _: False, made=None, native=False, tally=LoadTally())
