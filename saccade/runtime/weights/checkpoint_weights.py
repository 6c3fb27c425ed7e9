"""Tensors from a checkpoint's files, in safetensors or a plugin's format, as a network's layers ask
for them (`nn.weights.Weights`).

Each tensor is read when its layer is built, only this rank's slice, and straight into the layer's
own storage: peak memory is about the model's size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, Self, TypeVar

import torch
from blake3 import blake3

from saccade.core.config import EncoderMode, QuantizationMode, TowerQuantization
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import Section, read_json
from saccade.families.registry import family_model, find_format
from saccade.kernels.device import has_fp8
from saccade.kernels.matrix import Fp8Experts, Matrix
from saccade.kernels.ops import pick_ops
from saccade.kernels.processor import runs_int8
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import Adapters, of_language
from saccade.nn.protocol import FamilyNet, TowerNet
from saccade.nn.weights import Part
from saccade.parallel import UNSHARDED, Shard
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
    find_forms,
    in_memory,
    unreadable,
)
from saccade.runtime.weights.tensors import (
    ProgressReporter,
    ReportProgress,
    TensorFiles,
    ignore_progress,
)

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

BUFFERS = frozenset({"I64", "BOOL"})
"""Dtypes without weights: old checkpoints store positions and counters in these."""


def load_net(
    spec: FamilySpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = UNSHARDED,
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

    `shard` is this rank's slice. `encoder`: whether each rank has a slice of the vision encoder or
    the whole. `tally` counts 8-bit matrices. `on_progress` is called with the bytes read and the
    bytes in all. Without `ops`, the device's kernels are used. `tower` takes in this rank's slice
    of the vision encoder.

    Raises ConfigError for a quantisation that cannot run here. Raises CheckpointError, naming file
    and tensor, for a tensor that is missing, misshapen, damaged, not finite, or in an unreadable
    format (before any copy). Logs a warning for tensors that no layer asks for, unless known to the
    family as harmless.
    """
    model, ops = family_model(spec), ops or pick_ops(device, dtype)
    encoder_shard = shard if encoder == "weights" else UNSHARDED
    policy = choose_policy(
        model.projection, quantization, quantization_tower, dtype, device, ops, tally or LoadTally()
    )
    if load_format == "dummy":
        from saccade.runtime.weights.dummy import DummyWeights

        random = DummyWeights(dtype, device, policy=policy, ops=ops)
        return check_language(policy, model.build(random, shard, encoder_shard))
    with CheckpointWeights(
        file or folder,
        model.canonical_name,
        dtype,
        device,
        config=read_json(folder / "config.json"),
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
    shard: Shard = UNSHARDED,
    encoder: EncoderMode = "weights",
    load_format: LoadFormat = "auto",
    quantization_tower: TowerQuantization = "none",
    tally: LoadTally | None = None,
    on_progress: ReportProgress = ignore_progress,
) -> TowerNet:
    """Build the vision encoder alone, as `load_net` does, without reading the language model.

    Raises ConfigError, CheckpointError.
    """
    model = family_model(spec)
    encoder_shard = shard if encoder == "weights" else UNSHARDED
    tally = tally or LoadTally()
    policy = replace(AS_STORED, tally=tally, tower=quantises_tower(quantization_tower, device))
    if load_format == "dummy":
        from saccade.runtime.weights.dummy import DummyWeights

        dummy = DummyWeights(dtype, device, policy=policy)
        return check_tower(policy, model.build_tower(dummy, encoder_shard))
    name = model.canonical_name
    with CheckpointWeights(
        folder, name, dtype, device, policy=policy, on_progress=on_progress
    ) as weights:
        net = model.build_tower(weights, encoder_shard)
    return check_tower(policy, net)


def choose_policy(
    projection: Callable[[str], bool],
    quantization: QuantizationMode,
    quantization_tower: TowerQuantization,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    tally: LoadTally,
) -> QuantPolicy:
    """Return which matrices are kept in few bits, or are made so.

    projection: as in `QuantPolicy`. ops: the device's.

    Raises ConfigError for a quantisation that cannot run here.
    """
    made = quantization if quantization in ("int8", "int4") else None
    if made:
        check_made(made, device, ops)
    return QuantPolicy(
        projection,
        made=made,
        native=device.type == "cpu" and runs_int8() and quantization != "none",
        tally=tally,
        fp8=has_fp8(device) and quantization != "none",
        few=made == "int4" or (quantization == "auto" and has_int4(ops, device, dtype)),
        tower=quantises_tower(quantization_tower, device),
    )


def has_int4(ops: Ops, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if stored 4-bit matrices stay so, and rows keep the dtype's meaning.

    On a CPU rows become 8 bits, against the intent of a float32 run.
    """
    return ops.takes_int4 and (device.type != "cpu" or dtype != torch.float32)


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
            "(transformers' modules compute it), so nothing would be quantised; use "
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
            "which is not quantised; use --quantization-tower none"
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
    """A fingerprint of a vision encoder's weights: a hash over all loaded tensors."""

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

    config: config.json, where tensors may be quantised. A context manager. At the end it reports
    all as read.
    """

    def __init__(
        self,
        folder: Path,
        canonical_name: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        config: Section | None = None,
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
        self._policy = policy
        self._files = files = TensorFiles(folder, canonical_name)
        self._gauge = ProgressReporter(on_progress, files.total)
        self._loading = LoadContext(files, dtype, device, self.ops, policy, self._gauge)
        self._forms = None if config is None else find_forms(config, self._loading)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._gauge.close()

    def load(self, *parts: Part) -> torch.Tensor:
        return self._restore(parts, [self._stored(part.name) for part in parts])

    def load_matrix(self, *parts: Part) -> Matrix:
        stored = [self._stored(part.name) for part in parts]
        few = stored[0].product(stored, parts)
        return few or self._policy.make(self._restore(parts, stored), parts, self.ops)

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
        return name in self._files or (self._forms is not None and name in self._forms)

    def equals(self, part: Part, values: torch.Tensor) -> bool:
        return self._stored(part.name).equals(part, values)

    def fits(self, part: Part) -> bool:
        return part.name in self._files and self._files.describe(part.name)[1] == part.shape

    def matrix(self, weight: torch.Tensor, name: str) -> Matrix:
        return self._policy.make(weight, [Part(name, tuple(weight.shape))], self.ops)

    def found(self, name: str, values: torch.Tensor) -> None:
        if self._tower is not None:
            self._tower.add_tensor(Part(name, tuple(values.shape)), values)

    def check_formats(self, harmless: Callable[[str], bool]) -> None:
        """Check that every tensor has a readable format, except tensors that no layer asks for.

        A quantised checkpoint's numbers only mean something with their scales, which must be
        present too. Raises CheckpointError naming file, tensor and format.
        """
        for name, kind, shape in self._files.by_file():
            if kind in FORMATS | BUFFERS or harmless(name):
                continue
            if self._forms is None or not self._forms.reads(name, shape):
                raise unreadable(self._files, name, kind)

    def unused(self) -> list[str]:
        """Return canonical names that no layer has asked for."""
        ignores = self._forms.ignores if self._forms is not None else lambda _: False
        return sorted(name for name in self._files.unasked() if not ignores(name))

    def _stored(self, name: str) -> StoredTensor:
        """Return a tensor's form. A missing tensor is plain, and refused when checked.

        Raises CheckpointError for a tensor that should be quantised and is not.
        """
        files, stored = self._files, None
        if self._forms is not None:
            stored = self._forms.find(name)
        elif name in files and (found := find_format(files.locate(name)[0])) is not None:
            stored = resolve_name(found.stored)(self._loading, name)
        return stored or PlainTensor(self._loading, name)
