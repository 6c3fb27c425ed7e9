"""Loads a network's weights from a checkpoint, in safetensors or in a plugin's format
(`nn.weights.Weights`).

Each tensor is read when its layer is built. Only this rank's slice is read, directly into the
memory of the layer. So peak memory is about the size of the model.
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
"""Dtypes that are ignored, because they are not used for weights. Old checkpoints store positions
and counters in them.
"""


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

    shard: this rank's slice of the network.
    encoder: "weights" if each rank has a slice of the vision encoder, "data" if it has all of it.
    load_format: "dummy" uses random weights and reads no weight file.
    tally: counts the quantized matrices.
    on_progress: called with the bytes read so far, and the total bytes.
    ops: the operations to use. The default is those of the device.
    tower: updated with this rank's weights of the vision encoder.
    file: read the weights from this file (in safetensors' layout), and only config.json from
        `folder`.

    Raises ConfigError if the device does not support the quantization. Raises CheckpointError, with
    the file and the tensor's name, if a tensor is missing, has another shape, is damaged or not
    finite, or has an unsupported format (which is checked before anything is copied). Logs a
    warning about tensors that no layer uses, unless the family lists them as harmless.
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
    """Build and return only the vision encoder. The language model is not read.

    The arguments are those of `load_net`. Raises ConfigError, CheckpointError.
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
    """Return which matrices are quantized in memory, given the options and the device.

    Raises ConfigError if the device does not support the quantization.

    projection: as in `QuantPolicy`.
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
    """Return True if matrices that are stored in 4 bits stay in 4 bits.

    This is not done for float32 on a CPU. The kernels quantize activations to 8 bits, which a user
    of float32 does not expect.
    """
    return ops.takes_int4 and (device.type != "cpu" or dtype != torch.float32)


Net = TypeVar("Net", bound=TowerNet)


def quantises_tower(wanted: TowerQuantization, device: torch.device) -> bool:
    """Return True if the vision encoder should be quantized.

    Raises ConfigError if the device does not support int8 matrices.
    """
    if wanted == "int8":
        check_int8("--quantization-tower int8", "--quantization-tower none", device)
    return wanted == "int8"


def check_language(policy: QuantPolicy, net: Net) -> Net:
    """Return `net`.

    Raises ConfigError if quantization was requested but no matrix was quantized.
    """
    if policy.made and not policy.tally.kinds:
        raise ConfigError(
            f"--quantization {policy.made}: the language model runs on transformers' modules, so "
            "no matrix would be quantized; use --quantization auto"
        )
    return check_tower(policy, net)


def check_tower(policy: QuantPolicy, net: Net) -> Net:
    """Return `net`.

    Raises ConfigError if quantization of the vision encoder was requested but none of its matrices
    was quantized.
    """
    if policy.tower and not policy.tally.tower.count:
        raise ConfigError(
            "--quantization-tower int8: this model has no vision encoder, or one of "
            "transformers' modules, which is not quantized; use --quantization-tower none"
        )
    return net


def _warn_of(unused: Sequence[str], folder: Path) -> None:
    if unused:
        logger.warning(
            "%s: %d tensors are not used by any layer, and are ignored: %s",
            folder,
            len(unused),
            ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else ""),
        )


class TowerDigest:
    """Computes a hash of the vision encoder's weights that this rank has loaded."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add_tensor(self, part: Part, values: torch.Tensor) -> None:
        """Add the loaded `values` of a tensor, unless it belongs to the language model."""
        if not of_language(part.name):
            self._hash.update(repr((part, values.dtype)).encode())
            self._hash.update(values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def hex(self) -> str:
        return self._hash.hexdigest()


class CheckpointWeights:
    """Loads tensors from the files of a directory, by the family's canonical names.

    Use it as a context manager: on exit, all bytes are reported as read.

    config: config.json, which specifies quantized tensors, or None if no tensor is quantized.
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
            each.check(part)  # before memory for the shapes in config.json is allocated
        # a scalar counts as one row
        rows = [part.wanted[0] if part.wanted else 1 for part in parts]
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
        """Raise CheckpointError unless all tensors that are not `harmless` have supported formats.

        Quantized tensors are supported only if config.json specifies their quantization. The error
        has the file, the tensor's name and its format.
        """
        for name, kind, shape in self._files.by_file():
            if kind in FORMATS | BUFFERS or harmless(name):
                continue
            if self._forms is None or not self._forms.reads(name, shape):
                raise unreadable(self._files, name, kind)

    def unused(self) -> list[str]:
        """Return the canonical names of tensors that no layer uses."""
        ignores = self._forms.ignores if self._forms is not None else lambda _: False
        return sorted(name for name in self._files.unasked() if not ignores(name))

    def _stored(self, name: str) -> StoredTensor:
        """Return the tensor `name`, quantized or plain.

        A missing tensor is returned as plain, and `check` raises for it. Raises CheckpointError if
        the tensor should be quantized according to config.json and is not.
        """
        files, stored = self._files, None
        if self._forms is not None:
            stored = self._forms.find(name)
        elif name in files and (found := find_format(files.locate(name)[0])) is not None:
            stored = resolve_name(found.stored)(self._loading, name)
        return stored or PlainTensor(self._loading, name)
