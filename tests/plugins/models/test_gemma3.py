"""Gemma 3: layers with windows, and images that see themselves in both directions, whatever page or
chunk an image meets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import PIL.Image
import pytest
import torch

from saccade.core.config import QuantizationMode
from saccade.families.registry import load_spec
from saccade.plugins.models.gemma3.spec import Gemma3Spec
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from tests.families.answers import CASES, NEW_TOKENS, Case, Model, check
from tests.families.conftest import Refusals, check_hub, refusals_by_name
from tests.families.forwarding import CPU, Session
from tests.families.image_files import canvas_of, files
from tests.fixtures.families.gemma3 import BEGIN, TOKENS
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import Reference, make_checkpoint
from tests.helpers.processor import needs_vnni
from tests.media.pictures import decoded

FAMILY = "gemma3"
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def model(answered: Callable[[str], Model]) -> Model:
    return answered(FAMILY)


def test_pillow_s_pixels_are_at_most_one_level_of_255_away(
    checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    spec, theirs, furthest = load_spec(checkpoint(FAMILY)), reference(FAMILY), 0
    for data in files()[:30:10]:
        made = theirs.processor(
            PIL.Image.fromarray(decoded(data)),
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        )
        pillow = made.pixel_values[0].transpose(1, 2, 0).astype(int)
        furthest = max(furthest, int(abs(pillow - canvas_of(spec, data)[0]).max()))
    assert furthest <= 1


@needs_vnni
@pytest.mark.parametrize(("mode", "furthest"), [("int8", 0.04), ("int4", 0.15)])
def test_matrices_of_few_bits_answer_nearly_as_whole_ones(
    tmp_path: Path, mode: Literal["int8", "int4"], furthest: float
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = make_checkpoint(tmp_path, FAMILY, text=sizes)
    spec, found, tally = load_spec(folder), [], LoadTally()
    ways: tuple[tuple[QuantizationMode, LoadTally | None], ...] = (("none", None), (mode, tally))
    for each, counted in ways:
        net = load_net(spec, folder, dtype=HALF, device=CPU, quantization=each, tally=counted)
        session = Session(net, list(range(20, 60)), [], 16, HALF)
        found.append(session.prefill())
    products = 4 * spec.kv_spec().kv_layers
    assert f"{products + (mode == 'int8')} matrices of the language model in {mode}" in tally.line(
        HALF
    )
    whole, few = found
    assert 0 < (few - whole).norm() / whole.norm() < furthest


# ---- images that see themselves, in pages and chunks


def test_no_chunk_ends_within_an_image(model: Model) -> None:
    """Chunks of 10 tokens would end within images of 9; beside other requests, too."""
    harness = Harness(model.net, chunk_tokens=10)
    asked = [model.request(harness, name) for name in CASES]
    names = {request.tokens: request for request in asked}
    slots: dict[int, Any] = {}
    ends = set()

    def watch(plan: Any) -> None:
        slots.update({each.slot: names.get(each.tokens) for each in plan.open})
        for row in plan.rows:
            request, end = slots[row.slot], row.start + row.length
            if request is not None:
                assert not any(span.start < end < span.end for span in request.spans)
                ends.add((request.id, end))

    check(model, harness.run(asked, between=watch))
    assert any(end == names_.spans[0].start for names_ in asked if names_.spans for _, end in ends)


def test_an_image_behind_text_is_computed_in_steps_of_any_size(model: Model) -> None:
    """It is further away than two chunks, and nearer than a step goes for an image's sake."""
    case = Case("two blue squares @", ((64, 96),))
    (pixels,), tokens, found = model.pixels(case), model.tokens(case), []
    place = tokens.index(model.tokens(Case("@", ()))[0])
    assert 2 * 2 < place < TOKENS
    for chunk in (2, 2048):
        harness = Harness(model.net, chunk_tokens=chunk)
        request = harness.request("x", tokens, [harness.image(pixels, "x")], max_tokens=4)
        (outcome,) = harness.run([request]).values()
        found.append(outcome.tokens)
        assert len(outcome.tokens) == 4 and len(harness.encoded) == 1
    assert found[0] == found[1]


@pytest.mark.first
@pytest.mark.parametrize("chunk", [TOKENS, 2048])
def test_a_prefix_that_ends_within_an_image_is_taken_up_there(model: Model, chunk: int) -> None:
    """The pages of its first half were computed with its second: they are the whole image's."""
    case = CASES["one picture"]
    tokens, shown = model.tokens(case), model.pixels(case)[0]
    found = []
    for page in (2, 4, 8):
        harness = Harness(model.net, chunk_tokens=chunk, page_size=page)
        image = harness.image(shown, "A")
        whole = harness.request("whole", tokens, [image], max_tokens=NEW_TOKENS)
        (span,) = whole.spans
        harness.run([replace(whole, id="first", tokens=whole.tokens[: span.end])])
        # Nothing follows the image, so the last whole page ends within it, or at its end.
        outcome = harness.run([whole])["whole"]
        found.append(span.start < outcome.cached_tokens < span.end)
        assert outcome.tokens == model.answers["one picture"]
        assert harness.encoded == [image.key]
    assert any(found)


def test_another_image_shares_no_page_with_the_first(model: Model) -> None:
    case = CASES["one picture"]
    tokens, shown = model.tokens(case), model.pixels(case)[0]
    harness = Harness(model.net, page_size=1)
    outcomes = {}
    for name, each in (("A", shown), ("B", 255 - shown), ("A", shown)):
        image = harness.image(each, name)
        asked = harness.request("x", tokens, [image], max_tokens=NEW_TOKENS)
        outcome = outcomes[name] = harness.run([asked])["x"]
        if name == "B":
            assert outcome.cached_tokens == asked.spans[0].start, "the text before it alone"
            wanted = model.reference.generate(asked.tokens, [each], max_new_tokens=NEW_TOKENS)
            assert outcome.tokens == wanted
    assert outcomes["A"].tokens == model.answers["one picture"] != outcomes["B"].tokens
    assert outcomes["A"].levels == ["kv"]


# ---- files


HUB: dict[str, Any] = {
    "config.json": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "preprocessor_config.json": {
        "do_pan_and_scan": None,
        "image_seq_length": 256,
        "resample": 2,
        "size": {"height": 896, "width": 896},
    },
    "tokenizer_config.json": {"boi_token": BEGIN},
}
"""Of the model of 4B parameters, which names few fields of the language model."""


def test_the_hubs_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for name, data in HUB.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = check_hub(tmp_path)
    assert isinstance(spec, Gemma3Spec)
    assert (spec.text.shape.rope.factor, spec.text.local_rope.factor) == (8.0, 1.0)
    assert spec.largest_image.tokens == spec.num_tokens((0, 0)) == 256
    assert spec.num_patches((0, 0)) == 64 * 64
    assert spec.sample.canvas == (896, 896) and spec.sample.resample == "bilinear"
    assert spec.eos_token_ids == (1, 106) and spec.templates.shown == (BEGIN, f"\n\n{BEGIN}\n\n")


YARN = {"full_attention": {"rope_type": "yarn"}}
REFUSED: Refusals = {
    "config.json": [
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image 8 must be the square"),
        ({"mm_tokens_per_image": 16}, "must be the square of a number that divides 6"),
        ({"image_token_index": 600}, "600 is not in the vocabulary of 600"),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, "softcapping 50.0 is not supported"),
        (
            {"text_config": {"use_bidirectional_attention": True}},
            "use_bidirectional_attention is not supported",
        ),
        ({"text_config": {"layer_types": ["x"] * 7}}, "must name 7 layers"),
        ({"text_config": {"layer_types": [[]] * 7}}, "layer_types"),
        ({"text_config": {"rope_parameters": YARN}}, "rope type 'yarn' is not supported"),
        ({"text_config": {"query_pre_attn_scalar": 0}}, "query_pre_attn_scalar"),
        ({"text_config": {"query_pre_attn_scalar": -1.0}}, "query_pre_attn_scalar"),
        ({"vision_config": {"model_type": "clip"}}, "'clip' is not supported"),
    ],
    "preprocessor_config.json": [
        ({"do_pan_and_scan": True}, "do_pan_and_scan true is not supported: .* set it to false"),
        ({"do_resize": False}, "do_resize false is not supported"),
        (
            {"size": {"height": 896, "width": 896}},
            "896 x 896, but the vision encoder requires 84",
        ),
        ({"image_seq_length": 256}, "image_seq_length is 256"),
        ({"image_std": [0.5, 0.5, float("nan")]}, "image_std"),
    ],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
