"""Tensors of a checkpoint, from safetensors files, as a network's layers ask for them
(`nn.weights.Weights`).

Each tensor is read when its layer is built, only the slice that this rank holds, and straight into
the layer's own storage: peak memory is about the model's size. Knows nothing of families beyond the
registry.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from saccade.core.config import EncoderMode, QuantizationMode
from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import read_json
from saccade.families.packed import SUFFIXES, Packed, Role
from saccade.families.quantization import Quantization, Scheme, read_quantization
from saccade.families.registry import net_module
from saccade.kernels.device import has_fp8
from saccade.kernels.fp8 import Fp8Matrix, prepare
from saccade.kernels.int8 import Int8Matrix, pack_int8, runs_int8
from saccade.kernels.linear import Matrix
from saccade.nn.protocol import FamilyNet, TowerNet
from saccade.nn.weights import Part
from saccade.parallel import WHOLE, Shard
from saccade.runtime.dummy import DummyWeights, in_memory
from saccade.runtime.packed import restore_packed
from saccade.runtime.quantized import (
    NO_WAYS,
    LoadTally,
    Ways,
    cut_scales,
    fp8_group,
    join_fp8,
    restore,
)

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
    load_format: LoadFormat = "auto",
    quantization: QuantizationMode = "auto",
    tally: LoadTally | None = None,
    progress: bool = True,
) -> FamilyNet:
    """Build the network of `spec` with the weights in `folder`; with "dummy", with random weights
    and without reading any.

    `shard` is the slice of this rank; `encoder` says whether it goes for the vision tower too, or
    each rank holds all of that. `tally` is told what is in 8 bits.

    Raises ConfigError for a `quantization` that cannot run here, and CheckpointError naming file
    and tensor for one that is missing, misshapen or damaged, in a number format that cannot be read
    (before any is copied), or not finite.
    Tensors that no layer asks for are warned of, unless the family knows them to be harmless.
    """
    module = net_module(spec)
    encoder_shard = shard if encoder == "weights" else WHOLE
    net: FamilyNet
    here = device.type == "cpu" and runs_int8()
    if quantization == "int8" and not here:
        raise ConfigError(
            "--quantization int8: it needs --device cpu and an x86 processor with VNNI "
            "(avx512_vnni or avx_vnni); use --quantization auto"
        )
    ways = Ways(
        module.projection,
        made=quantization == "int8",
        native=here and quantization != "none",
        tally=tally or LoadTally(),
        fp8=has_fp8(device) and quantization != "none",
    )
    if load_format == "dummy":
        dummy = DummyWeights(dtype, device, ways=ways)
        net = module.build(spec, dummy, shard, encoder_shard)
        return net
    with CheckpointWeights(
        folder,
        module.canonical_name,
        dtype,
        device,
        quantization=read_quantization(read_json(folder / "config.json")),
        ways=ways,
        progress=progress,
    ) as weights:
        weights.check_formats(lambda name: module.harmless(name, spec))
        net = module.build(spec, weights, shard, encoder_shard)
        _warn_of([name for name in weights.unused() if not module.harmless(name, spec)], folder)
    return net


def load_tower(
    spec: FamilySpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    encoder: EncoderMode = "weights",
    load_format: LoadFormat = "auto",
    progress: bool = True,
) -> TowerNet:
    """The vision tower alone, as in `load_net`; nothing of the language model is read. Raises
    CheckpointError.
    """
    module = net_module(spec)
    encoder_shard = shard if encoder == "weights" else WHOLE
    net: TowerNet
    if load_format == "dummy":
        net = module.build_tower(spec, DummyWeights(dtype, device), encoder_shard)
        return net
    name = module.canonical_name
    with CheckpointWeights(folder, name, dtype, device, progress=progress) as weights:
        net = module.build_tower(spec, weights, encoder_shard)
    return net


def _warn_of(unused: Sequence[str], folder: Path) -> None:
    """Log tensors of the checkpoint in `folder` that no layer has asked for."""
    if unused:
        logger.warning(
            "%s: %d tensors belong to no layer and are ignored: %s",
            folder,
            len(unused),
            ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else ""),
        )


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
        quantization: Quantization | None = None,
        ways: Ways = NO_WAYS,
        progress: bool,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._quantization = quantization
        self._ways = ways
        files = weight_files(folder)
        self._places = {
            canonical_name(name): (path, name)
            for path in files
            for name in list(_open(path).keys())
        }
        self._packed = self._find_packed()
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
        with in_memory(parts):
            whole = torch.empty(
                (sum(rows), *parts[0].wanted[1:]), dtype=self.dtype, device=self.device
            )
        for part, target in zip(parts, whole.split(rows)):
            if (packed := self._packed.get(part.name)) is not None:
                self._restore_packed(part, packed, target)
                self._check_finite(part, target)
                continue
            piece = self._read(part)
            if (scheme := self._scheme(part.name)) is None:
                target.copy_(piece)
            else:
                restore(piece, self._scales(part, scheme), target)
                self._ways.tally.count_restored(piece.nbytes, target)
            self._check_finite(part, target)
            self._bar.update(piece.nbytes)
        return whole

    def load_matrix(self, *parts: Part) -> Matrix:
        schemes = [None if part.name in self._packed else self._scheme(part.name) for part in parts]
        if (group := self._fp8_group(parts, schemes)) is not None:
            return self._load_fp8(parts, [scheme for scheme in schemes if scheme], group)
        if not self._ways.native or not all(
            scheme is not None and scheme.int8_rows and self._ways.projection(part.name)
            for part, scheme in zip(parts, schemes)
        ):
            return self._ways.make(self.load(*parts), parts)
        for part in parts:
            self._check_shape(part)
        pieces = [self._read(part) for part in parts]
        scales = [self._scales(part, scheme) for part, scheme in zip(parts, schemes) if scheme]
        matrix = pack_int8(Int8Matrix(torch.cat(pieces), torch.cat(scales).flatten()))
        shape = (sum(part.wanted[0] for part in parts), parts[0].wanted[1])
        self._ways.tally.count_int8(matrix, shape, self.dtype.itemsize, made=0)
        self._bar.update(sum(piece.nbytes for piece in pieces))
        return matrix

    def _fp8_group(self, parts: Sequence[Part], schemes: Sequence[Scheme | None]) -> int | None:
        """Inputs that share a scale, where these parts stay in FP8; else None."""
        groups = {
            fp8_group(part, scheme)
            if scheme and scheme.stored == "F8_E4M3" and self._ways.projection(part.name)
            else None
            for part, scheme in zip(parts, schemes)
        }
        return groups.pop() if self._ways.fp8 and len(groups) == 1 else None

    def _load_fp8(self, parts: Sequence[Part], schemes: Sequence[Scheme], group: int) -> Fp8Matrix:
        for part in parts:
            self._check_shape(part)
        pieces = [self._read(part).to(self.device) for part in parts]
        scales = [self._scales(part, scheme) for part, scheme in zip(parts, schemes)]
        for part, piece in zip(parts, pieces):
            self._check_finite(part, piece.float())
        matrix = prepare(join_fp8(pieces, scales, group), self.dtype)
        self._ways.tally.count_fp8(matrix, self.dtype.itemsize)
        self._bar.update(matrix.values.nbytes)
        return matrix

    def has(self, name: str) -> bool:
        return name in self._places

    def matrix(self, weight: torch.Tensor, name: str) -> Matrix:
        return self._ways.make(weight, [Part(name, tuple(weight.shape))])

    def check_formats(self, harmless: Callable[[str], bool]) -> None:
        """Whether every tensor is in a format that can be read, but for those that nothing asks
        for anyway.

        A quantised checkpoint's numbers mean nothing without their scales, which must be there
        too. Raises CheckpointError naming file, tensor and format.
        """
        packed = {name for weight in self._packed for name in self._packed_names(weight).values()}
        names: dict[Path, list[tuple[str, str]]] = {}
        for canonical, (path, name) in self._places.items():
            names.setdefault(path, []).append((canonical, name))
        for path, tensors in names.items():
            file = _open(path)
            for canonical, name in tensors:
                kind = file.get_slice(name).get_dtype()
                if kind in FORMATS | BUFFERS or canonical in packed or harmless(canonical):
                    continue
                if (scheme := self._scheme(canonical)) is None:
                    raise _unreadable(path, name, kind)
                shape = tuple(file.get_slice(name).get_shape())
                self._check_scales(canonical, shape, scheme)

    def unused(self) -> list[str]:
        """Canonical names that nothing has asked for."""
        leftover = self._quantization.leftover if self._quantization else lambda _: False
        return sorted(
            name
            for name in self._places.keys() - self._wanted
            if not (leftover(name) or self._adds_nothing(name))
        )

    def _adds_nothing(self, canonical: str) -> bool:
        """Whether a tensor is a bias of zeros, which GPTQ's tools give matrices that have none."""
        weight = canonical.removesuffix("bias") + "weight"
        if not canonical.endswith(".bias") or weight not in self._packed:
            return False
        path, name = self._places[canonical]
        return not _open(path).get_tensor(name).any()

    def _scheme(self, canonical: str) -> Scheme | None:
        """How a tensor is quantised; None for one that is not, or that nothing says the scales of.

        Raises CheckpointError for one that should be and is not.
        """
        if self._quantization is None or not canonical.endswith(".weight"):
            return None
        path, name = self._places[canonical]
        modules = name.removesuffix(".weight"), canonical.removesuffix(".weight")
        scheme = self._quantization.scheme(*modules)
        if not isinstance(scheme, Scheme):
            return None
        kind = _open(path).get_slice(name).get_dtype()
        if kind in FORMATS and _scales_name(canonical, scheme) in self._places:
            raise CheckpointError(
                f"{path}: tensor {name} is stored as {kind}, but has scales, and config.json's "
                f"quantization_config makes it {scheme.stored}"
            )
        return scheme if kind == scheme.stored else None

    def _find_packed(self) -> dict[str, Packed]:
        """The matrices that lie packed in several tensors, by the names that layers ask for."""
        found: dict[str, Packed] = {}
        for canonical, (path, name) in self._places.items():
            module, _, suffix = canonical.rpartition(".")
            if self._quantization is None or suffix not in ("qweight", "weight_packed"):
                continue
            packed = self._quantization.scheme(name.removesuffix(f".{suffix}"), module)
            if not isinstance(packed, Packed) or packed.values_suffix != suffix:
                continue
            if f"{module}.weight" in self._places:
                raise CheckpointError(
                    f"{path}: tensor {name} is there, and the same matrix unpacked as well"
                )
            found[f"{module}.weight"] = packed
        return found

    def _packed_names(self, weight: str) -> dict[Role, str]:
        """Canonical names of the tensors that make up a packed matrix, those that are there."""
        module = weight.removesuffix("weight")
        suffixes = SUFFIXES[self._packed[weight].layout]
        names = {role: module + suffix for role, suffix in suffixes.items()}
        return {role: name for role, name in names.items() if name in self._places}

    def _restore_packed(self, part: Part, packed: Packed, target: torch.Tensor) -> None:
        """Raises CheckpointError for a tensor that is missing, or does not fit the others."""
        pieces = {role: self._read(piece) for role, piece in self._packed_parts(part).items()}
        names = self._packed_names(part.name)

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
        restore_packed(packed, pieces, part, target)
        stored = sum(piece.nbytes for piece in pieces.values())
        share = target.numel() / max(1, math.prod(part.shape))
        self._ways.tally.count_restored(round(stored * share), target)
        self._bar.update(stored)

    def _packed_parts(self, part: Part) -> dict[Role, Part]:
        """The tensors that make up a packed matrix, whole. Raises CheckpointError for one that is
        missing, or in a format or of a shape that cannot be read.
        """
        packed, names = self._packed[part.name], self._packed_names(part.name)
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
                stored = _open(path).get_slice(name)
                kind, shape = stored.get_dtype(), tuple(stored.get_shape())
            except SafetensorError as error:
                raise _damaged(path, name, error) from error
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
            self._wanted.add(names[role])
            found[role] = Part(names[role], shape)
        self._wanted.update(names.values())
        return found

    def _check_scales(self, canonical: str, shape: tuple[int, ...], scheme: Scheme) -> None:
        """Raises CheckpointError unless the scales of a matrix of that shape are there, in a format
        and of a shape that can be read.
        """
        path, name = self._places[canonical]
        if len(shape) != 2:
            raise CheckpointError(
                f"{path}: tensor {name} is {list(shape)}: only matrices are read in 8 bits"
            )
        scales = _scales_name(canonical, scheme)
        if scales not in self._places:
            raise CheckpointError(
                f"{path}: no file has the tensor {_scales_name(name, scheme)}, the scales of "
                f"{name}: the checkpoint is not complete"
            )
        path, name = self._places[scales]
        try:
            stored = _open(path).get_slice(name)
            kind, found = stored.get_dtype(), tuple(stored.get_shape())
        except SafetensorError as error:
            raise _damaged(path, name, error) from error
        if kind not in FORMATS:
            raise CheckpointError(
                f"{path}: tensor {name} is stored as {kind}; scales are F32, F16 or BF16"
            )
        wanted = scheme.scales((shape[0], shape[1]))
        accepted: list[tuple[int, ...]] = [wanted]
        if wanted[1] == 1:
            accepted.append(wanted[:1])
        if wanted == (1, 1):
            accepted.append(())
        if found not in accepted:
            raise CheckpointError(
                f"{path}: tensor {name} is {list(found)}, but config.json makes it {list(wanted)}"
            )

    def _scales(self, part: Part, scheme: Scheme) -> torch.Tensor:
        """The scales of the wanted rows and columns, float32 [rows or 1, columns or 1].

        Raises CheckpointError for what `_check_scales` names, and for scales that are not finite.
        """
        self._check_scales(part.name, part.shape, scheme)
        name = _scales_name(part.name, scheme)
        self._wanted.add(name)
        shape = scheme.scales((part.shape[0], part.shape[1]))
        path, stored_name = self._places[name]
        scales = self._read(Part(name, shape)).float().view(shape)
        if not scales.isfinite().all():
            raise CheckpointError(
                f"{path}: tensor {stored_name} has values that are not finite: the checkpoint is "
                "damaged"
            )
        return cut_scales(scales, part, scheme).to(self.device)

    def _check_shape(self, part: Part) -> None:
        """Raises CheckpointError unless a file has the tensor, in a format that can be read, and of
        the shape that config.json makes it.
        """
        if part.name in self._packed:
            if len(part.shape) != 2:
                raise CheckpointError(
                    f"{self._folder}: {part.name} is packed, but is no matrix: {list(part.shape)}"
                )
            self._packed_parts(part)
            return
        self._wanted.add(part.name)
        if part.name not in self._places:
            raise CheckpointError(
                f"{self._folder}: no file has the tensor {part.name}, which config.json asks for"
            )
        path, name = self._places[part.name]
        try:
            stored = _open(path).get_slice(name)
            kind = stored.get_dtype()
            if kind not in FORMATS and self._scheme(part.name) is None:
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
            file = _open(path)
            if not part.shape or not part.index:
                whole: torch.Tensor = file.get_tensor(name)
                return whole
            piece: torch.Tensor = file.get_slice(name)[part.index]
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


def weight_files(folder: Path) -> list[Path]:
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


def _damaged(path: Path, name: str, error: SafetensorError) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {name} cannot be read: {error}")


def _unreadable(path: Path, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name} is stored as {kind}; only F32, F16 and BF16 weights can be read, "
        "and quantised ones that config.json's quantization_config tells the scales of: use the "
        "model's unquantised checkpoint"
    )


def _scales_name(weight: str, scheme: Scheme) -> str:
    """What the scales of tensor `weight` are called."""
    return weight.removesuffix("weight") + scheme.suffix


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not complete: {error}") from error
