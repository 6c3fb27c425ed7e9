"""Loads matrices that are packed in several tensors (AWQ, GPTQ, compressed-tensors). They are found
by the layers' names, read and checked, and then dequantized, or kept packed if there is a kernel.

`unpack.py` unpacks the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from saccade.core.errors import CheckpointError
from saccade.kernels.matrix import Matrix
from saccade.kernels.reference.int4 import holds
from saccade.nn.weights import Part
from saccade.plugins.quantized.packed_layouts import SUFFIXES, Packed, Role
from saccade.plugins.quantized.quantization import Quantization
from saccade.plugins.quantized.unpack import Numbers, join_int4, restore_packed, unpack_matrix
from saccade.runtime.weights.quant_policy import Kind
from saccade.runtime.weights.stored import LoadContext, StoredTensor
from saccade.runtime.weights.tensors import TensorFiles

VALUES = ("qweight", "weight_packed")
"""Name suffixes that replace `weight` if a matrix is packed."""


class PackedMatrix(StoredTensor):
    """One matrix that is stored as several tensors.

    names: the canonical names of those tensors that exist.
    """

    __slots__ = ("names", "packed")

    def __init__(self, loading: LoadContext, name: str, packed: Packed) -> None:
        super().__init__(loading, name)
        self.packed = packed
        self.names = names_of(loading.files, name, packed)

    def check(self, part: Part) -> None:
        if len(part.shape) != 2:
            raise CheckpointError(
                f"{self.loading.files.folder}: {self.name} is packed, but is not a matrix: "
                f"{list(part.shape)}"
            )
        self._parts(part)
        self.loading.files.mark_asked(self.names.values())

    def restore(self, part: Part, target: Tensor) -> None:
        numbers = self._read(part)
        restore_packed(numbers, target)
        self.loading.policy.tally.count_restored(numbers.stored, target)
        self.loading.gauge.update(numbers.stored)
        self.check_finite(target)

    def product_kind(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Kind | None:
        inputs = parts[0].shape[1]
        groups = {each.packed.groups(inputs) for each in self._all_int4(stored)}
        group = self.packed.group or inputs
        few = groups and self.packed.bits == 4 and holds(group, inputs)
        return "int4" if few and len(groups) == 1 else None

    def product(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Matrix | None:
        policy, packed = self.loading.policy, self._all_int4(stored)
        if not packed:
            return None
        for each, part in zip(packed, parts):
            each.check(part)
        matrix, why = join_int4([each._read(part) for each, part in zip(packed, parts)])
        if matrix is None:
            policy.tally.reasons.add(why)
            return None
        policy.tally.count_int4(matrix, self.loading.dtype.itemsize)
        self.loading.gauge.update(matrix.words.nbytes)
        return matrix

    def _all_int4(self, stored: Sequence[StoredTensor]) -> list[PackedMatrix]:
        """Return the tensors if all of them are packed and can be kept in 4 bits, or else an empty
        list.
        """
        packed = [each for each in stored if isinstance(each, PackedMatrix)]
        kept = all(self.loading.policy.int4(each.name) for each in packed)
        return packed if kept and len(packed) == len(stored) else []

    def _read(self, part: Part) -> Numbers:
        """Read a slice of the matrix to the device.

        Raises CheckpointError if a tensor is missing, or contradicts the others.
        """
        files, names = self.loading.files, self.names
        pieces = {role: files.read_slice(piece) for role, piece in self._parts(part).items()}
        if not pieces["scales"].isfinite().all():
            raise files.wrong(
                names["scales"], "has values that are not finite: the checkpoint is damaged"
            )
        if "shape" in pieces and pieces["shape"].tolist() != list(part.shape):
            raise files.wrong(
                names["shape"],
                f"says {pieces['shape'].tolist()}, but config.json makes it {list(part.shape)}",
            )
        groups = self.packed.groups(part.shape[1])
        if "order" in pieces and part.shape[1]:
            least, most = (int(value) for value in pieces["order"].aminmax())
            if least < 0 or most >= groups:
                raise files.wrong(
                    names["order"], f"names groups from {least} to {most}, but has {groups}"
                )
        return unpack_matrix(self.packed, pieces, part, self.loading.device)

    def _parts(self, part: Part) -> dict[Role, Part]:
        """Return the description of each stored tensor of the matrix, which is not sliced.

        Raises CheckpointError if a tensor is missing, or has an unsupported format or shape.
        """
        files, found = self.loading.files, dict[Role, Part]()
        for role, piece in self.packed.pieces(*part.shape).items():
            if role not in self.names:
                if piece.optional:
                    continue
                raise CheckpointError(
                    f"{files.folder}: no file has the tensor "
                    f"{self.name.removesuffix('weight')}{piece.suffix}, the {role} of "
                    f"{self.name}: the checkpoint is incomplete"
                )
            name = self.names[role]
            kind, shape = files.describe(name)
            if kind not in piece.stored:
                raise files.wrong(
                    name,
                    f"is stored as {kind}; the {role} of packed matrices "
                    f"are {', '.join(piece.stored)}",
                )
            if shape != piece.shape:
                raise files.misshapen(name, shape, piece.shape)
            found[role] = Part(name, shape)
        return found


def names_of(files: TensorFiles, weight: str, packed: Packed) -> dict[Role, str]:
    """Return the canonical names of the tensors that store a packed matrix, by role.

    weight: the canonical name of the matrix.
    """
    module = weight.removesuffix("weight")
    names = {role: module + suffix for role, suffix in SUFFIXES[packed.layout].items()}
    return {role: name for role, name in names.items() if name in files}


def find_packed(files: TensorFiles, quantization: Quantization | None) -> dict[str, Packed]:
    """Return the packed matrices, by the names of their layers.

    Raises CheckpointError for a matrix that is also present unpacked.
    """
    found: dict[str, Packed] = {}
    for canonical in files if quantization else ():
        module, _, suffix = canonical.rpartition(".")
        if suffix not in VALUES:
            continue
        stored_module = files.locate(canonical)[1].removesuffix(f".{suffix}")
        packed = quantization.scheme(stored_module, module) if quantization else None
        if not isinstance(packed, Packed) or packed.values_suffix != suffix:
            continue
        if f"{module}.weight" in files:
            raise files.wrong(canonical, "is there, and the same matrix unpacked as well")
        found[f"{module}.weight"] = packed
    return found
