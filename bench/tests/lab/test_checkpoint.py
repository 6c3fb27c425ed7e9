"""Synthetic checkpoints: real configurations with real token ids, and small ones for which
transformers and Saccade compute the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from saccade.core.errors import ConfigError
from saccade.families.registry import family_model, load_spec
from saccade.parallel import UNSHARDED
from saccade.plugins.models.internvl.spec import InternVLSpec
from saccade_bench.lab.checkpoint import FAMILY_PRESETS, make_checkpoint, make_folder
from saccade_bench.lab.options import PresetName
from saccade_bench.lab.presets import FEW_WORDS, PRESETS
from saccade_bench.lab.quantise import quantise_blocks, quantise_checkpoint
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import Session, encode, load
from tests.fixtures.tiny import picture, reference
from tests.helpers.breadth import broad
from tests.helpers.weightless import NoWeights, pretend_cuda

REAL = [
    name
    for name, preset in PRESETS.items()
    if preset.words != FEW_WORDS and preset.family != "internvl"
]


def test_every_file_of_a_made_checkpoint_is_for_the_same_readers(tmp_path: Path) -> None:
    folder = make_checkpoint("tiny-qwen3-vl", tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert "model.safetensors" in modes and len({*modes.values()}) == 1, modes


def test_the_command_line_knows_every_preset() -> None:
    assert sorted(get_args(PresetName)) == sorted((*PRESETS, *FAMILY_PRESETS))


@pytest.mark.parametrize(
    "name",
    broad(
        REAL,
        keep=[
            *("qwen2.5-vl-3b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"),
            *("qwen3.5-9b", "qwen3.5-35b-a3b"),
        ],
    ),
)
def test_real_models_have_their_sizes_and_token_ids(name: str, tmp_path: Path) -> None:
    spec = load_spec(make_checkpoint(name, tmp_path))
    text, vision = PRESETS[name].text, PRESETS[name].vision
    assert (
        len(spec.kv_spec().layers) == text["num_hidden_layers"]
        and spec.vocab_size == text["vocab_size"]
    )
    kinds = {cache.name: cache.shape for layer in spec.kv_spec().layers for cache in layer}
    assert kinds["k"][-1] == text.get("head_dim", 128)
    assert spec.embedding_width == vision["out_hidden_size"] * (
        1 + len(vision.get("deepstack_visual_indexes", ()))
    )
    words = PRESETS[name].words
    assert spec.eos_token_ids == (words + 2, words)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [
        tokenizer.token_to_id(token)
        for token in ("<|vision_start|>", "<|image_pad|>", "<|im_end|>")
    ] == [words + 9, words + 12, words + 2]
    assert qwen(spec).image_token_id == words + 12
    assert tokenizer.decode(tokenizer.encode("naïve 日本 text").ids) == "naïve 日本 text"
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name",
    [
        "tiny-qwen2-vl",
        "tiny-qwen2.5-vl",
        "tiny-qwen3-vl",
        "tiny-qwen3-vl-moe",
        "tiny-qwen3.5",
        "tiny-qwen3.5-moe",
    ],
)
def test_small_ones_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = reference(make_checkpoint(name, tmp_path, dtype=torch.float32))
    ours = load(tmp_path)
    factor = qwen(ours.spec).images.factor
    images = [picture(4 * factor, 6 * factor)]
    torch.testing.assert_close(
        encode(ours, [torch.from_numpy(image) for image in images])[0],
        theirs.embeddings(images)[0],
        atol=1e-4,
        rtol=0.0,
    )
    config = theirs.model.config
    prompt = [
        1,
        2,
        config.vision_start_token_id,
        config.image_token_id,
        config.vision_end_token_id,
        3,
    ]
    session = Session(ours, prompt, images, page_size=None)
    # Rounding depends on the CPU, and the recurrence amplifies it: for logits up to 8.3, float32
    # differs from float64 by 4.0e-4 here, and by 1.1e-4 on a CPU with AMX.
    atol = 1e-3 if name.startswith("tiny-qwen3.5") else 2e-4
    torch.testing.assert_close(
        session.prefill(), theirs.logits(session.tokens, images), atol=atol, rtol=0.0
    )


@pytest.mark.parametrize(
    ("name", "width", "parameters"),
    [("internvl3-1b", 896, 0.94), ("internvl3-2b", 1536, 2.09), ("internvl3-8b", 3584, 7.94)],
)
def test_real_tile_models_have_their_sizes_and_token_ids(
    name: str, width: int, parameters: float, tmp_path: Path
) -> None:
    """The number of parameters, in billions, is the published one."""
    spec = load_spec(make_checkpoint(name, tmp_path))
    assert isinstance(spec, InternVLSpec)
    assert (spec.embedding_width, spec.vocab_size) == (width, 151674)
    assert (*spec.placeholder.before, *spec.placeholder.marks) == (151665, 151667)
    assert spec.num_tokens(spec.recipe(448, 896, spec.pixel_bounds).grid) == 3 * 256
    with torch.device("meta"):
        model = transformers.InternVLForConditionalGeneration(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    assert abs(model.num_parameters() / 1e9 - parameters) < 0.01


@pytest.mark.parametrize(
    ("name", "tokens", "parameters"),
    [
        ("step3-vl-10b", 817, 10.17),
        ("cut-step3-vl-10b", 817, 1.95),  # of our own
        ("smolvlm-256m", 832, 0.256),
        ("smolvlm2-2.2b", 1053, 2.25),
        ("idefics3-8b", 2197, 8.46),
        ("minicpm-v-4.6", 578, 1.30),
        ("deepseek-vl2-tiny", 1807, 3.37),
        ("deepseek-vl2-small", 1807, 16.1),
        ("deepseek-vl2", 1807, 27.5),
        ("hunyuan-ocr", 2076, 1.0),
        ("dots-ocr", 2691, 3.04),
        ("kimi-vl-a3b", 1032, 16.4),
    ],
)
def test_families_of_tiny_ones_have_their_sizes(
    name: str, tokens: int, parameters: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image tokens of a screenshot and the parameters, in billions, are the published ones."""
    spec = load_spec(make_checkpoint(name, tmp_path))
    grid = spec.recipe(1080, 1920, spec.pixel_bounds).grid
    assert spec.num_tokens(grid) == tokens
    config = json.loads((tmp_path / "config.json").read_text())
    text = next(
        (config[part] for part in ("text_config", "language_config") if part in config), config
    )
    assert (len(spec.kv_spec().layers), spec.dtype) == (text["num_hidden_layers"], "bfloat16")
    pretend_cuda(monkeypatch)
    tied = config.get("tie_word_embeddings", False)
    weights = NoWeights(absent=("lm_head.weight",) if tied else ())
    family_model(spec).build(weights, UNSHARDED, UNSHARDED)
    assert abs(weights.nbytes / 2e9 - parameters) < 0.01 * parameters


def test_a_small_tile_model_computes_what_transformers_computes(tmp_path: Path) -> None:
    make_checkpoint("tiny-internvl", tmp_path, dtype=torch.float32)
    theirs = transformers.InternVLForConditionalGeneration.from_pretrained(tmp_path).eval()
    ours = load(tmp_path)
    tokens = list(range(5, 40))
    session = Session(ours, tokens, [], page_size=None)
    with torch.inference_mode():
        wanted = theirs(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(session.prefill(), wanted, atol=2e-4, rtol=0.0)
    canvas = np.concatenate([picture(112, 112, seed=i) for i in range(3)])
    mean, std = (
        torch.tensor(each) * 255 for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    values = ((torch.from_numpy(canvas.reshape(3, 112, 112, 3)) - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        features = theirs.model.get_image_features(values).pooler_output.flatten(0, 1)
    (found,) = encode(ours, [torch.from_numpy(canvas)])
    torch.testing.assert_close(found, features, atol=1e-4, rtol=0.0)


def test_an_unknown_preset_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qwen9.*qwen3-vl-8b"):
        make_checkpoint("qwen9", tmp_path)


def test_what_is_in_a_folder_stays_as_it_is(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(b"somebody's weights")
    with pytest.raises(
        ConfigError, match=r"--out .*: there is something in it.*name another folder"
    ):
        make_checkpoint("tiny-qwen3-vl", tmp_path)
    assert list(tmp_path.iterdir()) == [shard] and shard.read_bytes() == b"somebody's weights"


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_is_no_folder_to_write(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*: no such folder can be made"):
        make_checkpoint("tiny-qwen3-vl", tmp_path / "file" / below)


@pytest.mark.parametrize("name", ["tiny-qwen3-vl", "tiny-qwen3-vl-moe"])
def test_a_quantised_checkpoint_is_near_its_source(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(name, tmp_path / "whole", dtype=torch.float32)
    make_folder(tmp_path / "eight")
    eight = quantise_checkpoint(source, tmp_path / "eight")
    prompt = [5, 6, 7, 8]
    whole, near = (
        Session(load(folder), prompt, [], page_size=None).prefill() for folder in (source, eight)
    )
    likeness = torch.nn.functional.cosine_similarity(near, whole)
    assert 0.99 < likeness.min() < 0.99999
    with pytest.raises(ConfigError, match="it is quantised already"):
        quantise_checkpoint(eight, tmp_path)


def test_blocks_have_scales_of_their_own() -> None:
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    weight[129, 199] = 1000.0
    values, scales = quantise_blocks(weight)
    assert values.shape == weight.shape and scales.shape == (2, 2)
    assert scales[1, 1] == 1000 / 448 and scales.flatten()[:3].max() < 0.02
    made = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    torch.testing.assert_close(made[:128], weight[:128], rtol=0.07, atol=1e-4)


def test_fused_experts_are_quantised_each_by_its_own_blocks() -> None:
    weight = torch.randn(3, 200, 130, generator=torch.Generator().manual_seed(0))
    values, scales = quantise_blocks(weight)
    assert values.shape == weight.shape and scales.shape == (3, 2, 2)
    for number, matrix in enumerate(weight):
        alone = quantise_blocks(matrix)
        assert torch.equal(values[number].float(), alone[0].float())
        assert torch.equal(scales[number], alone[1])
