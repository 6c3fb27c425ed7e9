"""What only Qwen-VL's spec answers, for tests that make pixels of that family themselves."""

from __future__ import annotations

from saccade.core.family import FamilySpec
from saccade.families.qwen_vl.spec import QwenVLSpec


def qwen(spec: FamilySpec) -> QwenVLSpec:
    """`spec`, which is known to be a Qwen-VL model's."""
    assert isinstance(spec, QwenVLSpec)
    return spec
