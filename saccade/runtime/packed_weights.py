"""Matrices packed in several tensors of a checkpoint (AWQ, GPTQ, compressed-tensors): found
by the names that layers ask for, read and checked.

Knows which tensors belong together, nothing of what their numbers mean (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from saccade.core.errors import CheckpointError
from saccade.families.packed import SUFFIXES, Packed, Role
from saccade.families.quantization import Quantization
from saccade.nn.weights import Part
from saccade.runtime.packed import Numbers, unpack_matrix
from saccade.runtime.tensors import Places, damaged, open_tensors


class PackedWeights:
    """The packed matrices of one checkpoint.

    read: the wanted slice of a stored tensor, by canonical name, as its file has it.
    """

    def __init__(
        self,
        folder: Path,
        places: Places,
        quantization: Quantization | None,
        read: Callable[[Part], torch.Tensor],
    ) -> None:
        """Raises CheckpointError for a matrix that is there packed and unpacked."""
        self._folder = folder
        self._places = places
        self._read = read
        self._found = _find(places, quantization) if quantization else {}

    def __contains__(self, weight: str) -> bool:
        return weight in self._found

    def tensors(self) -> set[str]:
        """Canonical names of all that belong to them."""
        return {name for weight in self._found for name in self.names(weight).values()}

    def names(self, weight: str) -> dict[Role, str]:
        """Canonical names of the tensors that make up a matrix, those that are there."""
        module = weight.removesuffix("weight")
        suffixes = SUFFIXES[self._found[weight].layout]
        names = {role: module + suffix for role, suffix in suffixes.items()}
        return {role: name for role, name in names.items() if name in self._places}

    def adds_nothing(self, canonical: str) -> bool:
        """Whether a tensor is a bias of zeros, which GPTQ's tools give matrices that have none."""
        weight = canonical.removesuffix("bias") + "weight"
        if not canonical.endswith(".bias") or weight not in self._found:
            return False
        path, name = self._places[canonical]
        return not open_tensors(path).get_tensor(name).any()

    def read(self, part: Part, device: torch.device) -> Numbers:
        """The wanted slice, on that device. Raises CheckpointError for a tensor that is missing, or
        does not fit the others.
        """
        packed, names = self._found[part.name], self.names(part.name)
        pieces = {role: self._read(piece) for role, piece in self.check(part).items()}

        def refuse(role: Role, wrong: str) -> CheckpointError:
            path, name = self._places[names[role]]
            return CheckpointError(f"{path}: tensor {name} {wrong}")

        if not pieces["scales"].isfinite().all():
            raise refuse("scales", "has values that are not finite: the checkpoint is damaged")
        if "shape" in pieces and pieces["shape"].tolist() != list(part.shape):
            raise refuse(
                "shape",
                f"says {pieces['shape'].tolist()}, but config.json makes it {list(part.shape)}",
            )
        groups = packed.groups(part.shape[1])
        if "order" in pieces and part.shape[1]:
            least, most = (int(value) for value in torch.aminmax(pieces["order"]))
            if least < 0 or most >= groups:
                raise refuse("order", f"names groups from {least} to {most}, but has {groups}")
        return unpack_matrix(packed, pieces, part, device)

    def check(self, part: Part) -> dict[Role, Part]:
        """The tensors that make up a packed matrix, whole. Raises CheckpointError for one that is
        missing, or in a format or of a shape that cannot be read.
        """
        packed, names = self._found[part.name], self.names(part.name)
        found: dict[Role, Part] = {}
        for role, piece in packed.pieces(*part.shape).items():
            if role not in names:
                if piece.optional:
                    continue
                raise CheckpointError(
                    f"{self._folder}: no file has the tensor "
                    f"{part.name.removesuffix('weight')}{piece.suffix}, the {role} of "
                    f"{part.name}: the checkpoint is not complete"
                )
            path, name = self._places[names[role]]
            try:
                stored = open_tensors(path).get_slice(name)
                kind, shape = stored.get_dtype(), tuple(stored.get_shape())
            except SafetensorError as error:
                raise damaged(path, name, error) from error
            if kind not in piece.stored:
                raise CheckpointError(
                    f"{path}: tensor {name} is stored as {kind}; the {role} of packed matrices "
                    f"are {', '.join(piece.stored)}"
                )
            if shape != piece.shape:
                raise CheckpointError(
                    f"{path}: tensor {name} is {list(shape)}, but config.json makes it "
                    f"{list(piece.shape)}"
                )
            found[role] = Part(names[role], shape)
        return found


def _find(places: Places, quantization: Quantization) -> dict[str, Packed]:
    """The matrices that lie packed in several tensors, by the names that layers ask for."""
    found: dict[str, Packed] = {}
    for canonical, (path, name) in places.items():
        module, _, suffix = canonical.rpartition(".")
        if suffix not in ("qweight", "weight_packed"):
            continue
        packed = quantization.scheme(name.removesuffix(f".{suffix}"), module)
        if not isinstance(packed, Packed) or packed.values_suffix != suffix:
            continue
        if f"{module}.weight" in places:
            raise CheckpointError(
                f"{path}: tensor {name} is there, and the same matrix unpacked as well"
            )
        found[f"{module}.weight"] = packed
    return found
