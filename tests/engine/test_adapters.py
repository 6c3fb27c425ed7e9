"""Adapters as PEFT writes them: greedy float32 answers are those of PEFT's merged model, token for
token, alone and in one batch, and an image is encoded once for all adapters that leave the tower
alone.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer

from saccade.core.config import EncoderMode, QuantizationMode
from saccade.core.plan import Change, Changed, Plan
from saccade.core.types import AdapterRef, Caching, Request
from saccade.families.registry import load_spec
from saccade.nn import adapter_files
from saccade.nn.protocol import FamilyNet
from saccade.plugins.gguf.folder import write_folder
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.gguf_files import write_files
from tests.fixtures.harness import Harness, RankGroup, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, make_checkpoint, picture, reference
from tests.helpers.adapters import LANGUAGE, Trained, endless, train
from tests.helpers.paths import strange_paths
from tests.helpers.processor import COMPILED

NEW_TOKENS = 16
NUMBERS = count(1)  # networks are shared, and no number is ever given again
PROMPT = "look: @ how many red circles are there?"
LINEAR = r".*linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)"
SIGLIP = r".*vision_(tower|model)\..*layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"
TOWER = {
    "qwen2_5_vl": r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.[a-z]+_proj)|merger\.mlp\.[02])",
    "qwen3_vl": r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r"|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])",
    "internvl": r".*vision_tower\.encoder\.layer\.\d+\.(attention\.([qkv]_proj|projection_layer)"
    r"|mlp\.fc[12])|.*multi_modal_projector\.linear_[12]",
    "gemma3": SIGLIP,
    "gemma4": r".*vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.linear"
    r"|.*embed_vision\.embedding_projection",
    "smolvlm": rf"{SIGLIP}|.*connector\.modality_projection\.proj",
    "minicpmv4_6": rf"{SIGLIP}|.*vit_merger\.(self_attn\.(q|k|v|out)_proj|linear_[12])"
    r"|.*merger\.mlp\.0\.linear_[12]",
}
FAMILIES: Sequence[str] = (
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "gemma3",
    "gemma4",
    "smolvlm",
    "minicpmv4_6",
)
SOME = [
    pytest.param(family, marks=pytest.mark.slow if family in FAMILIES[3:] else ())
    for family in FAMILIES
]


@dataclass(frozen=True)
class Model:
    net: FamilyNet
    tokenizer: Tokenizer
    whole: Reference
    trained: Mapping[str, Trained]


@pytest.fixture(scope="module", params=SOME)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    set_threads()
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    make_checkpoint(folder, family)
    net = loaded(folder)
    whole = endless(folder)
    some = r".*(language|text)_model.*\.(q|v)_proj"
    made = {"few": train(folder / "few", whole, 1, some, r=4, lora_alpha=8)}
    all_of = train(folder / "all", whole, 2, LANGUAGE, r=16, lora_alpha=4, use_rslora=True)
    both = f"({LANGUAGE}|{TOWER[family]})"
    made |= {"all": all_of, "tower": train(folder / "tower", whole, 3, both, r=8, lora_alpha=8)}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Model(net, tokenizer, whole, made)


def loaded(folder: Path, quantization: QuantizationMode = "auto") -> FamilyNet:
    device = torch.device("cpu")
    how = {"dtype": torch.float32, "device": device, "quantization": quantization}
    return load_net(load_spec(folder), folder, **how)  # type: ignore[arg-type]


class Engine:
    """A harness that loads adapters, each with the next number."""

    def __init__(self, model: Model, rank_group: RankGroup | None = None, **changes: int) -> None:
        self.model = model
        self.harness = Harness(model.net, rank_group, **changes)  # type: ignore[arg-type]
        self.loaded = {"": AdapterRef()}

    def change(self, change: Change) -> Changed:
        changed = self.harness.worker.execute(Plan(0, change=change)).changed
        assert changed is not None
        return changed

    def load(self, name: str, folder: Path | None = None) -> Changed:
        number = next(NUMBERS)
        at = folder or self.model.trained[name].folder
        changed = self.change(Change("load adapter", number, str(at)))
        self.loaded[name] = AdapterRef(number, changed.fingerprint, changed.tower)
        return changed

    def drop(self, name: str) -> None:
        ref = self.loaded.pop(name)
        assert self.change(Change("drop adapter", ref.number)) == Changed()

    def request(self, name: str, seed: int = 0, id: str = "") -> Request:
        ref = self.loaded[name]
        pixels = self.pixels(seed)
        image = self.harness.image(pixels, f"{seed}")
        if ref.tower:
            key = replace(image.key, salt=ref.fingerprint)
            self.harness.pixels[key] = pixels
            image = replace(image, key=key)
        tokens = self.tokens()
        made = self.harness.request(id or name, tokens, [image], max_tokens=NEW_TOKENS)
        return replace(made, caching=Caching(adapter=ref))

    def tokens(self) -> list[int]:
        prompt = PROMPT.replace("@", self.model.whole.placeholder)
        ids: list[int] = self.model.tokenizer.encode(prompt).ids
        return ids

    def pixels(self, seed: int) -> np.ndarray:
        return self.model.whole.resize(picture(112, 140, seed=seed))

    def wanted(self, name: str, seed: int = 0) -> list[int]:
        """The answer of PEFT's merged model, or of the model itself."""
        whole = self.model.trained[name].merged if name else self.model.whole
        tokens = self.request(name, seed).tokens
        return whole.generate(tokens, [self.pixels(seed)], max_new_tokens=NEW_TOKENS)


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("chunk_tokens", [16, 2048])
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_answers_of_a_mixed_batch_are_those_of_merged_models(
    model: Model, chunk_tokens: int
) -> None:
    engine = Engine(model, chunk_tokens=chunk_tokens)
    for name in model.trained:
        assert engine.load(name).error == ""
    wanted = {name: engine.wanted(name) for name in engine.loaded}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 4, "each adapter shows"
    outcomes = engine.harness.run([engine.request(name) for name in wanted])
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == wanted
    alone = {name: engine.harness.run([engine.request(name)])[name] for name in wanted}
    assert {name: outcome.tokens for name, outcome in alone.items()} == wanted
    assert all(outcome.cached_tokens for outcome in alone.values()), "KV is found by adapter"


@pytest.mark.first
@pytest.mark.parametrize("encoder", ["weights", "data"])
def test_ranks_add_their_slices(model: Model, encoder: EncoderMode) -> None:
    rank_group = ThreadRankGroup(model.whole.folder, 2, encoder)
    engine = Engine(model, rank_group)
    for name in model.trained:
        assert engine.load(name).error == ""
    outcomes = engine.harness.run([engine.request(name) for name in engine.loaded])
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == {
        name: engine.wanted(name) for name in engine.loaded
    }


@pytest.mark.first
@pytest.mark.parametrize("quantization", COMPILED)
def test_matrices_of_few_bits_take_adapters(
    plain: tuple[Model, Path], quantization: QuantizationMode
) -> None:
    """What the adapter adds to a row's logits is what it adds beside whole matrices, but for the
    rounding of those.
    """
    model, folder = plain
    found = []
    for net in (model.net, loaded(model.whole.folder, quantization)):
        engine = Engine(replace(model, net=net))
        engine.load("a", folder)
        both = [engine.request("", id="none"), engine.request("a")]
        asked = [replace(each, prompt_logprobs=0) for each in both]
        scores = engine.harness.run(asked)
        rows = [[each[1][0] for each in scores[name].scores] for name in ("none", "a")]
        found.append(np.array(rows[1]) - np.array(rows[0]))
    whole, few = found
    assert np.abs(whole).max() > 1.0
    most = {"int8": 0.1, "int4": 0.4}[quantization]  # 4 bits change these random logits by much
    assert np.abs(few - whole).mean() < most * np.abs(whole).mean()


@pytest.mark.first
def test_adapters_that_leave_the_tower_alone_share_one_embedding(model: Model) -> None:
    engine = Engine(model)
    assert not engine.load("few").tower and not engine.load("all").tower
    assert engine.load("tower").tower
    engine.harness.run([engine.request(name) for name in ("few", "all", "")])
    assert len(engine.harness.encoded) == 1
    engine.harness.run([engine.request("tower")])
    engine.harness.run([engine.request("tower", id="again")])
    assert len(engine.harness.encoded) == 2


@pytest.mark.first
def test_no_page_is_shared_by_two_adapters(model: Model) -> None:
    engine = Engine(model)
    engine.load("few")
    engine.load("all")
    for name in ("", "few", "all"):
        assert engine.harness.run([engine.request(name)])[name].cached_tokens == 0
    engine.drop("few")
    engine.load("few")
    outcome = engine.harness.run([engine.request("few")])["few"]
    assert outcome.cached_tokens > 0, "pages are found by the adapter's content"
    assert outcome.tokens == engine.wanted("few")


@pytest.mark.first
@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_vl", "qwen3_vl"])
def test_a_model_of_gguf_files_takes_adapters(
    gguf_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Such a file has some matrices' rows in another order."""
    set_threads()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = write_files(gguf_checkpoint(family), tmp_path / "files", Kind.Q8_0)
    whole = endless(files.rounded)
    touched = rf"({LANGUAGE}|{TOWER['qwen3_vl' if family == 'qwen3_5' else family]}|{LINEAR})"
    made = {"a": train(tmp_path / "a", whole, 1, touched, r=8, lora_alpha=8)}
    stored = load_file(made["a"].folder / "adapter_model.safetensors")
    assert any("linear_attn" in name for name in stored) == (family == "qwen3_5")
    tokenizer = Tokenizer.from_file(str(files.rounded / "tokenizer.json"))
    net = loaded(write_folder([files.model], files.mmproj))
    engine = Engine(Model(net, tokenizer, whole, made))
    assert engine.load("a").error == ""
    outcomes = engine.harness.run([engine.request(name) for name in engine.loaded])
    wanted = {name: engine.wanted(name) for name in engine.loaded}
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == wanted
    assert wanted["a"] != wanted[""]


def test_eight_adapters_answer_in_one_batch(tmp_path: Path) -> None:
    """Three of them touch the tower; for all others an image is encoded once."""
    set_threads()
    both = f"({LANGUAGE}|{TOWER['qwen3_vl']})"
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl")
    net = loaded(folder)
    whole = endless(folder)
    made = {
        f"{rank}": train(tmp_path / f"{rank}", whole, rank, touched, r=rank, lora_alpha=rank)
        for ranks, touched in (((1, 3, 4, 8, 256), LANGUAGE), ((2, 16, 64), both))
        for rank in ranks
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = Engine(Model(net, tokenizer, whole, made), max_running=12)
    for name in made:
        assert engine.load(name).rank == int(name)
    requests = [engine.request(name) for name in made]
    outcomes = engine.harness.run([*requests, engine.request("", id="none")])
    wanted = {name: engine.wanted(name) for name in made} | {"none": engine.wanted("")}
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == wanted
    assert len(engine.harness.encoded) == 1 + 3
    engine.harness.run([engine.request(name, id=f"{name} again") for name in made])
    assert len(engine.harness.encoded) == 1 + 3


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "use_dora": ({"use_dora": True}, "use_dora"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "another kind": ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    "by module": ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
    "unknown": ({"use_something_new": 3}, "use_something_new"),
    "rank": ({"r": 257}, "r must be from 1 to 256, not 257"),
    "no rank": ({"r": None}, "r"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model, and an adapter that it takes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3_vl")
    net = loaded(folder)
    whole = reference(folder)
    trained = train(folder / "a", whole, 1, LANGUAGE, r=4, lora_alpha=8)
    return Model(
        net, Tokenizer.from_file(str(folder / "tokenizer.json")), whole, {}
    ), trained.folder


def copied(source: Path, folder: Path, **changes: object) -> Path:
    folder.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(
    plain: tuple[Model, Path], tmp_path: Path, case: str
) -> None:
    model, source = plain
    changes, said = REFUSED[case]
    error = Engine(model).load("a", copied(source, tmp_path / "a", **changes)).error
    assert said in error and "adapter_config.json" in error


def test_a_damaged_file_is_refused_and_changes_nothing(
    plain: tuple[Model, Path], tmp_path: Path
) -> None:
    model, source = plain
    engine = Engine(model)
    before = engine.harness.run([engine.request("")])[""].tokens
    deep = copied(source, tmp_path / "deep")
    (deep / "adapter_config.json").write_text(f'{{"r": 4, "x": {"[" * 9999}{"]" * 9999}}}')
    assert "adapter_config.json: maximum recursion" in engine.load("a", deep).error
    folder = copied(source, tmp_path / "a")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-100])
    assert "damaged" in engine.load("a", folder).error
    (folder / "adapter_model.safetensors").unlink()
    assert "No such file" in engine.load("a", folder).error
    os.mkfifo(folder / "adapter_model.safetensors")
    assert "is not a regular file" in engine.load("a", folder).error
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(whole)
    assert "may contain code" in engine.load("a", folder).error
    assert engine.harness.run([engine.request("", id="again")])["again"].tokens == before


@pytest.mark.parametrize("part", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_a_path_that_cannot_be_read_is_refused_and_changes_nothing(
    plain: tuple[Model, Path], tmp_path: Path, part: str
) -> None:
    """As the folder, or as one of its files."""
    model, source = plain
    engine = Engine(model)
    for at, (kind, path) in enumerate(strange_paths(tmp_path).items()):
        folder = Path(path)
        if part:
            folder = copied(source, tmp_path / f"{at}")
            (folder / part).unlink()
            if kind in ("long", "nul", "surrogate"):
                continue  # a file of such a name cannot be
            (folder / part).symlink_to(path)
        error = engine.load("a", folder).error
        assert error and error.encode()[:300], kind
        assert str(tmp_path)[:200] in error or "/dev/zero" in error, error
        if part:
            assert part in error
    assert engine.load("a", source).error == ""


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_is_refused_and_changes_nothing(
    plain: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    model, source = plain
    engine = Engine(model)
    before = engine.harness.run([engine.request("")])[""].tokens
    folder = copied(source, tmp_path / "a")

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), str(path))

    for name in ("open", "stat", "fstat"):
        with monkeypatch.context() as failing:
            failing.setattr(os, name, fail)
            assert os.strerror(error) in engine.load("a", folder).error, name
    assert engine.harness.run([engine.request("", id="again")])["again"].tokens == before
    assert engine.load("a", folder).error == ""


def test_a_large_file_is_refused_by_its_header(
    plain: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without number, and a file of 2 GB of which no disk holds anything: whatever follows
    the header is not read."""
    model, source = plain
    engine = Engine(model)
    folder = copied(source, tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    monkeypatch.setattr(adapter_files, "load", lambda _: pytest.fail("the tensors are not read"))

    def write(header: bytes, size: int) -> None:
        with weights.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(size)

    each = "base_model.model.x{}.lora_A.weight"
    one = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    many = json.dumps({each.format(at): one for at in range(20_000)}).encode()
    write(many, len(many) + 12)
    assert "20000 tensors; an adapter of this model has at" in engine.load("a", folder).error
    write(many * 4, 1 << 30)
    assert "its header has" in engine.load("a", folder).error
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    write(header, 2 << 30)
    assert "has 2147483648 bytes, and" in engine.load("a", folder).error
    fields = json.loads(header)
    name = next(name for name in fields if "lora_B" in name)
    fields[name] |= {"shape": [1 << 20, 256], "data_offsets": [0, 1 << 30]}
    write(json.dumps(fields).encode(), 1 << 30)
    assert "this adapter belongs to a different model" in engine.load("a", folder).error
    write(header, (2 << 30) + 1)
    assert "the limit is 2147483648" in engine.load("a", folder).error


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 9999,
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1]}}',
        b"\xff",
    ],
)
def test_a_header_of_anything_is_refused(
    plain: tuple[Model, Path], tmp_path: Path, header: bytes
) -> None:
    model, source = plain
    folder = copied(source, tmp_path / "a")
    for length in (len(header), len(header) + 1, 1 << 63):
        told = length.to_bytes(8, "little") + header
        (folder / "adapter_model.safetensors").write_bytes(told)
        assert "adapter_model.safetensors" in Engine(model).load("a", folder).error
    (folder / "adapter_model.safetensors").write_bytes(b"\0\0\0")
    assert "damaged" in Engine(model).load("a", folder).error


def test_another_models_adapter_is_refused(plain: tuple[Model, Path], tmp_path: Path) -> None:
    model, _ = plain
    wide = {"hidden_size": 96}
    other = reference(
        make_checkpoint(tmp_path / "other", "qwen3_vl", text=wide, vision={"out_hidden_size": 96})
    )
    folder = train(tmp_path / "a", other, 1, LANGUAGE, r=4, lora_alpha=8).folder
    assert "this adapter belongs to a different model" in Engine(model).load("a", folder).error
    first = r".*patch_embed\.proj"
    kernel = train(tmp_path / "kernel", model.whole, 1, first, r=4, lora_alpha=8).folder
    assert "patch_embed.proj does not support adapters" in Engine(model).load("k", kernel).error
