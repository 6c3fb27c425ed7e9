"""Grammars of the demo model's tokens, and what walks through them."""

from __future__ import annotations

import pytest

from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB, demo_lexicon


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(demo_lexicon(), DEMO_VOCAB)


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
