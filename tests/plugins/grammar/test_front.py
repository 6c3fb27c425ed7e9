"""The front end of a server whose first answer is held to a form."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saccade.ipc.messages import Submit, TokenizerText
from saccade.plugins.grammar import vocabulary
from tests.helpers.served import TOKENIZER, Served, serving

HELD = {"response_format": {"type": "json_object"}}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def ask(served: Served, **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return served.http.post("/v1/chat/completions", json=body).status_code


def test_the_engine_gets_the_tokenizer_once_and_when_it_is_needed(served: Served) -> None:
    assert [ask(served), ask(served, **HELD), ask(served), ask(served, **HELD)] == [200] * 4
    sent = [each for each in served.engine.received if isinstance(each, Submit | TokenizerText)]
    first, tokenizer, *others = sent
    assert tokenizer == TokenizerText(TOKENIZER.json)
    assert isinstance(first, Submit) and not first.request.grammar
    assert [isinstance(each, Submit) and bool(each.request.grammar) for each in others] == [
        True,
        False,
        True,
    ]


def test_requests_are_answered_while_the_vocabulary_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()
    read = vocabulary.read_lexicon

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert answered.wait(50), "nothing was answered meanwhile"
        return read(*arguments)

    monkeypatch.setattr(vocabulary, "read_lexicon", slow)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, served, **HELD)
        assert begun.wait(50)
        assert [ask(served) for _ in range(3)] == [200] * 3
        assert not held.done()
        answered.set()
        assert held.result() == 200
