"""Models with a tower in GGUF files that transformers' modules compute answer as transformers does
with the same weights, rounded as the files have them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec
from saccade.plugins.any_model.facts import OwnProcessor
from saccade.plugins.any_model.processor import load_processor, process
from saccade.plugins.gguf.config import make_configs
from saccade.plugins.gguf.folder import write_folder
from saccade.plugins.gguf.header import GgufFile, read_header
from saccade.plugins.gguf.known import made_tensors
from saccade.plugins.gguf.tensors import open_gguf
from tests.families.forwarding import Session, load
from tests.fixtures.gguf_kinds import KindFiles, image_processor, write_kind
from tests.fixtures.harness import Harness
from tests.fixtures.tiny_any import any_reference, make_any
from tests.plugins.any_model.test_transformers_any import Served, cases, check, serve, shown

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "pixtral": ("pixtral", {}),
    "pixtral with silu": ("pixtral", {"vision": {"hidden_act": "silu"}}),
    "mistral3": ("mistral3", {}),
    "ministral 3": ("mistral3_far", {}),
    "glm4v": ("glm4v", {}),
    "glm4v_moe": ("glm4v_moe", {}),
}
PROCESSOR = "preprocessor_config.json"


def made(folder: Path, name: str, kind: str = "F32") -> KindFiles:
    base, fields = SEEING[name]
    return write_kind(make_any(folder / "made", base, **fields), folder / "out", Kind[kind])


def folder_of(files: KindFiles) -> Path:
    """What a server reads. Published limits of images are too large here."""
    folder = write_folder([files.model], files.mmproj)
    told = json.loads((folder / PROCESSOR).read_text())
    told["size"] = image_processor(files.rounded)["size"]
    (folder / PROCESSOR).write_text(json.dumps(told))
    return folder


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=SEEING)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[KindFiles, Served]:
    """Files of each kind, and what is served of them."""
    files = made(tmp_path_factory.mktemp("files"), request.param, "Q8_0")
    base, _ = SEEING[request.param]
    return files, serve(base, folder_of(files), any_reference(files.rounded))


def test_answers_are_those_of_transformers_again_from_cache(
    both: tuple[KindFiles, Served], request: pytest.FixtureRequest
) -> None:
    kind = SEEING[request.node.callspec.params["both"]][0]
    _, served = both
    harness = Harness(served.net)
    asked = [served.request(harness, name) for name in cases(kind)]
    check(served, harness.run(asked))
    encoded = len(harness.encoded)
    check(served, harness.run([served.request(harness, name) for name in cases(kind)]))
    assert len(harness.encoded) == encoded


def test_logits_and_pixels_are_those_of_transformers(both: tuple[KindFiles, Served]) -> None:
    files, served = both
    theirs = any_reference(files.rounded)
    image = shown((112, 140))
    ours = load_processor(OwnProcessor(str(served.spec.folder)))
    wanted = process(theirs.processor, image)
    for name, found in process(ours, image).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)
    text = f"look: {served.image} how many?"
    told = {"text": [text], "images": [PIL.Image.fromarray(image)], "return_tensors": "pt"}
    inputs = theirs.processor(**told, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        logits = theirs.model(**inputs).logits[0, -1]
    harness = Harness(served.net)
    asked = harness.request(
        "a", served.encode(text), [served.seen(harness, (112, 140))], max_tokens=1, logprobs=20
    )
    (drawn,) = harness.run([asked])["a"].logprobs
    tokens, ours = zip(*drawn.top)
    wanted = logits.log_softmax(0)[list(tokens)]
    torch.testing.assert_close(torch.tensor(ours), wanted, atol=3e-4, rtol=0.0)


def test_every_tensor_has_the_bits_of_the_checkpoints(both: tuple[KindFiles, Served]) -> None:
    files, _ = both
    theirs = any_reference(files.rounded).model.state_dict()
    plain = {name.replace("model.language_model.", "model."): name for name in theirs}
    seen = set[str]()
    for path in (files.model, files.mmproj):
        assert path is not None
        opened = open_gguf(path)
        for name in set(opened.keys()) & plain.keys():
            found, wanted = opened.get_tensor(name).float(), theirs[plain[name]]
            assert torch.equal(found.view(wanted.shape), wanted), name
            seen.add(name)
    assert seen == plain.keys()


@torch.inference_mode()
def test_a_towers_language_model_answers_texts_alone(both: tuple[KindFiles, Served]) -> None:
    files, _ = both
    theirs, tokens = any_reference(files.rounded).model, list(range(11, 60))
    folder = write_folder([files.model], None)
    assert not load_spec(folder).sees_images
    expected = theirs(input_ids=torch.tensor([tokens])).logits[0]
    found = Session(load(folder), tokens, [], page_size=None).prefill()
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["pixtral", "glm4v"])
def test_tokens_and_template_are_the_files(tmp_path: Path, name: str) -> None:
    files = made(tmp_path, name)
    folder = write_folder([files.model], files.mmproj)
    ours, theirs = (
        Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, files.rounded)
    )
    for text in ("1234 éàü 日本語 \n\n x", "[IMG]a [IMG_BREAK] b<|im_end|>", "<|image|>don't  s"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (files.rounded / "chat_template.jinja").read_text()


def test_published_limits_of_images_are_told(tmp_path: Path) -> None:
    files = made(tmp_path, "glm4v")
    folder = write_folder([files.model], files.mmproj)
    told = json.loads((folder / PROCESSOR).read_text())
    assert told["size"] == {"shortest_edge": 12_544, "longest_edge": 9_633_792}


Files = tuple[GgufFile, GgufFile]
"""A language model's header, and its tower's."""
HEADS, SECTIONS = "clip.vision.attention.head_count", "glm4.rope.dimension_sections"


def changed(file: GgufFile, fields: dict[str, Any]) -> GgufFile:
    return replace(file, metadata={**file.metadata, **fields})


def without(file: GgufFile, *names: str) -> GgufFile:
    kept = {name: each for name, each in file.tensors.items() if name not in names}
    return replace(file, tensors=kept)


def misshapen(file: GgufFile, name: str, *shape: int) -> GgufFile:
    tensors = {**file.tensors, name: replace(file.tensors[name], shape=shape)}
    return replace(file, tensors=tensors)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    found = {}
    for name in ("pixtral", "mistral3", "ministral 3", "glm4v", "glm4v_moe"):
        files = made(tmp_path_factory.mktemp("headers"), name)
        assert files.mmproj is not None
        found[name] = read_header(files.model), read_header(files.mmproj)
    return found


def refusal(files: Files) -> str:
    model, tower = files
    with pytest.raises(CheckpointError) as refused:
        make_configs(model, tower, {*model.tensors, *tower.tensors})
        for each in files:
            made_tensors(each)
    return str(refused.value)


IN_TOWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no merge": ("mistral3", {"clip.vision.spatial_merge_size": None}, "merge_size is missing"),
    "another epsilon": (
        "pixtral",
        {"clip.vision.attention.layer_norm_epsilon": 1e-3},
        "layer_norm_epsilon 0.001 is not supported; 1e-05 is",
    ),
    "odd heads": (
        "pixtral",
        {HEADS: 5},
        "attn_[qk].weight has 64 rows, which is not divisible by 5 heads",
    ),
    "no heads": (
        "pixtral",
        {HEADS: 0},
        "attn_[qk].weight has 64 rows, which is not divisible by 0 heads",
    ),
    "heads of another kind": ("glm4v", {HEADS: "x"}, "head_count must be a whole number, not x"),
    "no patches": ("glm4v", {"clip.vision.patch_size": None}, "patch_size is missing"),
    "colours": ("pixtral", {"clip.vision.image_mean": [0.5]}, "image_mean must be a list of 3"),
}
IN_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "width": ("pixtral", {"llama.embedding_length": 128}, "has 64 values, .* expects 128"),
    "width of GLM": ("glm4v", {"glm4.embedding_length": 128}, "has 64 values, .* expects 128"),
    "no marks": ("pixtral", {"tokenizer.ggml.tokens": ["[IMG]"]}, r"has no \[IMG_BREAK\]"),
    "sections": ("glm4v", {SECTIONS: [1, 2]}, "dimension_sections must be a list of 3 numbers"),
    "no sections": ("glm4v", {SECTIONS: None}, "dimension_sections is missing"),
    "odd rotations": ("glm4v", {"glm4.rope.dimension_count": 15}, "is 15, of heads with 32 values"),
    "wide rotations": ("glm4v", {"glm4.rope.dimension_count": 64}, "is 64, of heads with 32"),
    "no experts": ("glm4v_moe", {"glm4moe.expert_count": None}, "expert_count is missing"),
    "norm": ("glm4v_moe", {"glm4moe.expert_weights_norm": 1}, "must be true or false, not 1"),
    "heads": (
        "mistral3",
        {"mistral3.attention.head_count": 3},
        "which is not divisible by 3 heads",
    ),
    "rope": ("ministral 3", {"mistral3.rope.scaling.type": "none"}, "scaling.type must be yarn"),
}


@pytest.mark.parametrize("case", IN_TOWERS)
def test_fields_of_a_tower_that_make_none_are_named(headers: dict[str, Files], case: str) -> None:
    name, fields, words = IN_TOWERS[case]
    model, tower = headers[name]
    assert re.search(words, refusal((model, changed(tower, fields))))


@pytest.mark.parametrize("case", IN_MODELS)
def test_fields_of_a_model_that_make_none_are_named(headers: dict[str, Files], case: str) -> None:
    name, fields, words = IN_MODELS[case]
    model, tower = headers[name]
    assert re.search(words, refusal((changed(model, fields), tower)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("pixtral", "mm.2.weight"),
        ("pixtral", "v.blk.0.ffn_gate.weight"),
        ("glm4v", "mm.model.fc.weight"),
        ("glm4v", "mm.patch_merger.weight"),
        ("glm4v", "mm.gate.weight"),
        ("glm4v", "v.patch_embd.weight.1"),
    ],
)
def test_tensors_that_a_tower_lacks_are_named(
    headers: dict[str, Files], name: str, tensor: str
) -> None:
    model, tower = headers[name]
    said = refusal((model, without(tower, tensor)))
    assert f"no tensor {tensor}" in said


def test_experts_that_are_no_pairs_are_named(headers: dict[str, Files]) -> None:
    model, tower = headers["glm4v_moe"]
    gates, ups = (f"blk.1.ffn_{each}_exps.weight" for each in ("gate", "up"))
    assert f"no tensor {ups}" in refusal((without(model, ups), tower))
    said = refusal((misshapen(model, ups, 4, 16, 64), tower))
    assert f"tensor {ups} is [4, 16, 64], but {gates} is [4, 32, 64]" in said
    flat = misshapen(misshapen(model, ups, 32, 64), gates, 32, 64)
    assert f"tensor {gates} must have one matrix per expert, but is [32, 64]" in refusal(
        (flat, tower)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {HEADS: 0},
        {"clip.vision.block_count": 10**9},
        {"clip.vision.image_size": 0},
        {"clip.vision.patch_size": 0},
        {"clip.vision.embedding_length": 0},
    ],
    ids=str,
)
def test_sizes_that_no_tower_has_end_in_a_typed_error(
    headers: dict[str, Files], fields: dict[str, Any], tmp_path: Path
) -> None:
    model, tower = headers["glm4v"]
    good = write_folder([model.path], tower.path)
    folder = Path(shutil.copytree(good, tmp_path / "bad"))
    configs = make_configs(model, changed(tower, fields), {*model.tensors, *tower.tensors})
    for name, data in configs.files.items():
        (folder / name).write_text(json.dumps(data))
    with pytest.raises(CheckpointError):
        load(folder)
