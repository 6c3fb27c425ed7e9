"""Claims about the committed model folder: complete, small, and its tokenizer and template behave
as Qwen's do.
"""

import json
from typing import Any

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from saccade.demo import MODEL_DIR
from saccade_bench.drawn.tasks import SKILLS, SMALL_TALK, held_out
from train.tokenizer import CHAT_TEMPLATE, SPECIAL, build_tokenizer

FILES = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text()).render(
        messages=messages, **options
    )


def read_json(name: str) -> dict[str, Any]:
    return dict(json.loads((MODEL_DIR / name).read_text()))


def test_the_folder_is_complete_and_at_most_10_mb() -> None:
    assert sorted(path.name for path in MODEL_DIR.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 10_000_000


def test_the_weights_are_bfloat16_and_at_most_5_million() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "np") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
        assert {part.get_dtype() for part in slices} == {"BF16"}
        sizes = [part.get_shape() for part in slices]
    assert 3_000_000 < sum(_product(size) for size in sizes) < 5_000_000


def _product(size: list[int]) -> int:
    result = 1
    for side in size:
        result *= side
    return result


def test_ids_in_the_settings_are_the_tokenizers() -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert config["image_token_id"] == TOKENIZER.token_to_id("<|image_pad|>")
    assert config["video_token_id"] == TOKENIZER.token_to_id("<|video_pad|>")
    assert config["vision_start_token_id"] == TOKENIZER.token_to_id("<|vision_start|>")
    assert TOKENIZER.token_to_id("<|im_end|>") in generation["eos_token_id"]
    assert TOKENIZER.get_vocab_size() <= config["text_config"]["vocab_size"]


def test_a_2560x1440_picture_is_within_the_limits() -> None:
    size = read_json("preprocessor_config.json")["size"]
    assert size["longest_edge"] >= 2560 * 1440
    assert read_json("config.json")["text_config"]["max_position_embeddings"] > 8 * 3600


def test_the_committed_tokenizer_is_the_one_that_is_built() -> None:
    assert json.loads(TOKENIZER.to_str()) == json.loads(build_tokenizer().to_str())
    assert (MODEL_DIR / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.more
@given(st.text())
def test_any_text_survives_encode_and_decode(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_token_each() -> None:
    assert TOKENIZER.encode("".join(SPECIAL)).ids == list(range(len(SPECIAL)))


@pytest.mark.parametrize("skill", SKILLS)
def test_the_phrasings_are_single_tokens(skill: str) -> None:
    for seed in range(60):
        for turn in held_out(skill, seed).turns:
            for word in turn.question.strip("?.").split():
                assert len(TOKENIZER.encode(" " + word).ids) == 1 or word.isdigit(), word


def test_small_talk_is_known_word_by_word() -> None:
    for question, answer in SMALL_TALK:
        assert len(TOKENIZER.encode(f"{question}\n{answer}").ids) < 45


IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:"}}


def test_the_template_renders_a_chat_with_numbered_pictures() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE_PART, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A red circle."},
        {"role": "user", "content": [{"type": "text", "text": "And this? "}, {"type": "image"}]},
        {"role": "tool", "content": "42"},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nPicture 1: {image}What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA red circle.<|im_end|>\n"
        f"<|im_start|>user\nAnd this? Picture 2: {image}<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "Picture" not in render(messages, add_vision_id=False)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "image_file", "file"])
def test_every_kind_of_picture_part_is_one_placeholder(kind: str) -> None:
    assert render([{"role": "user", "content": [{"type": kind}]}]).count("<|image_pad|>") == 1


def test_a_longer_chat_begins_with_the_text_of_the_shorter_one() -> None:
    messages: list[dict[str, Any]] = []
    before = ""
    for turn in range(4):
        messages.append(
            {"role": "user", "content": [IMAGE_PART, {"type": "text", "text": f"Question {turn}"}]}
        )
        prompt = render(messages, add_generation_prompt=True)
        assert prompt.startswith(before)
        before = prompt
        messages.append({"role": "assistant", "content": "Answer."})
