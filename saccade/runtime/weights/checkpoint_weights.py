"""Tensors from a checkpoint's safetensors or GGUF files, as a network's layers ask for them
(`nn.weights.Weights`).

Each tensor is read when its layer is built, only this rank's slice, and straight into the layer's
own storage: peak memory is about the model's size. Knows nothing of families beyond the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self, TypeVar

import torch
from blake3 import blake3

from saccade.core.config import EncoderMode, QuantizationMode, TowerQuantization
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import read_json
from saccade.families.quantization import Quantization, Scheme, read_quantization
from saccade.families.registry import family_model
from saccade.kernels.device import has_fp8, has_int4
from saccade.kernels.matrix import Fp8Experts, Matrix
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.int8 import runs_int8
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import Adapters, of_language
from saccade.nn.protocol import FamilyNet, TowerNet
from saccade.nn.weights import Part
from saccade.parallel import WHOLE, Shard
from saccade.runtime.weights.dummy import DummyWeights, in_memory
from saccade.runtime.weights.quant_policy import (
    AS_STORED,
    LoadTally,
    QuantPolicy,
    check_int8,
    check_made,
)
from saccade.runtime.weights.stored import (
    FORMATS,
    LoadContext,
    PlainTensor,
    StoredTensor,
    unreadable,
)
from saccade.runtime.weights.stored_gguf import BlockTensor
from saccade.runtime.weights.stored_packed import PackedMatrix, find_packed, names_of
from saccade.runtime.weights.stored_scaled import ScaledTensor, scales_name
from saccade.runtime.weights.tensors import Gauge, ReportProgress, TensorFiles, ignore_progress

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

BUFFERS = frozenset({"I64", "BOOL"})
"""What no quantisation stores weights in: old checkpoints hold positions and counters in these."""


def load_net(
    spec: FamilySpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    encoder: EncoderMode = "weights",
    load_format: LoadFormat = "auto",
    quantization: QuantizationMode = "auto",
    quantization_tower: TowerQuantization = "none",
    tally: LoadTally | None = None,
    on_progress: ReportProgress = ignore_progress,
    ops: Ops | None = None,
    tower: TowerDigest | None = None,
    file: Path | None = None,
) -> FamilyNet:
    """Build the network of `spec` with the weights in `folder`.

    `file`: read weights from this one file (in safetensors' layout), and only config.json from the
    folder. With "dummy", weights are random and no file is read.

    `shard` is this rank's slice. `encoder`: whether each rank has a slice of the vision tower or
    the whole. `tally` counts 8-bit matrices. `on_progress` is called with the bytes read and the
    bytes in all. Without `ops`, the device's kernels are used. `tower` takes in this rank's slice
    of the vision tower.

    Raises ConfigError for a quantisation that cannot run here. Raises CheckpointError, naming file
    and tensor, for a tensor that is missing, misshapen, damaged, not finite, or in an unreadable
    format (before any copy). Logs a warning for tensors that no layer asks for, unless known to the
    family as harmless.
    """
    model, ops = family_model(spec), ops or pick_ops(device, dtype)
    encoder_shard = shard if encoder == "weights" else WHOLE
    made = quantization if quantization in ("int8", "int4") else None
    if made:
        check_made(made, device)
    policy = QuantPolicy(
        model.projection,
        made=made,
        native=device.type == "cpu" and runs_int8() and quantization != "none",
        tally=tally or LoadTally(),
        fp8=has_fp8(device) and quantization != "none",
        few=made == "int4" or (quantization == "auto" and has_int4(device, dtype)),
        tower=quantises_tower(quantization_tower, device),
    )
    if load_format == "dummy":
        random = DummyWeights(dtype, device, policy=policy, ops=ops)
        return check_language(policy, model.build(random, shard, encoder_shard))
    with CheckpointWeights(
        file or folder,
        model.canonical_name,
        dtype,
        device,
        quantization=read_quantization(read_json(folder / "config.json")),
        policy=policy,
        on_progress=on_progress,
        ops=ops,
        tower=tower,
    ) as weights:
        weights.check_formats(lambda name: model.harmless(name))
        net = model.build(weights, shard, encoder_shard)
        _warn_of([name for name in weights.unused() if not model.harmless(name)], folder)
    return check_language(policy, net)


def load_tower(
    spec: FamilySpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    encoder: EncoderMode = "weights",
    load_format: LoadFormat = "auto",
    quantization_tower: TowerQuantization = "none",
    tally: LoadTally | None = None,
    on_progress: ReportProgress = ignore_progress,
) -> TowerNet:
    """Build the vision tower alone, as `load_net` does, without reading the language model.

    Raises ConfigError, CheckpointError.
    """
    model = family_model(spec)
    encoder_shard = shard if encoder == "weights" else WHOLE
    tally = tally or LoadTally()
    policy = replace(AS_STORED, tally=tally, tower=quantises_tower(quantization_tower, device))
    if load_format == "dummy":
        dummy = DummyWeights(dtype, device, policy=policy)
        return check_tower(policy, model.build_tower(dummy, encoder_shard))
    name = model.canonical_name
    with CheckpointWeights(
        folder, name, dtype, device, policy=policy, on_progress=on_progress
    ) as weights:
        net = model.build_tower(weights, encoder_shard)
    return check_tower(policy, net)


Net = TypeVar("Net", bound=TowerNet)


def quantises_tower(wanted: TowerQuantization, device: torch.device) -> bool:
    """Return True if the tower is to be quantised.

    Raises ConfigError for a device without products in 8 bits.
    """
    if wanted == "int8":
        check_int8("--quantization-tower int8", "--quantization-tower none", device)
    return wanted == "int8"


def check_language(policy: QuantPolicy, net: Net) -> Net:
    """Return `net`. Raises ConfigError where matrices should be quantised, and none are ours."""
    if policy.made and not policy.tally.kinds:
        raise ConfigError(
            f"--quantization {policy.made}: the language model has no matrices of Saccade's own "
            "(transformers' modules compute it), so that nothing would be quantised; use "
            "--quantization auto"
        )
    return check_tower(policy, net)


def check_tower(policy: QuantPolicy, net: Net) -> Net:
    """Return `net`.

    Raises ConfigError where a tower should be quantised, and there is none with matrices of ours.
    """
    if policy.tower and not policy.tally.tower.count:
        raise ConfigError(
            "--quantization-tower int8: this model has no vision tower, or transformers' own, "
            "which stays whole; use --quantization-tower none"
        )
    return net


def _warn_of(unused: Sequence[str], folder: Path) -> None:
    """Log the checkpoint's tensors in `folder` that no layer has asked for."""
    if unused:
        logger.warning(
            "%s: %d tensors belong to no layer and are ignored: %s",
            folder,
            len(unused),
            ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else ""),
        )


class TowerDigest:
    """A fingerprint of a vision tower's weights: a hash over all loaded tensors."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add_tensor(self, part: Part, values: torch.Tensor) -> None:
        """Add a tensor's `values`, as loaded. Skips those for the language model."""
        if not of_language(part.name):
            self._hash.update(repr((part, values.dtype)).encode())
            self._hash.update(values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def hex(self) -> str:
        return self._hash.hexdigest()


class CheckpointWeights:
    """The tensors in a folder's files, under the family's canonical names.

    A context manager. At the end it reports all as read.
    """

    def __init__(
        self,
        folder: Path,
        canonical_name: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: Quantization | None = None,
        policy: QuantPolicy = AS_STORED,
        on_progress: ReportProgress = ignore_progress,
        ops: Ops | None = None,
        tower: TowerDigest | None = None,
    ) -> None:
        self.dtype = dtype
        self._tower = tower
        self.device = device
        self.ops = ops or pick_ops(device, dtype)
        self.adapters = Adapters()
        self._quantization = quantization
        self._policy = policy
        self._files = files = TensorFiles(folder, canonical_name)
        self._packed = find_packed(files, quantization)
        self._gauge = Gauge(on_progress, files.total)
        self._loading = LoadContext(files, dtype, device, policy, self._gauge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._gauge.close()

    def load(self, *parts: Part) -> torch.Tensor:
        return self._restore(parts, [self._stored(part.name) for part in parts])

    def load_matrix(self, *parts: Part) -> Matrix:
        stored = [self._stored(part.name) for part in parts]
        few = stored[0].product(stored, parts)
        return few or self._policy.make(self._restore(parts, stored), parts)

    def load_experts(self, parts: Sequence[Part], turned: bool) -> Fp8Experts | None:
        stored = [self._stored(part.name) for part in parts]
        return stored[0].experts(stored, parts, turned)

    def _restore(self, parts: Sequence[Part], stored: Sequence[StoredTensor]) -> torch.Tensor:
        for each, part in zip(stored, parts):
            each.check(part)  # before memory is taken for what config.json makes of them
        rows = [part.wanted[0] if part.wanted else 1 for part in parts]  # a number is a row
        with in_memory(parts):
            whole = torch.empty(
                (sum(rows), *parts[0].wanted[1:]), dtype=self.dtype, device=self.device
            )
        for each, part, target in zip(stored, parts, whole.split(rows)):
            each.restore(part, target)
            if self._tower is not None:
                self._tower.add_tensor(part, target)
        return whole

    def has(self, name: str) -> bool:
        return name in self._files or name in self._packed

    def equals(self, part: Part, values: torch.Tensor) -> bool:
        return self._stored(part.name).equals(part, values)

    def fits(self, part: Part) -> bool:
        return part.name in self._files and self._files.describe(part.name)[1] == part.shape

    def matrix(self, weight: torch.Tensor, name: str) -> Matrix:
        return self._policy.make(weight, [Part(name, tuple(weight.shape))])

    def found(self, name: str, values: torch.Tensor) -> None:
        if self._tower is not None:
            self._tower.add_tensor(Part(name, tuple(values.shape)), values)

    def check_formats(self, harmless: Callable[[str], bool]) -> None:
        """Check that every tensor has a readable format, except tensors that no layer asks for.

        A quantised checkpoint's numbers only mean something with their scales, which must be
        present too. Raises CheckpointError naming file, tensor and format.
        """
        files = self._files
        packed = {
            name
            for weight, layout in self._packed.items()
            for name in names_of(files, weight, layout).values()
        }
        for name, kind, shape in files.by_file():
            if kind in FORMATS | BUFFERS or name in packed or harmless(name):
                continue
            stored = self._stored(name)
            if not isinstance(stored, ScaledTensor):
                raise unreadable(files, name, kind)
            stored.check_scales(shape)

    def unused(self) -> list[str]:
        """Return canonical names that no layer has asked for."""
        leftover = self._quantization.leftover if self._quantization else lambda _: False
        return sorted(
            name
            for name in self._files.unasked()
            if not (leftover(name) or self._adds_nothing(name))
        )

    def _adds_nothing(self, name: str) -> bool:
        """Return True if a tensor is a bias of zeros, as GPTQ's tools add to matrices."""
        weight = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or weight not in self._packed:
            return False
        return not self._files.read_slice(Part(name, ())).any()

    def _stored(self, name: str) -> StoredTensor:
        """Return a tensor's form. A missing tensor is plain, and refused when checked.

        Raises CheckpointError for a tensor that should be quantised and is not.
        """
        files = self._files
        if name in self._packed:
            return PackedMatrix(self._loading, name, self._packed[name])
        if name in files and (blocks := files.in_blocks(name)) is not None:
            return BlockTensor(self._loading, name, blocks)
        if self._quantization is None or name not in files:
            return PlainTensor(self._loading, name)
        stored_name = files.locate(name)[1]
        modules = stored_name.removesuffix(".weight"), name.removesuffix(".weight")
        scheme = self._quantization.scheme(*modules)
        if not isinstance(scheme, Scheme):
            return PlainTensor(self._loading, name)
        kind, _ = files.describe(name)
        if kind in FORMATS and scales_name(name, scheme) in files:
            raise files.wrong(
                name,
                f"is stored as {kind}, but has scales, and config.json's quantization_config makes "
                f"it {scheme.stored}",
            )
        if kind != scheme.stored:
            return PlainTensor(self._loading, name)
        return ScaledTensor(self._loading, name, scheme)
