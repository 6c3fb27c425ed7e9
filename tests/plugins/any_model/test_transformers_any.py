"""Models without a family of their own, by transformers' own modules: greedy answers are
transformers', whatever the chunks, caches and batches; what cannot be, is refused by its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import masking_utils

from saccade.core.config import EncoderConfig
from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.family import put_spaces
from saccade.core.metrics import Metrics
from saccade.core.types import Image, ImageKey, Request
from saccade.families.checkpoint import IMAGES_ADAPTER, digest_weights
from saccade.families.registry import load_spec
from saccade.kernels.processor import runs_int8
from saccade.kernels.reference import linear
from saccade.media.content import encode_array
from saccade.media.formats.decode import decode_into
from saccade.nn.family_model import FullNet
from saccade.nn.protocol import FamilyNet
from saccade.plugins.any_model import net
from saccade.plugins.any_model.attention import paged_attention
from saccade.plugins.any_model.check import OTHERWISE, shown_mask
from saccade.plugins.any_model.facts import (
    Inspector,
    ModelQuestion,
    OwnProcessor,
    SizeQuestion,
)
from saccade.plugins.any_model.head import AfterHead
from saccade.plugins.any_model.inspector import box_of, content_token
from saccade.plugins.any_model.net import AnyText
from saccade.plugins.any_model.products import PackedLinear
from saccade.plugins.any_model.proven import PROVEN
from saccade.plugins.any_model.refusals import (
    Unservable,
    check_config,
    read_text,
    refuse_type,
)
from saccade.plugins.any_model.rope import keep_rope
from saccade.plugins.any_model.spec import AnySpec
from saccade.plugins.any_model.tower import AnyTower
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.tiny import picture
from tests.fixtures.tiny_any import AnyReference, any_reference, make_any
from tests.fixtures.tiny_any_kinds import KINDS
from tests.fixtures.tiny_any_texts import WINDOW

pytestmark = [
    pytest.mark.more,
    # of transformers' processors, with numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
NEW_TOKENS = 20
QUICK = (
    *("llama", "llava_onevision", "glm4v", "mistral_near", "aya_vision", "cohere2_vision"),
    *("cohere_compass", "ovis2", "granite4_vision", "idefics2"),
)
CASES: Mapping[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "text": ("the quick brown fox jumps over the lazy dog; how many", ()),
    "another": ("There are two blue squares and one green star. ", ()),
    "one image": ("look: @ how many red circles are there?", ((112, 140),)),
    "three images": ("first @ then @ and at last @?", ((64, 96), (150, 70), (90, 200))),
    "resized up": ("a small one @ lazy dog", ((20, 31),)),
    "resized down": ("a large one @ quick brown", ((700, 500),)),
    "two turns": ("user\n@ how many?\nassistant\ntwo.\nuser\n@?", ((80, 80), (64, 128))),
    "the same twice": ("@ over @ over", ((96, 64), (96, 64))),
    "side by side": ("first@@then@@@ over", ((64, 96), (80, 64), (96, 64), (64, 64), (56, 70))),
}


@dataclass(frozen=True)
class Served:
    """One checkpoint in both worlds, with transformers' answer to every case."""

    net: FamilyNet
    spec: AnySpec
    image: str
    tokenizer: Tokenizer
    answers: Mapping[str, Sequence[int]]

    def request(self, harness: Harness, name: str) -> Request:
        prompt, sizes = CASES[name]
        tokens = self.encode(prompt)
        images = [self.seen(harness, size) for size in sizes]
        return harness.request(name, tokens, images, max_tokens=NEW_TOKENS)

    def encode(self, prompt: str) -> list[int]:
        """As a chat template's text is read."""
        text, mark = prompt.replace("@", self.image), self.spec.templates.spaced
        if mark:
            text = put_spaces(text, mark)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def seen(self, harness: Harness, size: tuple[int, int]) -> Image:
        spec = self.spec
        recipe = spec.recipe(*size, spec.pixel_bounds)
        canvas = np.empty((*recipe.canvas, 3), np.uint8)
        raw = memoryview(encode_array(shown(size)))
        decode_into([(canvas, recipe)], raw, size, 1)
        key = ImageKey(str(size).encode().ljust(32, b"\0"), spec.settings(recipe))
        harness.pixels[key] = canvas
        grid = recipe.grid
        return Image(key, grid, spec.num_tokens(grid), spec.num_patches(grid), recipe.canvas)


def shown(size: tuple[int, int]) -> np.ndarray:
    return picture(*size, seed=size[0] * 1000 + size[1])


KIND = pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in KINDS],
)


@cache
def load(kind: str, folder: Path, options: tuple[str, ...] = (), choices: str = "{}") -> Served:
    """choices: of the reference's processor, as `options` say them."""
    make_any(folder, kind)
    options += tuple(f"{name}={value}" for name, value in KINDS[kind].options.items())
    return serve(kind, folder, any_reference(folder, choices), options)


def serve(
    kind: str, folder: Path, reference: AnyReference, options: tuple[str, ...] = ()
) -> Served:
    set_threads()
    spec = cast(AnySpec, load_spec(folder, options))
    with pytest.MonkeyPatch.context() as patch:  # matrices are packed as large ones are
        patch.setattr(linear, "MIN_VALUES", 0)
        net = load_net(spec, folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = {name: answer(reference, kind, name) for name in cases(kind)}
    return Served(net, spec, KINDS[kind].image, tokenizer, answers)


def cases(kind: str) -> list[str]:
    return [name for name, (_, sizes) in CASES.items() if KINDS[kind].image or not sizes]


def answer(reference: AnyReference, kind: str, name: str) -> list[int]:
    prompt, sizes = CASES[name]
    text = prompt.replace("@", KINDS[kind].image)
    return reference.generate(text, [shown(size) for size in sizes], NEW_TOKENS)


@pytest.fixture
def served(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return load(kind, tmp_path_factory.getbasetemp() / f"any-{kind}")


def check(served: Served, outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        assert outcome.error is None
        assert outcome.tokens == served.answers[name], name


@pytest.mark.slow
@KIND
@pytest.mark.parametrize("chunk_tokens", [16, 2048])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_eight_at_once_answer_as_transformers(
    kind: str, served: Served, chunk_tokens: int, prefix_cache: bool
) -> None:
    harness = Harness(served.net, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache)
    check(served, harness.run([served.request(harness, name) for name in cases(kind)]))


@KIND
def test_again_with_everything_cached_nothing_is_encoded(kind: str, served: Served) -> None:
    harness = Harness(served.net)
    for name in cases(kind):
        check(served, harness.run([served.request(harness, name)]))
    encoded, decoded = len(harness.encoded), len(harness.decoded)
    assert encoded == len({size for name in cases(kind) for size in CASES[name][1]})
    for name in cases(kind):
        outcomes = harness.run([served.request(harness, name)])
        check(served, outcomes)
        assert (
            outcomes[name].cached_tokens
            >= (len(served.request(harness, name).tokens) - 1) // 16 * 16
        )
    assert (len(harness.encoded), len(harness.decoded)) == (encoded, decoded)


@KIND
def test_preempted_requests_answer_the_same(kind: str, served: Served) -> None:
    longest = max(
        len(served.request(Harness(served.net), name).tokens) + NEW_TOKENS for name in cases(kind)
    )
    harness = Harness(served.net, kv_pages=longest // 16 + 4, chunk_tokens=64)
    check(served, harness.run([served.request(harness, name) for name in cases(kind)]))


@KIND
def test_ends_of_a_prompt_s_parts_are_found_behind_its_images(kind: str, served: Served) -> None:
    for name in cases(kind):
        request = served.request(Harness(served.net), name)
        prompt, sizes = CASES[name]
        tokens = served.encode(prompt)
        assert served.spec.widened(len(tokens), request.spans, request.images) == len(
            request.tokens
        )
        assert served.spec.widened(0, request.spans, request.images) == 0
        if sizes:
            at = tokens.index(served.spec.images.placeholder)
            assert served.spec.widened(at, request.spans, request.images) == at


@pytest.mark.parametrize("kind", ["glm4v", "glm46v"])
def test_a_tower_is_shown_no_blank_canvas(kind: str, served: Served) -> None:
    """A start shows blank images to a tower, but its canvas also holds the image's sizes."""
    positions = PositionCache(served.spec, served.net.vision, Metrics())
    PackedEncoder(served.net, positions, EncoderConfig(), torch.empty(0)).warm_up()


def test_a_processor_s_fields_can_be_chosen(tmp_path: Path) -> None:
    size = '{"longest_edge": 9408, "shortest_edge": 784}'
    served = load("glm4v", tmp_path, (f"size={size}",), f'{{"size": {size}}}')
    usual, fewer = (
        spec.recipe(700, 500, spec.pixel_bounds)
        for spec in (cast(AnySpec, load_spec(tmp_path)), served.spec)
    )
    assert fewer.grid[0] < usual.grid[0]
    assert served.spec.settings(usual) != cast(AnySpec, load_spec(tmp_path)).settings(usual)
    harness = Harness(served.net)
    check(served, harness.run([served.request(harness, name) for name in cases("glm4v")]))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("tiles=4", "has no option tiles; it has crop_size, .*size"),
        ('size={"height": 14}', "size must have one of the following set of keys"),
        ("size=small", "size=small: "),
        ("device=cuda", "has no option device"),
    ],
)
def test_choices_that_a_processor_has_not_are_refused(
    option: str, reason: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-glm4v"
    load("glm4v", folder)
    with pytest.raises(ConfigError, match=f"--family-option .*{reason}"):
        load_spec(folder, (option,))


def test_a_model_that_takes_text_only_has_no_choices(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-llama"
    load("llama", folder)
    with pytest.raises(ConfigError, match="LlamaForCausalLM supports only text"):
        load_spec(folder, ("size=14",))


def said(kind: str, **fields: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **fields)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (said("gemma2"), "attn_logit_softcapping is 50.0"),
        (
            said("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "is dynamic, .* answers would depend on the batch",
        ),
        (said("qwen3_next"), "linear_attention keep state that does not fit into KV pages"),
        (said("gemma3"), "bidirectional attention"),
        (said("paligemma"), "cannot be cached in pages"),
        (said("llama4_text"), "chunked_attention keep state that does not fit into KV pages"),
        (said("mllama"), "cross-attention"),
        (said("gemma3n"), "audio"),
        (said("voxtral"), "audio"),
        (said("t5gemma"), "has an encoder"),
        (said("llama", quantization_config={"quant_method": "bitsandbytes"}), "quantized"),
        (
            said(
                "olmo3",
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": KINDS["phi3_long"].config(None).rope_parameters,
                },
            ),
            "is longrope, .* answers would depend on the batch",
        ),
        (said("gpt_oss"), "sinks"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.model_type,
)
def test_what_pages_do_not_do_is_refused_by_its_reason(config: Any, reason: str) -> None:
    with pytest.raises(Unservable, match=reason):
        refuse_type(config, type(config))
        check_config(config.get_text_config(decoder=True))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (said("llama", num_hidden_layers=10**9), "num_hidden_layers must be at most 1000"),
        (said("llama", num_attention_heads=-4), "num_attention_heads must be at least 1, not -4"),
        (said("llama", num_key_value_heads=3), "32 query heads cannot share 3 key/value heads"),
        (said("llama", head_dim=-8), "head_dim must be at least 1, not -8"),
        (said("llama", vocab_size=0), "vocab_size must be at least 1, not 0"),
        (said("llama", max_position_embeddings=10**9), "max_position_embeddings must be at most"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.model_type,
)
def test_sizes_that_no_model_has_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"its language model: {reason}"):
        read_text(config)


def test_a_field_that_is_missing_is_named_at_start_up(tmp_path: Path) -> None:
    said("mamba", architectures=["MambaForCausalLM"]).save_pretrained(tmp_path)
    words = r"config\.json: mamba models are not served: .* has no num_attention_heads"
    with pytest.raises(CheckpointError, match=words):
        load_spec(tmp_path)


OWN_CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("file", ["config.json", "processor_config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str
) -> None:
    folder = tmp_path / "model"
    make_any(folder, "llava")
    (folder / "own.py").write_text(OWN_CODE)
    named = {"AutoConfig": "own.A", "AutoProcessor": "own.A", "AutoTokenizer": ["own.A", "own.A"]}
    unknown = {"model_type": "none", "processor_class": "None_", "tokenizer_class": "None_"}
    found = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    for each in folder.glob("*.json"):
        told = json.loads(each.read_text())
        if "processor_class" in told and file == "processor_config.json":
            each.write_text(json.dumps(told | {"processor_class": "None_", "auto_map": named}))
    (folder / file).write_text(json.dumps(found | unknown | {"auto_map": named}))
    capfd.readouterr()
    words = ""
    try:
        load_spec(folder)  # transformers has a tokenizer for tokenizer.json without its class
    except CheckpointError as refused:
        words = str(refused)
    said = capfd.readouterr()
    reason = {
        "config.json": "their own code",
        "processor_config.json": "processor class is not in transformers",
    }
    assert reason.get(file, "") in words
    assert "trust_remote_code" not in words + said.out + said.err
    assert not said.out and "[y/N]" not in said.err
    assert not list(tmp_path.rglob("ran"))


def test_fields_are_known_by_a_model_s_own_names() -> None:
    facts = read_text(said("gpt2", n_head=4, n_embd=64, n_layer=3, n_positions=512))
    assert (facts.heads, facts.hidden, facts.layers, facts.context_length) == (4, 64, 3, 512)


@pytest.mark.parametrize("model_type", ["chameleon", "fuyu"])
def test_images_without_a_tower_of_their_own_are_refused(model_type: str) -> None:
    with pytest.raises(Unservable, match=r"config\.json describes no vision encoder"):
        content_token(said(model_type))


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_no_part_has_a_billion_layers(tmp_path: Path, part: str) -> None:
    fields = {"num_hidden_layers": 10**9, "depth": 10**9}
    config = {"model_type": "glm4v", "eos_token_id": 1, part: fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{part}: \w+ must be at most 1000, not"):
        load_spec(tmp_path)


def changed(folder: Path, kind: str, file: str, **fields: Any) -> Path:
    """A checkpoint whose file says other things."""
    make_any(folder, kind)
    data = json.loads((folder / file).read_text())
    for name, value in fields.items():
        data[name] = data[name] | value if isinstance(value, dict) else value
    (folder / file).write_text(json.dumps(data))
    return folder


def test_a_processor_takes_no_more_memory_than_there_may_be(tmp_path: Path) -> None:
    edges = {"height": 60000, "width": 60000}
    fields = {"size": edges, "crop_size": edges}
    folder = changed(tmp_path, "llava", "processor_config.json", image_processor=fields)
    with pytest.raises(CheckpointError, match="its processor rejects an image"):
        load_spec(folder)


def test_what_transformers_does_not_load_ends_with_its_reason(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", "config.json", hidden_act="none of these")
    (folder / "folder.json").mkdir()  # is read by nobody
    spec = load_spec(folder)
    with pytest.raises(CheckpointError, match="transformers cannot load it: 'none of these'"):
        load_net(spec, folder, dtype=torch.float32, device=torch.device("cpu"))


def test_an_inspector_that_dies_is_said_to_have_ended(tmp_path: Path) -> None:
    inspector = Inspector(OwnProcessor(str(make_any(tmp_path, "llama"))))
    inspector.ask(ModelQuestion())
    with pytest.raises(CheckpointError, match="that loads it with transformers exited with status"):
        inspector.ask(SizeQuestion((0, 0)))  # of a model without images


def test_images_processed_otherwise_have_other_names(tmp_path: Path) -> None:
    usual, other = tmp_path / "usual", tmp_path / "other"
    make_any(usual, "llava")
    mean = {"image_mean": [0.1, 0.2, 0.3]}
    changed(other, "llava", "processor_config.json", image_processor=mean)
    first, again, then = (cast(AnySpec, load_spec(each)) for each in (usual, usual, other))
    assert first.sample.grid == then.sample.grid
    assert first.settings(first.sample) == again.settings(again.sample)
    assert first.settings(first.sample) != then.settings(then.sample)


def test_what_a_layer_asks_of_attention_beside_is_refused_by_its_name() -> None:
    heads = torch.zeros(1, 2, 3, 8)
    for more, words in (({"softcap": 4}, "softcap 4,"), ({"s_aux": heads}, "s_aux,")):
        with pytest.raises(Unservable, match=f"Module needs {words} which paged"):
            paged_attention(torch.nn.Module(), heads, heads, heads, None, **more)


def test_masks_of_a_class_s_own_are_refused() -> None:
    with pytest.raises(Unservable, match="it has masks of its own"):
        refuse_type(said("doge"), transformers.DogeForCausalLM)


@pytest.mark.parametrize("option", ["quantization", "quantization_tower"])
@pytest.mark.skipif(not runs_int8(), reason="no products in 8 bits: refused for that already")
def test_what_would_quantise_nothing_is_refused(
    option: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_any(tmp_path_factory.mktemp("model") / "model", "mistral_near")
    wanted = {"dtype": torch.float32, "device": torch.device("cpu"), option: "int8"}
    name = option.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"--{name} int8: .*transformers"):
        load_net(load_spec(folder), folder, **wanted)  # type: ignore[arg-type]


def the_checkpoint(tmp_path: Path, **fields: Any) -> AnySpec:
    """Of Mistral with windows, whose config.json then says other things of them."""
    folder = make_any(tmp_path / "model", "mistral_near")
    spec = cast(AnySpec, load_spec(folder))
    return replace(spec, facts=replace(spec.facts, text=replace(spec.facts.text, **fields)))


@pytest.mark.parametrize("windows", [(), (8, 8, 9), (8, None, 8)], ids=str)
def test_windows_that_are_not_the_layers_own_end_the_load(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    spec = the_checkpoint(tmp_path, windows=windows)
    with pytest.raises(CheckpointError, match=r"its layer \d attends to the last 8 tokens"):
        load_net(spec, spec.folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        (masking_utils.causal_mask_function, 64),
        (masking_utils.sliding_window_causal_mask_function(8), 8),
        (masking_utils.chunked_causal_mask_function(24, torch.zeros(1).int()), OTHERWISE),
        (masking_utils.bidirectional_mask_function, OTHERWISE),
        (lambda _batch, _head, q, kv: (kv <= q) & (kv != 3), OTHERWISE),
    ],
    ids=["causal", "window", "chunks", "both ways", "holes"],
)
def test_a_mask_is_known_as_a_window_only_if_it_is_one(mask: Any, sees: int) -> None:
    shown = shown_mask(mask_function=mask, config=said("llama", max_position_embeddings=64))
    assert shown.tolist() == [[[[sees]]]]


@pytest.mark.parametrize("kind", ["cohere", "gemma2", "granite", "aya_vision"])
def test_probabilities_are_those_of_logits_scaled_and_capped_as_the_model_does(
    kind: str, served: Served
) -> None:
    harness = Harness(served.net)
    request = harness.request("text", [5, 6, 7, 8, 9, 10], max_tokens=1, logprobs=3)
    (told,) = harness.run([request])["text"].logprobs
    model = any_reference(served.spec.folder).model
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([request.tokens]), use_cache=False).logits[0, -1]
    best = logits.log_softmax(0).topk(3)
    assert [token for token, _ in told.top] == best.indices.tolist()
    assert [score for _, score in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logits_that_are_not_the_model_s_own_end_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_any(tmp_path / "model", "cohere")
    monkeypatch.setattr(net, "ways", lambda _: (AfterHead(),))
    with pytest.raises(CheckpointError, match="its own forward pass returns other logits"):
        load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["phi3_long"])
def test_steps_of_few_tokens_are_turned_as_long_texts(kind: str, served: Served) -> None:
    """transformers turns a forward call of so few by the factors for short texts."""
    harness = Harness(served.net, chunk_tokens=WINDOW // 2)
    check(served, harness.run([served.request(harness, name) for name in cases(kind)]))


@pytest.mark.parametrize("kind", ["phi3_short", "phi3_long"])
def test_factors_for_short_texts_serve_no_longer_ones(kind: str, served: Served) -> None:
    spec = served.spec
    short, long = (spec.with_options({"rope": each}) for each in ("short", "long"))
    assert (short.context_length, long.context_length) == (spec.facts.text.near, 4096)
    assert load_spec(spec.folder).context_length == short.context_length
    with pytest.raises(ConfigError, match="rope=far: Phi3ForCausalLM supports rope="):
        spec.with_options({"rope": "far"})


@pytest.mark.slow
def test_an_adapter_beside_the_weights_is_part_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, lora = (
        load(kind, tmp_path / kind) for kind in ("phi4_multimodal", "phi4_multimodal_lora")
    )
    assert all(plain.answers[name] != lora.answers[name] for name in plain.answers)
    said = [each for each in caplog.messages if each.startswith("audio is not supported; ")]
    assert [f"{IMAGES_ADAPTER} is missing: the base weights" in each for each in said] == [
        True,
        False,
    ]
    assert f"{IMAGES_ADAPTER} (an adapter for images) is part of its weights" in said[1]
    before = digest_weights(lora.spec.folder)
    tensors = load_file(lora.spec.folder / IMAGES_ADAPTER / "adapter_model.safetensors")
    save_file(
        {name: -each for name, each in tensors.items()},
        lora.spec.folder / IMAGES_ADAPTER / "adapter_model.safetensors",
    )
    assert digest_weights(lora.spec.folder) != before


def test_a_rope_that_is_not_found_ends_the_load() -> None:
    with pytest.raises(CheckpointError, match="Linear has no rotary embedding for long texts"):
        keep_rope(torch.nn.Linear(1, 1), 8, long=True)


@pytest.mark.parametrize("kind", QUICK)
def test_linear_layers_of_tower_and_decoder_are_packed_and_say_their_weights(
    kind: str, served: Served
) -> None:
    text = cast(AnyText, cast(FullNet, served.net).text)
    model = any_reference(served.spec.folder).model
    packed = {
        name: each for name, each in text.decoder.named_modules() if isinstance(each, PackedLinear)
    }
    plain = dict(model.get_decoder().named_modules())
    linears = {name for name, each in plain.items() if type(each) is torch.nn.Linear}
    assert packed.keys() == linears
    for name, each in packed.items():
        assert torch.equal(each.weight, plain[name].weight)
    if served.image:
        features = cast(AnyTower, served.net.vision).features
        assert not [m for m in features.__self__.modules() if type(m) is torch.nn.Linear]


def a_rule(step: int) -> Callable[..., Any]:
    """As the models' own, of an image of two rows of three, with `step` places behind it."""

    def rule(input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **_: Any) -> Any:
        places, at = [], 0
        for kind, run in groupby(mm_token_type_ids[0].tolist()):
            length = len(list(run))
            if kind:
                places += [(at, at + row, at + column) for row in range(2) for column in range(3)]
            else:
                places += [(at + each,) * 3 for each in range(length)]
            at += step if kind else length
        assert input_ids.shape[1] == len(places)
        return torch.tensor(places).T[:, None], torch.tensor([[at - len(places)]])

    return rule


def test_positions_that_go_by_another_rule_are_refused() -> None:
    made = {"mm_token_type_ids": torch.tensor([[0, *[1] * 6, 0]])}
    tokens = (1, *[9] * 6, 2)
    assert box_of(a_rule(3), made, tokens, 9) == (1, 2, 3)
    with pytest.raises(Unservable, match="by an unknown rule"):
        box_of(a_rule(6), made, tokens, 9)
    with pytest.raises(Unservable, match="does not provide its multi-axis positions"):
        box_of(a_rule(3), {}, tokens, 9)


def test_the_table_of_verified_architectures_is_what_is_verified_here() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text()
    table = text.split("| architecture | images |\n|---|---|\n")[1].split("<!-- end -->")[0]
    listed = [line.split("`")[1] for line in table.splitlines()]
    assert sorted(listed) == sorted({kind.model for kind in KINDS.values()}) == sorted(PROVEN)
    for line in table.splitlines():
        sees = {bool(kind.image) for kind in KINDS.values() if f"`{kind.model}`" in line}
        assert sees == {not line.endswith("| none |")}
