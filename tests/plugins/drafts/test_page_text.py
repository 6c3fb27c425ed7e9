"""How many tokens a step has if an answer reads out a page whose text is known: counted on pages of
the documentation, without a model.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from saccade.core.types import Caching, Request, SamplingParams
from saccade.front.steps.open_files import draft_text
from saccade.plugins.drafts.drafter import Drafter, Speculation
from saccade.sched.sequence import Sequence
from tests.helpers.served import TOKENIZER

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ["agents.md", "caches.md", "deploy.md", "models.md", "structured-output.md"]
CHARS = 3000
"""Characters of a full page."""
MOST = 7


def printed(markdown: str) -> list[str]:
    """The lines of its page, as PDFs have them: without marks, broken at the width of the page."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    plain = re.sub(r"^[#|\-*` ]+|[`*|]+", "", plain, flags=re.M)
    return [line for part in re.split(r"\n\s*\n", plain) for line in textwrap.wrap(part, 70)]


def tokens_per_step(answer: str, page_text: str) -> float:
    tokens = TOKENIZER.encode(answer)
    caching = Caching(page_text=tuple(TOKENIZER.encode(page_text)))
    prompt = tuple(TOKENIZER.encode("Convert this page to Markdown."))
    sequence = Sequence(Request("page", prompt, (), (), SamplingParams(), caching=caching), 0)
    drafter, speculation = Drafter(MOST), Speculation()
    done = steps = 0
    while done < len(tokens):
        drafts = drafter.propose(sequence, speculation, MOST, 1)
        pairs = zip(drafts, tokens[done:])
        right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        if drafts:
            speculation.draft_tokens = drafts
            drafter.settle(speculation, right)
        sequence.tokens.extend(tokens[done : done + right + 1])
        done, steps = done + right + 1, steps + 1
    return len(tokens) / steps


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_read_out_has_more_than_two_tokens_a_step(name: str) -> None:
    markdown = (DOCS / name).read_text()[:CHARS]
    lines = printed(markdown)
    text = draft_text("\n".join(lines))
    for answer, least in (("\n".join(lines), 6.0), (" ".join(lines), 6.0), (markdown, 2.0)):
        assert tokens_per_step(answer, text) > least > tokens_per_step(answer, "")
