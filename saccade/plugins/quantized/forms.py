"""Determines from config.json which tensors of a checkpoint are quantized, and in which format."""

from __future__ import annotations

from saccade.families.checkpoint import Section
from saccade.nn.weights import Part
from saccade.plugins.quantized.packed import PackedMatrix, find_packed, names_of
from saccade.plugins.quantized.quantization import Quantization, Scheme, read_quantization
from saccade.plugins.quantized.scaled import ScaledTensor, scales_name
from saccade.runtime.weights.stored import FORMATS, LoadContext, StoredForms, StoredTensor


def read_forms(config: Section, loading: LoadContext) -> StoredForms | None:
    """Return the formats that config.json specifies, or None if nothing is quantized.

    Raises CheckpointError for an unsupported method, or a matrix that is stored in two formats.
    """
    quantization = read_quantization(config)
    return None if quantization is None else QuantizedForms(quantization, loading)


class QuantizedForms:
    """Finds and reads the quantized tensors of a checkpoint. Implements
    `runtime.weights.stored.StoredForms`.
    """

    def __init__(self, quantization: Quantization, loading: LoadContext) -> None:
        self._quantization = quantization
        self._loading = loading
        self._packed = find_packed(loading.files, quantization)
        self._pieces = {
            name
            for weight, layout in self._packed.items()
            for name in names_of(loading.files, weight, layout).values()
        }

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def find(self, name: str) -> StoredTensor | None:
        """Return a quantized tensor, or None if the tensor is not quantized.

        Raises CheckpointError for a tensor that should be quantized, but is not.
        """
        files = self._loading.files
        if name in self._packed:
            return PackedMatrix(self._loading, name, self._packed[name])
        if name not in files:
            return None
        stored_name = files.locate(name)[1]
        modules = stored_name.removesuffix(".weight"), name.removesuffix(".weight")
        scheme = self._quantization.scheme(*modules)
        if not isinstance(scheme, Scheme):
            return None
        kind, _ = files.describe(name)
        if kind in FORMATS and scales_name(name, scheme) in files:
            raise files.wrong(
                name,
                f"is stored as {kind}, but has scales, and config.json's quantization_config makes "
                f"it {scheme.stored}",
            )
        return ScaledTensor(self._loading, name, scheme) if kind == scheme.stored else None

    def reads(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor is quantized and can be read.

        Raises CheckpointError if its scales are missing.
        """
        if name in self._pieces:
            return True
        stored = self.find(name)
        if not isinstance(stored, ScaledTensor):
            return False
        stored.check_scales(shape)
        return True

    def ignores(self, name: str) -> bool:
        """Return True for a tensor that no layer needs: scales of activations or of the KV cache,
        and the zero biases that GPTQ's tools add.
        """
        if self._quantization.leftover(name):
            return True
        weight = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or weight not in self._packed:
            return False
        return not self._loading.files.read_slice(Part(name, ())).any()
