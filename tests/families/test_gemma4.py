"""Gemma 4: layers of two shapes, keys and values that layers share, images that see themselves in
some layers alone, and a tower of its own answer as transformers' do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from saccade.core.errors import CheckpointError, ConfigError, ImageError, InvalidRequest
from saccade.core.family import PixelBounds
from saccade.core.options import EngineOptions
from saccade.core.types import Image, ImageKey
from saccade.engine.sizing import pick_chunk
from saccade.families.base_spec import Placeholder
from saccade.families.gemma4.images import fit
from saccade.families.gemma4.spec import Gemma4Spec
from saccade.families.gemma4.tiny import FULL, IMAGE, LAYERS, NEAR, SHARED, TOKENS, WINDOW
from saccade.families.registry import load_spec
from saccade.media.decode import decode_into
from saccade.media.header import probe
from saccade.runtime.weights import load_net
from saccade.text.prompt.special_tokens import Literals
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from saccade_bench.fixtures.crew import ThreadCrew
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.tiny import Reference, make_checkpoint, picture, reference
from tests.engine import test_parity as parity
from tests.families.forwarding import CPU, Session, encode, load
from tests.families.test_internvl import files
from tests.families.test_parity import LOGITS, pixels, prompt
from tests.media.pictures import decoded
from tests.parallel.test_parity import ASKED, check_crew

E2B: dict[str, Any] = {"use_bidirectional_attention": None, "attention_k_eq_v": False}
"""The small models: images see themselves in one direction, as text does."""
LARGE: dict[str, Any] = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""The dense model of 31B: every layer has a cache, and no embedding of its own."""
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}


@pytest.fixture(scope="module")
def theirs(checkpoint: Callable[..., Path]) -> Reference:
    return reference(checkpoint("gemma4"))


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> Gemma4Spec:
    return read(theirs.folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> parity.Model:
    return answered(tmp_path_factory.mktemp("gemma4"))


@cache
def answered(folder: Path) -> parity.Model:
    return parity.load("gemma4", folder)


def read(folder: Path) -> Gemma4Spec:
    found = load_spec(folder)
    assert isinstance(found, Gemma4Spec)
    return found


# ---- images


@pytest.mark.more
def test_pixels_are_the_references(spec: Gemma4Spec, theirs: Reference) -> None:
    """Those of torch's resizing, exactly; Pillow's are a level or two of 255 away."""
    furthest = 0
    for data in files()[:30:3]:
        header = probe(data, max_pixels=10**8)
        recipe = spec.recipe(*header.upright, spec.pixel_bounds)
        canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
        decode_into([(canvas, recipe)], memoryview(data), header.upright, header.orientation)
        source = decoded(data)
        np.testing.assert_array_equal(canvas, theirs.resize(source))
        pillow = theirs.processor.aspect_ratio_preserving_resize(
            source.transpose(2, 0, 1), 16, 9 * TOKENS, 3, PIL.Image.Resampling.BICUBIC
        )
        assert pillow.shape[1:] == canvas.shape[:2]
        apart = abs(pillow.transpose(1, 2, 0).astype(int) - canvas)
        furthest = max(furthest, int(apart.max()))
    assert furthest <= 2


@pytest.mark.parametrize("budget", [70, 280, 1120])
def test_sizes_are_those_of_transformers(budget: int) -> None:
    """Long ones too, of which a side would be nothing, and those that fill the budget exactly."""
    rng = np.random.default_rng(0)
    sizes = [(48, 48), (1, 1), (7, 9000), (9000, 7), (3360, 48), (480, 336), (10**5, 3), (2, 10**5)]
    sizes += [tuple(each) for each in rng.integers(1, 5000, (300, 2)).tolist()]
    for height, width in sizes:
        wanted = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        rows, columns = fit(height, width, budget, 48)
        assert (48 * rows, 48 * columns) == wanted
        assert rows * columns <= budget


def test_a_request_with_fewer_pixels_takes_the_next_smaller_budget(spec: Gemma4Spec) -> None:
    spec, token = replace(spec, images=replace(spec.images, budget=280)), 48**2
    bounds = spec.pixel_bounds
    assert bounds == PixelBounds(70 * token, 70 * token, 280 * token)
    assert spec.num_tokens(spec.recipe(600, 600, bounds).grid) == 16 * 16
    few = PixelBounds(bounds.least, bounds.min_pixels, 150 * token)
    assert spec.num_tokens(spec.recipe(600, 600, few).grid) == 11 * 11  # of 140
    with pytest.raises(ImageError, match=r"min_pixels is 334080, .* 322560 pixels \(140 tokens\)"):
        spec.recipe(600, 600, PixelBounds(bounds.least, 145 * token, 150 * token))


# ---- prompts


def image_of(spec: Gemma4Spec, pixels: np.ndarray) -> Image:
    grid = spec.images.grid(*pixels.shape[:2])
    size = spec.num_tokens(grid), spec.num_patches(grid)
    return Image(ImageKey(b"", b""), grid, *size, (1, 1))


CHAT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "what?\n"},
            {"type": "image"},
            {"type": "text", "text": f"how many {IMAGE} are there?"},
        ],
    },
    {"role": "assistant", "content": "a circle"},
    {"role": "user", "content": "which colour?"},
]


def test_a_chat_becomes_the_tokens_of_the_references_processor(
    spec: Gemma4Spec, theirs: Reference
) -> None:
    """A token's name in the client's text is text."""
    tokenizer = TextTokenizer.load(theirs.folder)
    template = ChatTemplate.load(theirs.folder, tokenizer, None, spec.templates)
    plain = [dict(each) for each in CHAT]
    text = template.render([{**CHAT[0], "content": CHAT[0]["content"][:3]}, *plain[1:]])
    backend = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    shown = pixels(theirs, 3)[1:]
    images = [image_of(spec, each) for each in shown]
    assert len({image.num_tokens for image in images}) == 2
    wanted = backend.encode(theirs.expand(text, shown)).ids
    tokens = tokenizer.encode(text)
    expanded, spans = spec.expand_prompt(tokens, images)
    assert list(expanded) == wanted
    for at, token in enumerate(tokens, 1):
        end = spec.widened(at, spans, images)
        assert expanded[end - 1] == (
            spec.placeholder.after[0] if token == spec.placeholder.marks[0] else token
        )
    with pytest.raises(InvalidRequest, match="2 image placeholders for 1 images"):
        spec.expand_prompt(tokens, images[:1])
    literals = Literals(tokenizer)
    written = literals.encode(literals.render(template, CHAT))
    assert written.count(spec.placeholder.marks[0]) == 2
    assert f"how many {IMAGE} are there?" in tokenizer.decode(written)


# ---- the network


@pytest.mark.first
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "old", "tie": True},
        {"text": E2B},
        {"text": LARGE | EXPERTS},
        pytest.param({"text": LARGE}, marks=pytest.mark.more),
        pytest.param(
            {"text": E2B | LARGE, "vision": {"use_clipped_linears": False, "standardize": False}},
            marks=pytest.mark.more,
        ),
        pytest.param(
            {"text": {"final_logit_softcapping": None, "use_double_wide_mlp": False}},
            marks=pytest.mark.more,
        ),
    ],
    ids=["all there is", "old and tied", "as E2B", "as 26B-A4B", "as 31B", "plain", "no cap"],
)
def test_logits_equal_the_reference(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = reference(make_checkpoint(tmp_path, "gemma4", **options))
    images = pixels(theirs, 3)
    net = load(theirs.folder)
    tensors = [torch.from_numpy(image) for image in images]
    for ours, wanted in zip(encode(net, tensors), theirs.embeddings(images), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    session = Session(net, prompt(theirs, 3), images, page_size=16)
    assert len(session.tokens) > 3 * WINDOW
    torch.testing.assert_close(session.prefill(7), theirs.logits(session.tokens, images), **LOGITS)


def test_layers_that_share_a_cache_take_no_memory(spec: Gemma4Spec) -> None:
    kept = spec.kv_spec()
    assert [len(layer) for layer in kept.layers] == [2, 2, 2, 2, 0, 0, 0]
    assert [layer[0].shape for layer in kept.layers[:2]] == [(2, 16), (1, 24)]
    assert kept.kv_layers == len(LAYERS) - SHARED
    assert [layer.source for layer in spec.text.layers] == [0, 1, 2, 3, 2, 2, 3]
    both_ways = [shape.both_ways for shape in kept.attention.values()]
    assert both_ways == [kind == NEAR for kind in LAYERS] and kept.whole_images


@pytest.mark.parametrize("zeros", [1, 2, 4])
def test_numbers_of_layers_may_have_zeros_in_front(
    checkpoint: Callable[..., Path], tmp_path: Path, spec: Gemma4Spec, zeros: int
) -> None:
    """As transformers writes those of ten layers and more."""
    text = json.loads((checkpoint("gemma4") / "config.json").read_text())["text_config"]
    own = {key.zfill(zeros): fields for key, fields in text["per_layer_config"].items()}
    written = text | {"per_layer_config": own}
    folder = changed(checkpoint("gemma4"), tmp_path / "m", "config.json", text_config=written)
    assert read(folder).text.layers == spec.text.layers


def text_only(folder: Path, into: Path) -> Path:
    """The language model of a checkpoint, as Gemma4ForCausalLM has it."""
    shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["Gemma4ForCausalLM"]}
    (into / "config.json").write_text(json.dumps(text))
    kept = {
        name.replace("model.language_model.", "model."): each
        for name, each in load_file(folder / "model.safetensors").items()
        if "language_model" in name or name == "lm_head.weight"
    }
    save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    (into / "preprocessor_config.json").unlink()
    return into


def test_a_checkpoint_without_a_tower_answers_as_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = text_only(checkpoint("gemma4"), tmp_path / "text")
    judge = transformers.Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    judge.generation_config.eos_token_id, judge.generation_config.pad_token_id = None, 0
    tokens = list(range(20, 60))
    net = load(folder)
    assert not net.spec.sees_images and net.spec.family == "gemma4_text"
    assert not net.spec.kv_spec().whole_images
    wanted = judge.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)
    for chunk in (7, 64):
        harness = Harness(net, chunk_tokens=chunk)
        for _ in range(2):
            (found,) = harness.run([harness.request("x", tokens, max_tokens=24)]).values()
            assert found.tokens == wanted[0, len(tokens) :].tolist()


def test_random_weights_clamp_nothing(theirs: Reference) -> None:
    """`--load-format dummy`: limits are infinite."""
    net = load_net(
        load_spec(theirs.folder),
        theirs.folder,
        dtype=torch.float32,
        device=CPU,
        load_format="dummy",
    )
    (rows,) = encode(net, [torch.from_numpy(pixels(theirs, 1)[0])])
    assert rows.isfinite().all() and rows.std() > 0


# ---- pages, chunks and ranks


@pytest.mark.more
@pytest.mark.parametrize(
    ("chunk", "page"),
    [(TOKENS, 1), pytest.param(16, 4, marks=pytest.mark.slow), (2048, 16)],
)
def test_eight_requests_answer_as_transformers(model: parity.Model, chunk: int, page: int) -> None:
    harness = Harness(model.net, chunk_tokens=chunk, page_size=page)
    for _ in range(2):  # cold, then from the prefix cache
        parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))
    assert len(harness.encoded) == len(set(harness.encoded))


@pytest.mark.more
def test_images_that_see_one_way_are_cut_where_a_chunk_ends(tmp_path: Path) -> None:
    """E2B and E4B: chunks of 5 tokens within images of 9."""
    folder = make_checkpoint(tmp_path, "gemma4", text=E2B)
    theirs, net = reference(folder), load(folder)
    shown = [theirs.resize(picture(300, 300, seed=3))]
    harness = Harness(net, chunk_tokens=5, page_size=2)
    asked = harness.request("x", prompt(theirs, 1), [harness.image(shown[0], "A")], max_tokens=12)
    (span,) = asked.spans
    assert span.length == TOKENS and not net.spec.kv_spec().whole_images
    wanted = theirs.generate(asked.tokens, shown, max_new_tokens=12)
    for _ in range(2):
        assert harness.run([asked])["x"].tokens == wanted
    assert len(harness.encoded) == 1


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
    model = parity.load("gemma4", tmp_path)
    assert set(ASKED) <= set(model.answers)
    check_crew(model, ThreadCrew(tmp_path, 2, "weights"))


@pytest.mark.slow
def test_experts_beside_mlps_answer_as_transformers_in_ranks_too(tmp_path: Path) -> None:
    """Cut by their width, or whole on one of two ranks."""
    make_checkpoint(tmp_path, "gemma4", text=EXPERTS)
    net, theirs = load(tmp_path), reference(tmp_path)
    bare = parity.Model(net, Tokenizer.from_file(str(tmp_path / "tokenizer.json")), theirs, {})
    answers = {name: parity.reference_answer(bare, parity.CASES[name]) for name in ASKED}
    model = replace(bare, answers=answers)
    for runs in (1, 2):
        check_crew(model, ThreadCrew(tmp_path, 2, "data", expert_runs=runs))


# ---- files as the hub has them


def test_fields_that_the_hubs_files_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    """A small model's configuration, of which only sizes are told; it hears, and here does not."""
    files_ = {
        "config.json": {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "audio_config": {"model_type": "gemma4_audio"},
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "num_hidden_layers": 35,
                "num_kv_shared_layers": 20,
                "num_key_value_heads": 1,
                "use_double_wide_mlp": True,
                "layer_types": [FULL if at % 5 == 4 else NEAR for at in range(35)],
            },
            "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
            "dtype": "bfloat16",
            "eos_token_id": [1, 106],
        },
        "processor_config.json": {"image_processor": {"image_seq_length": 280}},
    }
    for name, data in files_.items():
        (tmp_path / name).write_text(json.dumps(data))
    spec, theirs = read(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    text, vision = theirs.text_config, theirs.vision_config
    for at, layer in enumerate(spec.text.layers):
        own = text.per_layer_config[at]
        assert (layer.kv_heads, layer.head_dim) == (own.num_key_value_heads, own.head_dim)
        shared = text.kv_sharing_modes[at] == "reuse"
        assert (layer.source != at) == shared
        assert layer.intermediate == 6144 * (2 if shared else 1)
        assert layer.window == (512 if text.layer_types[at] == NEAR else None)
    assert {layer.source for layer in spec.text.layers[15:]} == {13, 14}
    full, near = (text.rope_parameters[kind] for kind in (FULL, NEAR))
    assert (spec.text.far.theta, spec.text.far.share) == (
        full["rope_theta"],
        full["partial_rotary_factor"],
    )
    assert (spec.text.near.theta, spec.text.near.share) == (near["rope_theta"], 1.0)
    assert spec.text.per_layer is not None and spec.text.cap is None and spec.text.tied
    assert spec.text.per_layer.width == text.hidden_size_per_layer_input
    assert (spec.vision.hidden, spec.vision.depth, spec.vision.places) == (
        vision.hidden_size,
        vision.num_hidden_layers,
        vision.position_embedding_size,
    )
    assert spec.images.budget == 280 and spec.largest_image.tokens == 280
    assert spec.placeholder == Placeholder((258880,), None, (255999,), (258882,))
    assert spec.eos_token_ids == (1, 106)
    assert not spec.kv_spec().whole_images


# ---- what cannot be


def changed(source: Path, folder: Path, file: str, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    data = json.loads((folder / file).read_text())
    within = {name: data[name] | value for name, value in fields.items() if isinstance(value, dict)}
    (folder / file).write_text(json.dumps(data | fields | within))
    return folder


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        (
            "config.json",
            {"text_config": EXPERTS | {"top_k_experts": 9}},
            r"top_k_experts must be from 1 to 8 \(num_experts\), not 9",
        ),
        (
            "config.json",
            {"text_config": {"use_bidirectional_attention": "all"}},
            "use_bidirectional_attention 'all' is not supported",
        ),
        ("config.json", {"text_config": {"layer_types": ["x"] * 7}}, "must name 7 layers"),
        (
            "config.json",
            {"text_config": {"num_kv_shared_layers": 6}},
            "leaves no layer of kind full_attention with a cache",
        ),
        (
            "config.json",
            {"text_config": {"per_layer_config": {"1": {"sliding_window": 3}}}},
            "sliding_window is not supported by layer",
        ),
        (
            "config.json",
            {"text_config": {"per_layer_config": {"1": {"head_dim": 32}}}},
            "layers of one kind differ in head_dim",
        ),
        (
            "config.json",
            {"text_config": {"rope_parameters": {FULL: {"rope_type": "yarn"}}}},
            "rope type 'yarn' is not supported",
        ),
        (
            "config.json",
            {"text_config": {"per_layer_config": {"full": {"head_dim": 32}}}},
            "'full' is no number of a layer",
        ),
        ("config.json", {"image_token_id": 600}, "600 is beyond the vocabulary of 600"),
        ("config.json", {"text_config": {"pad_token_id": 600}}, "pad_token_id 600 is beyond"),
        ("config.json", {"vision_config": {"model_type": "clip"}}, "'clip' is not supported"),
        ("config.json", {"vision_config": {"num_key_value_heads": 2}}, "4 heads of 12 values over"),
        ("config.json", {"vision_config": {"position_embedding_size": 20}}, "20 positions are too"),
        ("preprocessor_config.json", {"do_normalize": True}, "from 0 to 1 alone"),
        ("preprocessor_config.json", {"pooling_kernel_size": 2}, "2 patches of 16 pixels, but"),
        ("preprocessor_config.json", {"max_soft_tokens": 5000}, "must be from 1 to 1120"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(checkpoint("gemma4"), tmp_path / "model", file, **fields))


def test_steps_smaller_than_an_image_are_refused_at_start(spec: Gemma4Spec) -> None:
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 8: .* give at least 9"):
        pick_chunk(EngineOptions(chunked_prefill_size=8), spec, cuda=False)
    assert pick_chunk(EngineOptions(chunked_prefill_size=9), spec, cuda=False) == 9


def test_a_budget_is_an_option(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    wide = changed(
        checkpoint("gemma4"),
        tmp_path / "model",
        "config.json",
        vision_config={"position_embedding_size": 1000},
    )
    assert load_spec(wide, ["max_soft_tokens=140"]).largest_image.tokens == 140
    for option in ("max_soft_tokens=141", "max_soft_tokens=560", "patch_embed=folded"):
        with pytest.raises(ConfigError, match=r"has max_soft_tokens, which is 70 or 140 or 280$"):
            load_spec(wide, [option])
    with pytest.raises(ConfigError, match="gemma4 has no options"):
        load_spec(checkpoint("gemma4"), ["max_soft_tokens=70"])
