"""Prompts that embed and rank have the very tokens of the authors' conversations, rendered by
transformers with the checkpoint's template.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from saccade.families.checkpoint import read_pooling
from saccade.families.registry import load_spec
from saccade.front.conversation import Chat, MessageText, Part
from saccade.front.prompt_encoder import PromptEncoder
from saccade.front.read_requests import read_request
from saccade.front.score_prompts import Scoring, find_scoring
from saccade.media.content import encode_array
from saccade.media.sources.source import ImageSource
from saccade.text.answer.answer_format import SILENT
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from tests.fixtures.tiny import CHAT_TEMPLATE

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
TASK = "Given a search query, retrieve relevant candidates that answer the query."
IMAGE = encode_array(np.zeros((64, 64, 3), np.uint8))
WORDS = (
    *["the", "quick", "brown", "fox", "how", "many", "red", "circles", "are", "there", "?"],
    "\n",
    "  ",
    "Ünï",
    "図",
    "!",
)
Content = Sequence[str | None]
"""Texts, and None for an image."""


class Pair:
    """A checkpoint as we ask it, and as its authors do."""

    def __init__(self, folder: Path) -> None:
        self.spec, own = load_spec(folder), Tokenizer.load(folder)
        template = ChatTemplate.load(folder, own, None, self.spec.templates)
        self.prompts = PromptEncoder(self.spec, own, template, SILENT)
        self.scoring: Scoring = find_scoring("auto", read_pooling(folder), self.spec, own)
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), chat_template=CHAT_TEMPLATE
        )

    def ours(self, chat: Chat) -> list[int]:
        return self.prompts.encode_now(read_request(chat, "input").request, 1 << 16).tokens

    def theirs(self, system: str, content: Content) -> list[int]:
        said: Any = [
            {"type": "image"} if each is None else {"type": "text", "text": each}
            for each in content
        ]
        chat: Any = [
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": said},
        ]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text).input_ids)


def parts(content: Content) -> tuple[Part, ...]:
    return tuple(ImageSource(IMAGE, "x") if each is None else MessageText(each) for each in content)


def drawn(draw: random.Random) -> Content:
    """Some texts and images, in any order."""
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))).strip() or "a" for _ in range(2)]
    return draw.choice([texts[:1], [None], [None, *texts], [*texts, None], [texts[0], None, None]])


def compare(embedder: Pair, ranker: Pair, numbers: range) -> None:
    for number in numbers:
        draw = random.Random(number)
        query, document = drawn(draw), drawn(draw)
        told = draw.choice([None, "Search for pages", "Find it!", "Same colour?"])
        system = (told or "Represent the user's input") + ("" if told and told[-1] in "!?" else ".")
        found = embedder.ours(embedder.scoring.embed_chat(parts(document), told))
        assert found == embedder.theirs(system, document), number
        chat = ranker.scoring.rank_chat(parts(query), parts(document), told)
        said = (f"<Instruct>: {told or TASK}", "<Query>:", *query, "\n<Document>:", *document)
        assert ranker.ours(chat) == ranker.theirs(JUDGE, said), number


@pytest.fixture(scope="module")
def both(checkpoint: Callable[..., Path]) -> tuple[Pair, Pair]:
    return (
        Pair(checkpoint("qwen3_vl", pooling="embed")),
        Pair(checkpoint("qwen3_vl", pooling="rank")),
    )


def test_thirty_pairs_have_the_authors_tokens(both: tuple[Pair, Pair]) -> None:
    compare(*both, range(30))


@pytest.mark.slow
def test_a_thousand_pairs_have_the_authors_tokens(both: tuple[Pair, Pair]) -> None:
    compare(*both, range(30, 1030))
