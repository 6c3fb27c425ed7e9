"""Tensors of a checkpoint, from safetensors files or from random numbers, as a network's layers ask
for them (`nn.weights.Weights`).

Each tensor is read when its layer is built, only the slice that this rank holds, and straight into
the layer's own storage: peak memory is about the model's size. Knows nothing of families beyond the
registry.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from saccade.core.config import EncoderMode, PatchEmbedding
from saccade.core.errors import CheckpointError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import read_json
from saccade.families.registry import net_module
from saccade.nn.protocol import FamilyNet
from saccade.nn.weights import Part
from saccade.parallel import WHOLE, Shard

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

FORMATS = frozenset({"F32", "F16", "BF16"})
"""What weights may be stored in, as safetensors calls it."""
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
    patch_embed: PatchEmbedding = "exact",
    load_format: LoadFormat = "auto",
    progress: bool = True,
) -> FamilyNet:
    """Build the network of `spec` with the weights in `folder`; with "dummy", with random weights
    and without reading any.

    `shard` is the slice of this rank; `encoder` says whether it goes for the vision tower too, or
    each rank holds all of that.

    Raises CheckpointError naming file and tensor for one that is missing, misshapen or damaged, in
    a number format that cannot be read (before any is copied), or not finite.
    Tensors that no layer asks for are warned of, unless the family knows them to be harmless.
    """
    module = net_module(spec)
    encoder_shard = shard if encoder == "weights" else WHOLE
    net: FamilyNet
    if load_format == "dummy":
        net = module.build(spec, DummyWeights(dtype, device), shard, encoder_shard, patch_embed)
        return net
    with CheckpointWeights(
        folder, module.canonical_name, dtype, device, progress=progress
    ) as weights:
        weights.check_formats(lambda name: module.harmless(name, spec))
        net = module.build(spec, weights, shard, encoder_shard, patch_embed)
        if unused := [name for name in weights.unused() if not module.harmless(name, spec)]:
            shown = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
            logger.warning(
                "%s: %d tensors belong to no layer of %s and are ignored: %s",
                folder,
                len(unused),
                spec.family,
                shown,
            )
    return net


class CheckpointWeights:
    """The tensors of the *.safetensors files of a folder, under the family's canonical names. A
    context manager: it owns a progress bar.

    A file is mapped for one tensor at a time: what is mapped counts as this process's memory.
    """

    def __init__(
        self,
        folder: Path,
        canonical_name: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        progress: bool,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        files = _weight_files(folder)
        self._places = {
            canonical_name(name): (path, name)
            for path in files
            for name in list(_open(path).keys())
        }
        self._wanted: set[str] = set()
        total = sum(path.stat().st_size for path in files)
        self._bar = tqdm(
            total=total,
            desc="weights",
            unit="B",
            unit_scale=True,
            disable=not (progress and sys.stderr.isatty()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def load(self, *parts: Part) -> torch.Tensor:
        rows = [part.wanted[0] for part in parts]
        for part in parts:  # before memory is taken for what config.json makes of them
            self._check_shape(part)
        with _in_memory(parts):
            whole = torch.empty(
                (sum(rows), *parts[0].wanted[1:]), dtype=self.dtype, device=self.device
            )
        for part, target in zip(parts, whole.split(rows)):
            piece = self._read(part)
            target.copy_(piece)
            self._check_finite(part, target)
            self._bar.update(piece.nbytes)
        return whole

    def check_formats(self, harmless: Callable[[str], bool]) -> None:
        """Whether every tensor is in a format that can be read, but for those that nothing asks
        for anyway.

        A quantised checkpoint's numbers mean nothing without their scales. Raises CheckpointError
        naming file, tensor and format.
        """
        names: dict[Path, list[tuple[str, str]]] = {}
        for canonical, (path, name) in self._places.items():
            names.setdefault(path, []).append((canonical, name))
        for path, tensors in names.items():
            file = _open(path)
            for canonical, name in tensors:
                kind = file.get_slice(name).get_dtype()
                if kind not in FORMATS | BUFFERS and not harmless(canonical):
                    raise _unreadable(path, name, kind)

    def unused(self) -> list[str]:
        """Canonical names that nothing has asked for."""
        return sorted(self._places.keys() - self._wanted)

    def _check_shape(self, part: Part) -> None:
        """Raises CheckpointError unless a file has the tensor, in a format that can be read, and of
        the shape that config.json makes it.
        """
        self._wanted.add(part.name)
        if part.name not in self._places:
            raise CheckpointError(
                f"{self._folder}: no file has the tensor {part.name}, which config.json asks for"
            )
        path, name = self._places[part.name]
        try:
            stored = _open(path).get_slice(name)
            if (kind := stored.get_dtype()) not in FORMATS:
                raise _unreadable(path, name, kind)
            shape = tuple(stored.get_shape())
            if shape != part.shape:
                raise CheckpointError(
                    f"{path}: tensor {name} is {list(shape)}, but config.json makes it "
                    f"{list(part.shape)}"
                )
        except SafetensorError as error:
            raise _damaged(path, name, error) from error

    def _read(self, part: Part) -> torch.Tensor:
        """The wanted slice as the file has it (a view of the mapped file where all of it is
        wanted).
        """
        path, name = self._places[part.name]
        try:
            stored = _open(path).get_slice(name)
            piece: torch.Tensor = stored[part.index or (slice(None),)]
        except SafetensorError as error:
            raise _damaged(path, name, error) from error
        return piece

    def _check_finite(self, part: Part, target: torch.Tensor) -> None:
        """Raises CheckpointError for weights with which every answer would be nothing at all.

        The least and the greatest tell: a NaN anywhere makes both one. They cost as much as the
        copy from memory (0.5 s for 2 billion bfloat16 on two cores), `isfinite` twenty times that.
        """
        least, greatest = torch.stack(torch.aminmax(target)).tolist() if target.numel() else (0, 0)
        if not (math.isfinite(least) and math.isfinite(greatest)):
            path, name = self._places[part.name]
            raise CheckpointError(
                f"{path}: tensor {name} has values that are not finite in "
                f"{str(self.dtype).removeprefix('torch.')} (from {least:g} to {greatest:g}): the "
                "checkpoint is damaged, or needs another --dtype"
            )


class DummyWeights:
    """Random weights, the same for the same names: scaled so that activations stay finite, with
    norms of one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._seed = seed

    def load(self, *parts: Part) -> torch.Tensor:
        with _in_memory(parts):
            made = [self._make(part.name, part.shape)[part.index] for part in parts]
            return torch.cat(made).to(self.dtype)

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return (
                torch.zeros(shape, device=self.device)
                if name.endswith("bias")
                else torch.ones(shape, device=self.device)
            )
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(
            self._seed ^ int.from_bytes(digest, "little")
        )
        return torch.randn(shape, generator=generator, device=self.device) / math.sqrt(
            math.prod(shape[1:])
        )


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold weights: those of the index where there is one.

    Raises CheckpointError where any is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).section("weight_map").data.values()))
        files = [folder / str(name) for name in names]
        if missing := [path.name for path in files if not path.is_file()]:
            raise CheckpointError(
                f"{index} names files that are not there: {', '.join(missing)}: the download "
                "is not complete"
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors file (only safetensors are read; --load-format "
            "dummy needs none)"
        )
    return files


@contextmanager
def _in_memory(parts: Sequence[Part]) -> Iterator[None]:
    """Raises CheckpointError where there is no memory for these parts."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for it on a CPU
        shown = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise CheckpointError(
            f"there is no memory for what config.json asks for: {shown}: {str(error)[:200]}"
        ) from error


def _damaged(path: Path, name: str, error: SafetensorError) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {name} cannot be read: {error}")


def _unreadable(path: Path, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name} is stored as {kind}; only F32, F16 and BF16 weights can be read "
        "(no quantised ones yet): use the model's unquantised checkpoint"
    )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not complete: {error}") from error
