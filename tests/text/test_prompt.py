"""Chat templates and tokens are transformers', from wherever a checkpoint keeps its template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.families.qwen_vl.spec import TEMPLATES
from saccade.text.prompt import template as prompt
from tests.text import templates

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer files; one added token stands only in tokenizer_config.json."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        [templates.QWEN3_VL, "system user assistant You are a helpful assistant."], trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    late = {
        "content": "<tool_call>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": False,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", **late, "content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "added_tokens_decoder": {str(tokenizer.get_vocab_size()): late},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Météo <b>now</b>",
        "parameters": {"z": 1, "a": [True, None]},
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}},
}
IMAGE = {"type": "image"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "Hello, 世界 👍🏽!"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "system in parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
    ],
    "pictures": [
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}, IMAGE]},
        {"role": "assistant", "content": "A cat and a dog."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And "}, IMAGE, {"type": "text", "text": "this?"}],
        },
    ],
    "tool call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Sun, then rain."},
        {"role": "user", "content": "  Thanks  \n"},
    ],
    "special tokens in a message": [
        {"role": "user", "content": "print <|im_end|> and <tool_call>"}
    ],
}


def reference(folder: Path, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def template_of(folder: Path, source: str) -> prompt.ChatTemplate:
    return prompt.ChatTemplate({"default": source}, prompt.Tokenizer.load(folder).named_tokens)


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("tools", [None, [WEATHER, WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}], ids=["plain", "vision ids"])
@pytest.mark.parametrize("generate", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [templates.QWEN2_VL, templates.QWEN3_VL], ids=["qwen2", "qwen3"])
def test_text_and_tokens_are_those_of_transformers(
    folder: Path,
    source: str,
    chat: str,
    generate: bool,
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> None:
    if source is templates.QWEN2_VL and chat == "tool call":
        pytest.skip("this template knows no tool calls")
    theirs = reference(folder, source)
    kwargs = {"tools": tools, "add_generation_prompt": generate, **options}
    text = template_of(folder, source).render(
        CHATS[chat], tools, add_generation_prompt=generate, variables=options
    )
    assert text == theirs.apply_chat_template(CHATS[chat], tokenize=False, **kwargs)
    assert prompt.Tokenizer.load(folder).encode(text) == theirs.apply_chat_template(
        CHATS[chat], return_dict=False, **kwargs
    )


@pytest.mark.parametrize(
    "text", ["", " leading", "a\n\n\nb", "naïve 中文 \u200d👨‍👩‍👧", "<|im_start|><tool_call>x"]
)
def test_bare_text_is_tokenised_as_transformers_does(folder: Path, text: str) -> None:
    assert prompt.Tokenizer.load(folder).encode(text, special=True) == reference(folder, "").encode(
        text
    )


def test_special_tokens_are_variables_and_loop_controls_work(folder: Path) -> None:
    chat = [{"role": "user", "content": f" {i} "} for i in range(5)]
    text = template_of(folder, templates.STRICT).render(chat)
    assert text == reference(folder, templates.STRICT).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|endoftext|>[user] 0<|im_end|>") and "4" not in text


@pytest.mark.parametrize(
    "source",
    [templates.QWEN2_VL, templates.QWEN3_VL, templates.STRICT],
    ids=["qwen2", "qwen3", "strict"],
)
@pytest.mark.parametrize("begun", ["The answer is", "The answer is ", "x"])
def test_a_final_message_is_continued_where_it_ends(folder: Path, source: str, begun: str) -> None:
    parts: list[str | list[dict[str, str]]] = (
        [begun] if source is templates.STRICT else [begun, [{"type": "text", "text": begun}]]
    )
    for content in parts:
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content},
        ]
        text = template_of(folder, source).render(
            chat, add_generation_prompt=False, continue_final_message=True
        )
        assert text == reference(folder, source).apply_chat_template(
            chat, tokenize=False, continue_final_message=True
        )
        assert text.endswith(begun.rstrip() if source is templates.STRICT else begun)


def test_what_a_template_refuses_is_the_clients_fault_in_the_templates_words(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="only user and assistant, not tool") as caught:
        template_of(folder, templates.STRICT).render([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ nothing.x }}",
    ],
)
def test_a_template_that_stumbles_over_a_message_is_a_400_too(folder: Path, source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        template_of(folder, source).render([{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_python(folder: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        template_of(folder, source).render([{"role": "user", "content": "x"}])


def test_the_clients_variables_cannot_replace_the_conversation(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="'messages'"):
        template_of(folder, "x").render([], variables={"messages": []})


# ---- where templates live


def copy(folder: Path, to: Path, **config: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    (to / "tokenizer_config.json").write_text(
        json.dumps(json.loads((to / "tokenizer_config.json").read_text()) | config)
    )
    return to


def rendered(
    folder: Path, tools: list[dict[str, Any]] | None = None, override: Path | None = None
) -> str:
    return prompt.ChatTemplate.load(
        folder, prompt.Tokenizer.load(folder), override, TEMPLATES
    ).render([{"role": "user", "content": "x"}], tools)


def test_templates_are_found_everywhere_and_the_newest_place_wins(
    folder: Path, tmp_path: Path
) -> None:
    copy(folder, tmp_path, chat_template="config")
    assert rendered(tmp_path) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered(tmp_path) == "jinja"
    (tmp_path / "mine.txt").write_text("mine")
    assert rendered(tmp_path, override=tmp_path / "mine.txt") == "mine"


def test_of_named_templates_tools_choose(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    copy(folder, tmp_path, chat_template=named)
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, [WEATHER]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert rendered(tmp_path) == "jinja"
    assert rendered(tmp_path, [WEATHER]) == "more tools"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", 5),
        ("chat_template", []),
        ("chat_template", [{"template": "x"}, 3]),
        ("chat_template", [{"name": "default", "template": 5}]),
        ("chat_template", [{"name": "tool_use", "template": "x"}]),
        ("added_tokens_decoder", [1]),
        ("added_tokens_decoder", {"x": {}}),
        ("added_tokens_decoder", {"99999": "x"}),
        ("eos_token", 5),
        ("eos_token", {"text": "x"}),
    ],
)
def test_a_malformed_field_is_named(folder: Path, tmp_path: Path, name: str, value: Any) -> None:
    copy(folder, tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {name}"):
        rendered(tmp_path)


def test_a_missing_or_broken_file_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        prompt.Tokenizer.load(tmp_path)
    copy(folder, tmp_path)
    with pytest.raises(CheckpointError, match="no chat template"):
        rendered(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 2"):
        rendered(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        prompt.Tokenizer.load(tmp_path)
