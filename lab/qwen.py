"""What only Qwen-VL's spec answers, for who makes pixels for models of that family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.families.qwen_vl.spec import QwenVLSpec


class Sized(Protocol):
    """An array or a tensor."""

    @property
    def shape(self) -> Any: ...


def qwen(spec: FamilySpec) -> QwenVLSpec:
    """`spec`, which is known to be a Qwen-VL model's."""
    assert isinstance(spec, QwenVLSpec)
    return spec


def grids(spec: FamilySpec, pixels: Iterable[Sized]) -> list[Grid]:
    """Of resized images [height, width, 3], arrays or tensors."""
    return [qwen(spec).grid(*each.shape[:2]) for each in pixels]
