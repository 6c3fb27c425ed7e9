"""Chooses which matrices have few bits in memory, quantises at load, and counts them all."""

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
"""Neighbouring inputs that share a scale, of matrices that are made 4-bit here."""
HEADS = ("lm_head.weight", "embed_tokens.weight")
"""Name suffixes of output heads; the second is a token embedding, which may be tied."""
Made = Literal["int8", "int4"]
"""What matrices are made at load."""
Kind = Literal["int8", "int4", "fp8"]
Where = Literal["language model", "vision tower"]
COSTS: Mapping[Kind, str] = {
    "int8": "a trained model of 135 M parameters lost 0.4 % of its perplexity so",
    "int4": "a trained model of 135 M parameters lost about 27 % of its perplexity so",
}
"""Start-up messages about matrices that are quantised at load; see docs/speed.md."""


@dataclass(slots=True)
class KindTally:
    """Matrices of one kind in memory."""

    count: int = 0
    made: int = 0  # how many were made at load. The rest were stored so.
    nbytes: int = 0
    dense: int = 0  # their bytes in the network's dtype

    def add_matrix(self, nbytes: int, dense: int, made: bool) -> None:
        self.count += 1
        self.made += made
        self.nbytes += nbytes
        self.dense += dense

    def line(self, where: Where, kind: Kind, name: str) -> str:
        """Describe the matrices in one line. name: the network's dtype."""
        whence = "made at load" if self.made else "as the checkpoint has them"
        told = self.made and where == "language model" and kind in COSTS
        cost = f" ({COSTS[kind]})" if told else ""
        return (
            f"{self.count} matrices of the {where} in {kind}, {whence}: "
            f"{self.nbytes / MIB:.0f} MiB, {self.dense / MIB:.0f} in {name}{cost}"
        )


@dataclass(slots=True)
class LoadTally:
    """Counts and bytes of a checkpoint's matrices by format, on this rank."""

    # the language model's matrices in few bits
    kinds: dict[Kind, KindTally] = field(default_factory=dict)
    tower: KindTally = field(default_factory=KindTally)  # the vision encoder's, in 8
    # stored in 8 bits or less, and made whole. stored: the restored ones' bytes in the checkpoint.
    restored: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    # why some in few bits were restored although the device has products
    reasons: set[str] = field(default_factory=set)
    # errors in 8-bit matrices made from a GGUF file's blocks, by name, as a share of values (rms)
    losses: dict[str, float] = field(default_factory=dict)

    def count_int8(self, matrix: Int8Matrix, item: int, *, made: bool = False) -> None:
        """Count a matrix that is still to be packed.

        `item`: a value's bytes in the network's dtype. `made`: at load.
        """
        self._int8(self.kinds.setdefault("int8", KindTally()), matrix, item, made)

    def count_tower(self, matrix: Int8Matrix, item: int) -> None:
        """Count a matrix in the vision encoder, made at load and still to be packed."""
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
        """Count a matrix made whole. `stored`: its bytes in the checkpoint."""
        self.restored += 1
        self.restored_bytes += target.nbytes
        self.stored_bytes += stored

    def line(self, dtype: torch.dtype) -> str:
        """Describe the quantised matrices for people, at start-up. Without any, return ""."""
        name = str(dtype).removeprefix("torch.")
        said = []
        for kind in get_args(Kind):
            if (kept := self.kinds.get(kind)) is not None:
                said.append(kept.line("language model", kind, name))
        if self.tower.count:
            said.append(self.tower.line("vision tower", "int8", name))
        if self.restored:
            said.append(
                f"{self.restored} quantised matrices of the checkpoint made {name} at load: "
                f"{self.restored_bytes / MIB:.0f} MiB, {self.stored_bytes / MIB:.0f} as stored"
                + "".join(f" ({reason})" for reason in sorted(self.reasons))
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
    """Raise ConfigError, about what was `said`, for a device without products in 8 bits."""
    if device.type != "cpu" or not runs_int8():
        raise ConfigError(
            f"{said}: it needs --device cpu and an x86 processor with VNNI "
            f"(avx512_vnni or avx_vnni); use {instead}"
        )


def check_made(made: Made, device: torch.device, ops: Ops) -> None:
    """Raise ConfigError for a device without products for matrices made so."""
    check_int8(f"--quantization {made}", "--quantization auto", device)
    if made == "int4" and not ops.takes_int4:
        raise ConfigError(
            "--quantization int4: it needs a CPU with avx512_vnni, and llvmlite "
            f"({how_to_install('.[cpu]')}), or use --quantization int8"
        )


@dataclass(frozen=True, slots=True)
class QuantPolicy:
    """The choice of matrices in 8 or 4 bits in memory.

    `projection` allows matrices by canonical names: `made` is the kind that all become, `native`
    leaves matrices stored in int8, `fp8` those in FP8, `few` those in 4 bits, but for experts.
    `tower`: the vision encoder's become int8. `tally` counts each.
    """

    projection: Callable[[str], bool]
    made: Made | None
    native: bool
    tally: LoadTally
    fp8: bool = False
    few: bool = False
    tower: bool = False

    def int4(self, name: str) -> bool:
        """Return True if a matrix stored in 4 bits stays so. Experts are one tensor on a GPU."""
        return self.few and self.projection(name) and ".experts." not in name

    def make(self, weight: torch.Tensor, parts: Sequence[Part], ops: Ops) -> Matrix:
        """Convert `weight`, loaded for `parts`, to its kind of matrix for a network's operations.

        A head keeps more than 4 bits, since it chooses among very many tokens.
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
