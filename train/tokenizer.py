"""The demo model's tokenizer and chat template.

The vocabulary has Qwen's special tokens, 256 bytes, and the words of questions and answers. These
words are matched before any merge (`ignore_merges`). All other text, such as words that are read
from images, is spelled in bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from saccade_bench.drawn.draw import COLOURS, SHAPES
from saccade_bench.drawn.tasks import SMALL_TALK, plural

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Qwen's pre-tokenization: words with their leading space, single digits, punctuation, line ends.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ROLES = "system user assistant tool"
_PHRASES = """
    Picture picture pictures image What Which Where Who How Read Describe Count Show There The It In I A An Hello Help Hi
    what which where how is are in the this number word text shape shapes shows show has have of and a an see do does you
    say says written here there many colour color it can read short words name your colours compare count am demo model
    Saccade me help Thank Thanks welcome You Goodbye Bye
"""
_JOINED = (".\n", "?\n", "!\n", ":", ",", ".", "?", "!", "\n\n", "\n")


def vocabulary() -> list[str]:
    """Return all tokens except for the special ones, in the byte-level alphabet (a leading space is
    "Ġ"), without duplicates.
    """
    words = _ROLES.split() + _PHRASES.split()
    for kind in (*SHAPES, "shape"):
        words += [kind, plural(kind)]
    words += list(COLOURS)
    for question, answer in SMALL_TALK:
        words += [word.strip(".,?!") for word in f"{question} {answer}".split()]
    texts = [form for word in dict.fromkeys(words) for form in (word, " " + word)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return list(dict.fromkeys(letters + [_to_byte_level(text) for text in (*texts, *_JOINED)]))


def _to_byte_level(text: str) -> str:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return "".join(piece for piece, _ in pieces)


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer. Special tokens have the lowest ids. Any UTF-8 text can be encoded."""
    tokens = {token: i for i, token in enumerate((*SPECIAL, *vocabulary()))}
    tokenizer = Tokenizer(
        models.BPE(vocab=tokens, merges=[], ignore_merges=True, byte_fallback=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer


CHAT_TEMPLATE = """\
{#- ChatML as in Qwen-VL. Every picture is announced as "Picture k: ", counted over the whole chat, also when there is
    only one, so that a longer chat always begins with the text of the shorter one. add_vision_id=false turns it off. -#}
{%- set images = namespace(count=0) -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {%- if part is string -%}
                {{- part -}}
            {%- elif part.type in ('image', 'image_url', 'input_image', 'image_file', 'file') -%}
                {%- set images.count = images.count + 1 -%}
                {%- if add_vision_id is not defined or add_vision_id -%}
                    {{- 'Picture ' + images.count | string + ': ' -}}
                {%- endif -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.text is defined -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a model folder."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [
            token for token in SPECIAL if token not in ("<|im_end|>", "<|endoftext|>")
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer
