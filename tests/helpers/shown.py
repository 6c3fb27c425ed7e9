"""An image that a family's tiny checkpoint takes, and its token in a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from saccade.core.family import FamilySpec
from saccade.plugins.models.deepseek_vl2.spec import DeepseekSpec
from saccade.plugins.models.gemma3.spec import Gemma3Spec
from saccade.plugins.models.gemma4.spec import Gemma4Spec
from saccade.plugins.models.internvl.spec import InternVLSpec
from saccade.plugins.models.lfm2_vl.spec import Lfm2Spec
from saccade.plugins.models.minicpm.spec import MiniCPMSpec
from saccade.plugins.models.smolvlm.spec import SmolVLMSpec
from saccade.plugins.models.step3_vl.spec import Step3VLSpec
from saccade_bench.lab.qwen import tell_grid
from tests.fixtures.tiny import picture


def shown_canvas(spec: FamilySpec, seed: int = 5) -> tuple[np.ndarray, int]:
    """Return the pixels, whose grid is known, and the token."""
    (height, width), mark = _size(spec)
    canvas = np.ascontiguousarray(picture(height, width, seed=seed))
    if isinstance(spec, MiniCPMSpec):  # the whole, and two slices of two tokens below it
        tell_grid(canvas, (1, 2, 1, 2, 2, 1))
    if isinstance(spec, Lfm2Spec):  # two tiles, and the whole, of as many tokens, below them
        tell_grid(canvas, (1, 2, 1, 2))
    return canvas, mark


def _size(spec: FamilySpec) -> tuple[tuple[int, int], int]:
    """Height and width in pixels, and the token."""
    if isinstance(spec, Gemma3Spec):
        return (spec.vision.side, spec.vision.side), spec.placeholder.marks[0]
    if isinstance(spec, Gemma4Spec):
        return (2 * spec.vision.unit, 3 * spec.vision.unit), spec.placeholder.marks[0]
    if isinstance(spec, MiniCPMSpec):
        return (3 * spec.images.unit, 2 * spec.images.unit), spec.placeholder.marks[0]
    if isinstance(spec, Lfm2Spec):  # two tiles, and a token line of the whole image below
        tile = spec.images.tile
        return (tile + spec.images.unit, 2 * tile), spec.placeholder.marks[0]
    if isinstance(spec, DeepseekSpec):  # one tile, and the whole image below it
        return (2 * spec.images.side, spec.images.side), spec.placeholder.marks[0]
    if isinstance(spec, InternVLSpec | SmolVLMSpec | Step3VLSpec):  # one tile
        height, width = spec.images.sample.canvas
        return (height, width), spec.placeholder.marks[0]
    shaped: Any = spec  # it has a factor, as Qwen-VL's
    factor = shaped.images.factor
    return (3 * factor, 4 * factor), shaped.placeholder.marks[0]
