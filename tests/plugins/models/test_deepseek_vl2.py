"""DeepSeek-VL2 and DeepSeek-V2: what the cache keeps of latents, and images as lines of tiles."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from saccade.core.config import Hardware
from saccade.core.errors import ConfigError, ImageError
from saccade.core.family import latent_cache
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.settings import EngineSettings, QuantizationSettings
from saccade.engine.sizing import resolve
from saccade.families.registry import load_spec
from saccade.kernels.language_attention import REFERENCE
from saccade.kernels.reference.ops import Ops
from saccade.media.sources.source import ImageSource, in_company
from saccade.plugins.models.deepseek_vl2.spec import DeepseekSpec
from saccade.runtime.attention import pick_attention
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from saccade_bench.fixtures.server import serving
from tests.e2e.test_serve import COUNTS, NEW_TOKENS, OPTIONS, ask
from tests.e2e.ways import KEY
from tests.families.answers import Model
from tests.families.conftest import Refusals, refusals_by_name
from tests.families.forwarding import CPU
from tests.fixtures.families.deepseek_vl2 import (
    EDGE,
    HEADS,
    SIDE,
    DeepseekReference,
)
from tests.fixtures.tiny import picture
from tests.helpers.images import image_part, text_part, user

FAMILY = "deepseek_vl_v2"
MACHINE = Hardware("cpu", "2 threads", 24 << 30, 20 << 30)


def read(folder: Path) -> DeepseekSpec:
    found = load_spec(folder)
    assert isinstance(found, DeepseekSpec)
    return found


@pytest.fixture(scope="module")
def model(answered: Callable[[str], Model]) -> Model:
    return answered(FAMILY)


# ---- the language model


def test_the_cache_keeps_one_latent_of_each_token_on_every_rank(
    checkpoint: Callable[..., Path],
) -> None:
    spec = read(checkpoint("deepseek_v2"))
    for ranks in (1, 2):
        kept = spec.kv_spec(ranks)
        assert kept.latent and not kept.sight and not kept.kv_layers
        assert kept.token_bytes("float32") == 3 * (24 + 8) * 4
    heads = read(checkpoint("deepseek_v2", text=HEADS))
    assert not heads.kv_spec().latent
    assert heads.kv_spec().token_bytes("float32") == 3 * 2 * 64 * 4


def test_attention_that_knows_no_latents_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = (latent_cache(64),)
    assert pick_attention("auto", Ops(), CPU, torch.float32, shapes=shapes) == "sdpa"
    lacking = {name: replace(each, knows=frozenset(["ranges"])) for name, each in REFERENCE.items()}
    monkeypatch.setattr(Ops, "attention", lacking)
    with pytest.raises(ConfigError, match=r"caches latents.* on cpu .*--device cpu"):
        pick_attention("auto", Ops(), CPU, torch.float32, shapes=shapes)
    on_gpu = pytest.importorskip("saccade.plugins.gpu.triton.language_attention")
    assert not on_gpu.ATTENTION["triton"].lacks(shapes)


# ---- images


SIZES = ((60, 90), (76, 76), (200, 70), (70, 200), (300, 310), (31, 20), (500, 40))


def test_the_grid_is_the_candidate_that_an_image_fills_best(model: Model) -> None:
    spec = model.net.spec
    for height, width in SIZES:
        canvas = model.reference.resize(picture(height, width))
        recipe = spec.recipe(height, width, spec.pixel_bounds)
        assert recipe.canvas == canvas.shape[:2]
        assert recipe.grid == (canvas.shape[0] // SIDE - 1, canvas.shape[1] // SIDE)
        rows, columns = recipe.grid
        lines = EDGE * (EDGE + 1) + 1 + EDGE * rows * (EDGE * columns + 1)
        assert spec.num_tokens(recipe.grid) == lines
    with pytest.raises(ImageError, match="more than 200 times"):
        spec.recipe(3, 601, spec.pixel_bounds)


def test_a_chat_is_written_as_published(model: Model) -> None:
    folder = model.reference.folder
    tokenizer = TextTokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer, None, model.net.spec.templates)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a fox"},
        {"role": "user", "content": "red?"},
    ]
    assert template.render(chat) == (
        "<｜begin▁of▁sentence｜><|User|>: <image>\nwhat?\n\n<|Assistant|>: a fox"
        "<｜end▁of▁sentence｜><|User|>: red?\n\n<|Assistant|>:"
    )


def test_of_more_than_two_images_each_is_one_tile(model: Model) -> None:
    bounds = model.net.spec.pixel_bounds
    sources = [ImageSource(b"", "messages") for _ in range(3)]
    assert in_company(sources[:2], bounds) == sources[:2]
    assert in_company(sources, replace(bounds, cut=None)) == sources
    for source in in_company(sources, bounds):
        assert isinstance(source, ImageSource)
        recipe = model.net.spec.recipe(300, 310, source.budget.apply(bounds))
        assert recipe.grid == (1, 1)


@pytest.mark.slow
def test_answers_over_http_are_the_references(model: Model, tmp_path: Path) -> None:
    """One image, two, three, which are one tile each; the second time nothing is computed anew."""
    theirs, tokenizer = model.reference, model.tokenizer
    assert isinstance(theirs, DeepseekReference)
    shown = [picture(64, 90, seed=1), picture(130, 77, seed=2), picture(300, 400, seed=3)]
    wanted = []
    for count in (0, 1, 2, 3):
        canvases = theirs.shown(shown[:count])
        text = f"<｜begin▁of▁sentence｜><|User|>: {'<image>' * count}which?\n\n<|Assistant|>:"
        text = text.replace("<image>", "<image>\n")
        lengths = iter([len(each) for each in theirs.embeddings(canvases)])
        tokens = [
            each
            for token in tokenizer.encode(text).ids
            for each in ([token] * next(lengths) if token == theirs.mark else [token])
        ]
        answer = theirs.generate(tokens, canvases, max_new_tokens=NEW_TOKENS)
        wanted.append(str(tokenizer.decode(answer)))
    with serving(theirs.folder, tmp_path, *OPTIONS) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)

        def answers() -> list[str]:
            chats = [[user(*map(image_part, shown[:n]), text_part("which?"))] for n in range(4)]
            return [str(ask(client, each).choices[0].message.content) for each in chats]

        assert answers() == wanted
        before = [server.metric(name) for name in COUNTS]
        assert answers() == wanted
        assert [server.metric(name) for name in COUNTS] == before


def test_fields_that_the_hubs_files_leave_out_are_those_of_the_published_classes(
    model: Model, tmp_path: Path
) -> None:
    """The configuration of the small size."""
    shutil.copytree(model.reference.folder, tmp_path, dirs_exist_ok=True)
    edges = range(384, 384 * 9 + 1, 384)
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[w, h] for w in edges for h in edges if w * h <= 9 * 384**2],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "max_position_embeddings": 4096,
            "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
            "torch_dtype": "bfloat16",
        },
        "projector_config": {"model_type": "mlp_projector", "n_embed": 2048},
        "vision_config": {"layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "processor_config.json").unlink()
    spec = read(tmp_path)
    assert spec.kv_spec().token_bytes("bfloat16") == 27 * 2 * (512 + 64)
    assert (spec.dtype, spec.vocab_size, spec.eos_token_ids[0]) == ("bfloat16", 102400, 1)
    assert (spec.vision.intermediate, spec.vision.patches, spec.vision.side) == (4304, 729, 384)
    assert spec.num_tokens((1, 1)) == 2 * 14 * 15 + 1
    # No candidate of fewer tiles has all of its pixels.
    assert spec.recipe(400, 1200, spec.pixel_bounds).grid == (2, 4)
    assert spec.recipe(1000, 1000, spec.pixel_bounds).canvas == (4 * 384, 3 * 384)
    assert spec.largest_image.tokens == 14 * 15 + 1 + 14 * 9 * 15


REFUSED: Refusals = {
    "config.json": [
        ({"tile_tag": "1D"}, "tile_tag '1D' is not supported"),
        ({"global_view_pos": "tail"}, "global_view_pos 'tail' is not supported"),
        ({"candidate_resolutions": [[76, 100]]}, "pairs of multiples of 76"),
        ({"candidate_resolutions": [[760, 760]]}, "at most 36 tiles"),
        ({"projector_config": {"projector_type": "linear"}}, "'linear' is not supported"),
        ({"projector_config": {"n_embed": 32}}, "n_embed must be 64, not 32"),
        ({"language_config": {"topk_method": "best"}}, "topk_method 'best' is not supported"),
        ({"language_config": {"n_group": 3}}, "n_group must divide 8 experts"),
        (
            {"language_config": {"num_experts_per_tok": 9}},
            "num_experts_per_tok 9 is not possible with 8",
        ),
        ({"language_config": {"attention_bias": True}}, "attention_bias is not supported"),
        ({"language_config": {"rope_scaling": {"type": "dynamic"}}}, "'dynamic' is not supported"),
        (
            {"language_config": {"rope_scaling": {"type": "yarn", "factor": 0.5}}},
            "yarn needs factor",
        ),
        (
            {
                "language_config": {
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": math.e,
                        "mscale": 1.0,
                        "mscale_all_dim": -10.0,
                    }
                }
            },
            "mscale_all_dim make of it",
        ),
        ({"language_config": {"rope_theta": 0}}, "rope_theta"),
        ({"language_config": {"rope_theta": -1.0}}, "rope_theta"),
        *(
            ({"vision_config": {"mlp_ratio": value}}, "mlp_ratio")
            for value in (10**400, float("nan"), float("inf"))
        ),
    ]
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)


def test_a_cache_of_8_bits_is_refused_by_name(model: Model) -> None:
    bits = QuantizationSettings(kv_cache_dtype="fp8_e4m3")
    settings = EngineSettings(quantization=bits)
    with pytest.raises(ConfigError, match="fp8_e4m3: deepseek_vl_v2 caches latents"):
        resolve(
            ModelOptions(), EngineOptions(), model.net.spec, "float32", MACHINE, settings=settings
        )
