"""HunyuanOCR's own: an image's number, axes of pairs, lines and bounds. `test_ocr_families.py` has
what it shares with other families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.plugins.models.hunyuan_vl.spec import HunyuanSpec
from saccade.plugins.models.hunyuan_vl.vision import lines
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families.conftest import Changed
from tests.families.forwarding import CPU, Session, load, pixels, prompt
from tests.fixtures.tiny import Reference

FAMILY = "hunyuan_vl"
PAIRS = {"rope_axes": "pairs"}


def read(folder: Path) -> HunyuanSpec:
    found = load_spec(folder)
    assert isinstance(found, HunyuanSpec)
    return found


def test_an_image_is_known_by_its_number(reference: Callable[..., Reference]) -> None:
    """The second of two equal images is not the first."""
    theirs = reference(FAMILY)
    net, (shown,) = load(theirs.folder), pixels(theirs, 1)
    session = Session(net, prompt(theirs, 2), [shown, shown], 16)
    wanted = theirs.logits(session.tokens, [shown, shown])
    torch.testing.assert_close(session.prefill(7), wanted, atol=2e-4, rtol=0.0)


class PairedAxes:
    """Joins frequencies [axes, 1, T, D / 2] as llama.cpp does: a section of pairs is one axis."""

    def __init__(self, sections: Sequence[int]) -> None:
        self.sections = list(sections)

    def __call__(self, freq: torch.Tensor) -> torch.Tensor:
        parts = freq.split(self.sections, dim=-1)
        joined = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return torch.cat((joined, joined), dim=-1)


def _load(spec: HunyuanSpec, folder: Path, options: dict[str, str]) -> FamilyNet:
    return load_net(spec.with_options(options), folder, dtype=torch.float32, device=CPU)


def test_axes_of_pairs_are_an_option(
    reference: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all axes are alike, as in text, both ways are the same."""
    theirs = reference(FAMILY)
    spec = read(theirs.folder)
    usual, paired = (_load(spec, theirs.folder, each) for each in ({}, PAIRS))
    texts = [Session(net, prompt(theirs, 0), [], 16).prefill() for net in (usual, paired)]
    torch.testing.assert_close(*texts, atol=2e-4, rtol=0.0)
    session = Session(paired, prompt(theirs, 1), pixels(theirs, 1), 16)
    rope = theirs.model.model.language_model.rotary_emb
    own = theirs.logits(session.tokens, pixels(theirs, 1))
    monkeypatch.setattr(rope, "recomposition_frequencies", PairedAxes(rope.mrope_section))
    wanted = theirs.logits(session.tokens, pixels(theirs, 1))
    torch.testing.assert_close(session.prefill(7), wanted, atol=2e-4, rtol=0.0)
    assert (own - wanted).abs().max() > 0.01, "the ways differ for images"


def test_lines_end_in_marks() -> None:
    assert lines(2, 3).tolist() == [7, 0, 1, 2, 6, 3, 4, 5, 6, 8]


def test_bounds_stand_in_a_size_by_either_name(changed: Changed) -> None:
    found = []
    for names in (("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels")):
        size = dict(zip(names, (1024, 4096)))
        whole = dict.fromkeys(("shortest_edge", "longest_edge")) | size
        spec = read(changed(FAMILY, "preprocessor_config.json", size=whole))
        found.append((spec.images.min_pixels, spec.images.max_pixels))
    assert found == [(1024, 4096)] * 2
