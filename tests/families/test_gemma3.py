"""Gemma 3: layers with windows, and images that see themselves in both directions, answer as
transformers' do, whatever page, chunk, rank or preemption an image meets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from saccade.core.config import QuantizationMode
from saccade.core.errors import CheckpointError, ConfigError, InvalidRequest
from saccade.core.options import EngineOptions
from saccade.core.types import Image, ImageKey
from saccade.engine.sizing import pick_chunk
from saccade.families.gemma3.spec import Gemma3Spec
from saccade.families.gemma3.tiny import BEGIN, SIDE, TOKENS, WINDOW
from saccade.families.registry import load_spec
from saccade.media.decode import decode_into
from saccade.media.header import probe
from saccade.runtime.quant_policy import LoadTally
from saccade.runtime.weights import load_net
from saccade.text.prompt.special_tokens import Literals
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from saccade_bench.fixtures.crew import ThreadCrew
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.tiny import Reference, make_checkpoint, reference
from tests.engine import test_parity as parity
from tests.families.forwarding import CPU, Session, encode, load
from tests.families.test_internvl import files
from tests.families.test_parity import LOGITS, pixels, prompt
from tests.helpers.processor import needs_vnni
from tests.media.pictures import decoded
from tests.parallel.test_parity import ASKED, check_crew

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def theirs(checkpoint: Callable[..., Path]) -> Reference:
    return reference(checkpoint("gemma3"))


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> Gemma3Spec:
    return read(theirs.folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> parity.Model:
    return answered(tmp_path_factory.mktemp("gemma3"))


@cache
def answered(folder: Path) -> parity.Model:
    return parity.load("gemma3", folder)


def read(folder: Path) -> Gemma3Spec:
    found = load_spec(folder)
    assert isinstance(found, Gemma3Spec)
    return found


# ---- images


@pytest.mark.more
def test_pixels_are_the_references(spec: Gemma3Spec, theirs: Reference) -> None:
    """Those of torch's resizing, exactly; Pillow's are at most one level of 255 away."""
    furthest = 0
    for data in files()[:30:3]:
        header = probe(data, max_pixels=10**8)
        recipe = spec.recipe(*header.upright, spec.pixel_bounds)
        canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
        decode_into([(canvas, recipe)], memoryview(data), header.upright, header.orientation)
        source = decoded(data)
        np.testing.assert_array_equal(canvas, theirs.resize(source))
        made = theirs.processor(
            PIL.Image.fromarray(source), do_rescale=False, do_normalize=False, return_tensors="np"
        )
        pillow = made.pixel_values[0].transpose(1, 2, 0).astype(int)
        furthest = max(furthest, int(abs(pillow - canvas).max()))
    assert furthest <= 1


# ---- prompts


def image_of(spec: Gemma3Spec) -> Image:
    grid = spec.sample.grid
    size = spec.num_tokens(grid), spec.num_patches(grid)
    return Image(ImageKey(b"", b""), grid, *size, (1, 1))


CHAT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "what?\n"},
            {"type": "image"},
            {"type": "text", "text": f"how many {BEGIN} are there?"},
        ],
    },
    {"role": "assistant", "content": "a circle"},
    {"role": "user", "content": "which colour?"},
]


def test_a_chat_becomes_the_tokens_of_the_references_processor(
    spec: Gemma3Spec, theirs: Reference
) -> None:
    """Blank lines around an image are tokens together with the text beside them; a token's name in
    the client's text is text.
    """
    tokenizer = TextTokenizer.load(theirs.folder)
    template = ChatTemplate.load(theirs.folder, tokenizer, None, spec.templates)
    plain = [dict(each) for each in CHAT]
    text = template.render([{**CHAT[0], "content": CHAT[0]["content"][:3]}, *plain[1:]])
    assert text.count(BEGIN) == text.count(f"\n\n{BEGIN}\n\n") == 2
    backend = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    shown = [np.zeros((SIDE, SIDE, 3), np.uint8)] * 2
    wanted = backend.encode(theirs.expand(text, shown)).ids
    tokens = tokenizer.encode(text)
    images = [image_of(spec)] * 2
    expanded, spans = spec.expand_prompt(tokens, images)
    assert list(expanded) == wanted
    assert [span.length for span in spans] == [TOKENS] * 2
    for at, token in enumerate(tokens, 1):
        end = spec.widened(at, spans, images)
        assert expanded[end - 1] == (
            spec.placeholder.after[0] if token == spec.placeholder.marks[0] else token
        )
    with pytest.raises(InvalidRequest, match="2 image placeholders for 1 images"):
        spec.expand_prompt(tokens, [image_of(spec)])
    literals = Literals(tokenizer)
    written = literals.encode(literals.render(template, CHAT))
    assert written.count(spec.placeholder.marks[0]) == 2
    assert f"how many {BEGIN} are there?" in tokenizer.decode(written)


# ---- the network


@pytest.mark.first
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "old"},
        {"tie": True, "text": {"query_pre_attn_scalar": 16}},
        {"text": {"head_dim": 24, "num_key_value_heads": 1, "layer_types": None}},
    ],
    ids=["as it is", "old", "tied", "heads of their own size"],
)
def test_logits_equal_the_reference(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = reference(make_checkpoint(tmp_path, "gemma3", **options))
    images = pixels(theirs, 3)
    net = load(theirs.folder)
    tensors = [torch.from_numpy(image) for image in images]
    for ours, wanted in zip(encode(net, tensors), theirs.embeddings(images), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    session = Session(net, prompt(theirs, 3), images, page_size=16)
    assert len(session.tokens) > 2 * WINDOW
    torch.testing.assert_close(session.prefill(7), theirs.logits(session.tokens, images), **LOGITS)


def text_only(folder: Path, into: Path) -> Path:
    """The language model of a checkpoint, as Gemma3ForCausalLM has it."""
    shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["Gemma3ForCausalLM"]}
    (into / "config.json").write_text(json.dumps(text))
    tensors = load_file(folder / "model.safetensors")
    kept = {
        name.replace("model.language_model.", "model."): each
        for name, each in tensors.items()
        if "language_model" in name or name == "lm_head.weight"
    }
    save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    (into / "preprocessor_config.json").unlink()
    return into


def test_a_checkpoint_without_a_tower_answers_as_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = text_only(checkpoint("gemma3"), tmp_path / "text")
    judge = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    judge.generation_config.eos_token_id, judge.generation_config.pad_token_id = None, 0
    tokens = list(range(20, 60))
    net = load(folder)
    assert not net.spec.sees_images and net.spec.family == "gemma3_text"
    wanted = judge.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)
    for chunk in (7, 64):
        harness = Harness(net, chunk_tokens=chunk)
        for _ in range(2):
            (found,) = harness.run([harness.request("x", tokens, max_tokens=24)]).values()
            assert found.tokens == wanted[0, len(tokens) :].tolist()


@needs_vnni
@pytest.mark.parametrize(("mode", "furthest"), [("int8", 0.04), ("int4", 0.15)])
def test_matrices_of_few_bits_answer_nearly_as_whole_ones(
    tmp_path: Path, mode: Literal["int8", "int4"], furthest: float
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = make_checkpoint(tmp_path, "gemma3", text=sizes)
    spec, found, tally = load_spec(folder), [], LoadTally()
    ways: tuple[tuple[QuantizationMode, LoadTally | None], ...] = (("none", None), (mode, tally))
    for each, counted in ways:
        net = load_net(spec, folder, dtype=HALF, device=CPU, quantization=each, tally=counted)
        session = Session(net, list(range(20, 60)), [], 16)
        session.kv = {i: (k.to(HALF), v.to(HALF)) for i, (k, v) in session.kv.items()}
        found.append(session.prefill())
    products = 4 * spec.kv_spec().kv_layers
    assert f"{products + (mode == 'int8')} matrices of the language model in {mode}" in tally.line(
        HALF
    )
    whole, few = found
    assert 0 < (few - whole).norm() / whole.norm() < furthest


# ---- images that see themselves, in pages, chunks and ranks


@pytest.mark.more
@pytest.mark.parametrize(("chunk", "page"), [(TOKENS, 1), (16, 4), (2048, 16)])
def test_eight_requests_answer_as_transformers(model: parity.Model, chunk: int, page: int) -> None:
    harness = Harness(model.net, chunk_tokens=chunk, page_size=page)
    for _ in range(2):  # cold, then from the prefix cache
        parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))
    assert len(harness.encoded) == len(set(harness.encoded))


def test_no_chunk_ends_within_an_image(model: parity.Model) -> None:
    """Chunks of 10 tokens would end within images of 9; beside other requests, too."""
    harness = Harness(model.net, chunk_tokens=10)
    asked = [model.request(harness, name) for name in parity.CASES]
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

    parity.check(model, harness.run(asked, between=watch))
    assert any(end == names_.spans[0].start for names_ in asked if names_.spans for _, end in ends)


def test_an_image_behind_text_is_computed_in_steps_of_any_size(model: parity.Model) -> None:
    """It is further away than two chunks, and nearer than a step goes for an image's sake."""
    case = parity.Case("two blue squares @", ((64, 96),))
    (pixels,), tokens, found = model.pixels(case), model.tokens(case), []
    place = tokens.index(model.tokens(parity.Case("@", ()))[0])
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
def test_a_prefix_that_ends_within_an_image_is_taken_up_there(
    model: parity.Model, chunk: int
) -> None:
    """The pages of its first half were computed with its second: they are the whole image's."""
    case = parity.CASES["one picture"]
    tokens, shown = model.tokens(case), model.pixels(case)[0]
    found = []
    for page in (2, 4, 8):
        harness = Harness(model.net, chunk_tokens=chunk, page_size=page)
        image = harness.image(shown, "A")
        whole = harness.request("whole", tokens, [image], max_tokens=parity.NEW_TOKENS)
        (span,) = whole.spans
        harness.run([replace(whole, id="first", tokens=whole.tokens[: span.end])])
        # Nothing follows the image, so the last whole page ends within it, or at its end.
        outcome = harness.run([whole])["whole"]
        found.append(span.start < outcome.cached_tokens < span.end)
        assert outcome.tokens == model.answers["one picture"]
        assert harness.encoded == [image.key]
    assert any(found)


def test_another_image_shares_no_page_with_the_first(model: parity.Model) -> None:
    case = parity.CASES["one picture"]
    tokens, shown = model.tokens(case), model.pixels(case)[0]
    harness = Harness(model.net, page_size=1)
    outcomes = {}
    for name, each in (("A", shown), ("B", 255 - shown), ("A", shown)):
        image = harness.image(each, name)
        asked = harness.request("x", tokens, [image], max_tokens=parity.NEW_TOKENS)
        outcome = outcomes[name] = harness.run([asked])["x"]
        if name == "B":
            assert outcome.cached_tokens == asked.spans[0].start, "the text before it alone"
            wanted = model.reference.generate(
                asked.tokens, [each], max_new_tokens=parity.NEW_TOKENS
            )
            assert outcome.tokens == wanted
    assert outcomes["A"].tokens == model.answers["one picture"] != outcomes["B"].tokens
    assert outcomes["A"].levels == ["kv"]


@pytest.mark.more
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_answers_survive_preemption(model: parity.Model, prefix_cache: bool) -> None:
    longest = max(len(model.request(Harness(model.net), name).tokens) for name in parity.CASES)
    pages = (longest + parity.NEW_TOKENS) // 2 + 6
    harness = Harness(
        model.net, chunk_tokens=16, page_size=2, kv_pages=pages, prefix_cache=prefix_cache
    )
    parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))
    assert harness.scheduler.counts.preemptions > 0


@pytest.mark.slow
def test_two_ranks_answer_as_transformers(tmp_path: Path) -> None:
    model = parity.load("gemma3", tmp_path)
    assert set(ASKED) <= set(model.answers)
    check_crew(model, ThreadCrew(tmp_path, 2, "weights"))


# ---- files as the hub has them


def test_fields_that_the_hubs_files_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    """The configuration of the model of 4B parameters names few fields of the language model."""
    files_ = {
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
    for name, data in files_.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec = read(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    shape = spec.text.shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size, shape.tied) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.vocab_size,
        True,
    )
    assert (shape.context_length, spec.text.query_scalar, spec.text.activation) == (
        theirs.max_position_embeddings,
        theirs.query_pre_attn_scalar,
        theirs.hidden_activation,
    )
    full, near = (theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (shape.rope.theta, shape.rope.factor) == (full["rope_theta"], full["factor"])
    assert (spec.text.local_rope.theta, spec.text.local_rope.factor) == (near["rope_theta"], 1.0)
    assert spec.text.windows == tuple(
        1024 if kind == "sliding_attention" else None for kind in theirs.layer_types
    )
    assert spec.largest_image.tokens == spec.num_tokens((0, 0)) == 256
    assert spec.num_patches((0, 0)) == 64 * 64
    assert spec.sample.canvas == (896, 896) and spec.sample.resample == "bilinear"
    assert spec.eos_token_ids == (1, 106) and spec.templates.around == (BEGIN, "\n\n")


# ---- what cannot be


def changed(source: Path, folder: Path, file: str, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    data = json.loads((folder / file).read_text())
    within = {name: data[name] | value for name, value in fields.items() if name in NESTED}
    (folder / file).write_text(json.dumps(data | fields | within))
    return folder


NESTED = ("text_config", "vision_config")


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"mm_tokens_per_image": 8}, "mm_tokens_per_image 8 is no square"),
        ("config.json", {"mm_tokens_per_image": 16}, "no square that divides 6 x 6 patches"),
        ("config.json", {"image_token_index": 600}, "600 is beyond the vocabulary of 600"),
        (
            "config.json",
            {"text_config": {"attn_logit_softcapping": 50.0}},
            "attn_logit_softcapping 50.0 is not supported",
        ),
        (
            "config.json",
            {"text_config": {"use_bidirectional_attention": True}},
            "use_bidirectional_attention is not supported",
        ),
        ("config.json", {"text_config": {"layer_types": ["x"] * 7}}, "must name 7 layers"),
        (
            "config.json",
            {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}},
            "rope type 'yarn' is not supported",
        ),
        ("config.json", {"vision_config": {"model_type": "clip"}}, "'clip' is not supported"),
        (
            "preprocessor_config.json",
            {"do_pan_and_scan": True},
            "do_pan_and_scan true is not supported: .* set it to false",
        ),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize false is not supported"),
        (
            "preprocessor_config.json",
            {"size": {"height": 896, "width": 896}},
            "896 x 896, but the vision tower was made for 84 x 84",
        ),
        ("preprocessor_config.json", {"image_seq_length": 256}, "image_seq_length is 256"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(checkpoint("gemma3"), tmp_path / "model", file, **fields))


def test_steps_smaller_than_an_image_are_refused_at_start(spec: Gemma3Spec) -> None:
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 8: .* give at least 9"):
        pick_chunk(EngineOptions(chunked_prefill_size=8), spec, cuda=False)
    assert pick_chunk(EngineOptions(chunked_prefill_size=9), spec, cuda=False) == 9


def test_the_family_has_no_options(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="patch_embed=folded: gemma3 has no options"):
        load_spec(checkpoint("gemma3"), ["patch_embed=folded"])
