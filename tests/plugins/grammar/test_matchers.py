from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core.errors import InternalError, InvalidRequest
from saccade.ipc.memory import allocated_bytes
from saccade.plugins.grammar.matchers import Matcher, Matchers
from tests.text.lexicons import (
    DEMO,
    DEMO_ENDS,
    DEMO_VOCAB,
    LARGE_ENDS,
    LARGE_VOCAB,
    demo_lexicon,
    large_lexicon,
)
from tests.text.walks import allowed_tokens, walk

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
}


SPECIAL = [each["content"] for each in json.loads(DEMO.read_text())["added_tokens"]]


def json_grammar(schema: object) -> str:
    return json.dumps({"grammars": [{"name": "answer", "json_schema": schema}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": text}]})


def tokens_of(text: str) -> list[int]:
    return demo_lexicon().tokenize_str(text)


def allowed(matcher: Matcher, words: int = DEMO_VOCAB // 32) -> list[int]:
    return allowed_tokens(matcher, words).tolist()


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)


def test_only_what_fits_may_come_next(matchers: Matchers) -> None:
    matcher = matchers.new_matcher(lark('start: "yes" | "yet"'))
    assert all(demo_lexicon().decode_str([token])[0] == "y" for token in allowed(matcher))
    matcher.accept(tokens_of("ye"))
    first = {demo_lexicon().decode_str([token])[0] for token in allowed(matcher)}
    assert first == {"s", "t"}
    assert not matcher.may_end


def test_columns_that_are_no_token_are_never_allowed() -> None:
    matchers = Matchers(large_lexicon(), LARGE_VOCAB, LARGE_ENDS)
    free = matchers.new_matcher(lark("start: /(?s:.*)/"))
    tokens = allowed(free, matchers.words)
    assert max(tokens) < 151_649
    assert len(tokens) > 150_000
    assert matchers.words == 4752


def test_an_answer_that_is_complete_may_end_and_one_that_cannot_go_on_must(
    matchers: Matchers,
) -> None:
    matcher = matchers.new_matcher(lark("start: /a{1,2}/"))
    assert (matcher.may_end, matcher.must_end) == (False, False)
    assert not set(DEMO_ENDS) & set(allowed(matcher))
    matcher.accept(tokens_of("a"))
    assert (matcher.may_end, matcher.must_end) == (True, False)
    assert set(DEMO_ENDS) < set(allowed(matcher))
    matcher.accept(tokens_of("a"))
    assert matcher.must_end
    assert set(allowed(matcher)) == set(DEMO_ENDS)
    matcher.accept([DEMO_ENDS[1]])
    assert matcher.ended and matcher.must_end
    assert set(allowed(matcher)) == set(DEMO_ENDS)
    assert matcher.forced() == ()


def test_what_must_follow_is_known_without_drawing(matchers: Matchers) -> None:
    matcher = matchers.new_matcher(json_grammar(OBJECT))
    forced = matcher.forced()
    assert demo_lexicon().decode_str(list(forced)).startswith('{"name": ')
    matcher.accept(forced)
    assert matcher.length == len(forced)
    rest = tokens_of('{"name": "Ann", "age": 7}')[len(forced) :]
    assert matcher.count_allowed(rest) == len(rest)
    matcher.accept(rest)
    assert matcher.may_end
    assert matcher.forced() == ()


def test_a_draft_is_allowed_as_far_as_it_fits(matchers: Matchers) -> None:
    matcher = matchers.new_matcher(lark('start: "ab" "c"?'))
    a, b, x = (tokens_of(letter)[0] for letter in "abx")
    assert matcher.count_allowed([a, b, x]) == 2
    assert matcher.count_allowed([a, DEMO_ENDS[0]]) == 1
    assert matcher.count_allowed([a, b, DEMO_ENDS[0]]) == 3
    assert matcher.count_allowed([a, b, DEMO_ENDS[0], a]) == 3
    assert matcher.length == 0


def test_a_token_outside_the_grammar_is_a_typed_error_and_changes_nothing(
    matchers: Matchers,
) -> None:
    matcher = matchers.new_matcher(lark('start: "ab"'))
    a, b = (tokens_of(letter)[0] for letter in "ab")
    for wrong in ([a, a], [b], [a, DEMO_ENDS[0]], [DEMO_ENDS[0]]):
        with pytest.raises(InternalError, match="not allowed by the grammar"):
            matcher.accept(wrong)
        assert matcher.length == 0
    matcher.accept([a, b, DEMO_ENDS[0]])
    assert matcher.ended
    for after in ([a], [DEMO_ENDS[0]]):
        with pytest.raises(InternalError):
            matcher.accept(after)
    assert matcher.ended and matcher.length == 3


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("name", SPECIAL)
def test_the_name_of_a_special_token_is_spelled_by_its_letters(
    matchers: Matchers, name: str, jump: bool
) -> None:
    """The library allows the token alone, and then does not take it: once, that ended the
    engine.
    """
    for text in (name, f"a{name}b", name * 2, f"{name[:-1]}{name}"):
        said = json.dumps(text)
        for grammar in (lark(f"start: {said}"), json_grammar({"enum": [text]})):
            answer = walk(matchers, demo_lexicon(), grammar, 1, DEMO_ENDS, jump=jump)
            assert answer == (said if "json_schema" in grammar else text)


END = f"<[{DEMO_ENDS[0]}]>"


@pytest.mark.parametrize("text", [f'"a" {END} "b"', f"<[0]> <[1]> {END}", f'("a" {END})*', END])
def test_an_end_token_that_a_client_names_ends_nothing_by_itself(
    matchers: Matchers, text: str
) -> None:
    """Once, such a grammar ended the engine: the library forced, or allowed, an end in the midst of
    what was not complete.
    """
    matcher = matchers.new_matcher(lark(f"start: {text}"))
    for _ in range(6):
        forced = matcher.forced()
        assert not set(forced) & set(DEMO_ENDS)
        matcher.accept(forced)
        next_tokens = allowed(matcher)
        assert matcher.may_end or not set(next_tokens) & set(DEMO_ENDS)
        if not next_tokens or matcher.ended:
            break
        matcher.accept(next_tokens[:1])


@pytest.mark.more
def test_prototypes_are_bounded_in_bytes_that_they_take() -> None:
    """Not in those of their texts: 25 bytes once kept 165 MB."""

    def grammar(number: int) -> str:
        return lark(f"start: /{number}((a{{1000}}){{1000}})/")

    room = 64 << 20
    matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS, most_bytes=room)
    before = allocated_bytes()
    for number in range(16):
        matchers.new_matcher(grammar(number))
        assert 1 << 20 < matchers.nbytes <= room
    assert allocated_bytes() - before < 2 * room
    few = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS, most_bytes=1 << 20)
    few.new_matcher(grammar(0))
    assert few.nbytes > 1 << 20, "what was asked for last is kept"
    few.new_matcher(lark('start: "a"'))
    assert few.nbytes < 1 << 20


def test_what_slow_masks_add_to_a_prototype_counts() -> None:
    matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
    used = matchers.new_matcher(lark('start: "a"'))
    before = matchers.nbytes
    used.charge(0.1)
    assert matchers.nbytes > before + (10 << 20)
    used.charge(10.0)
    matchers.new_matcher(lark('start: "b"'))
    assert matchers.nbytes < before + (1 << 20), "it has made room"


COSTLY = "start: T\nT: /.*a.{9}/ & /.*b.{8}/ & /.*c.{7}/ & /.*d.{6}/"


@pytest.mark.parametrize("text", ["begin: /a/", "start: /a[/", COSTLY])
def test_a_grammar_that_was_refused_is_not_kept(text: str) -> None:
    matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
    with pytest.raises(InvalidRequest, match="does not compile"):
        matchers.new_matcher(lark(text))
    assert matchers.nbytes == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), back=st.lists(st.integers(0, 6), max_size=12))
def test_what_was_rolled_back_leaves_no_trace(seed: int, back: list[int]) -> None:
    """A matcher that walks, steps back and walks on allows what a fresh one allows there."""
    matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
    choose = random.Random(seed)
    grammar = json_grammar({"type": ["object", "array", "integer"], "maxItems": 2})
    matcher, path = matchers.new_matcher(grammar), list[int]()
    for count in [*back, 0]:
        for _ in range(choose.randrange(8)):
            if matcher.ended:
                break
            path.append(choose.choice(allowed(matcher)))
            matcher.accept(path[-1:])
        count = min(count, len(path))
        matcher.rollback(count)
        del path[len(path) - count :]
        fresh = matchers.new_matcher(grammar)
        fresh.accept(path)
        assert matcher.length == len(path)
        assert matcher.may_end == fresh.may_end
        assert matcher.ended == fresh.ended
        assert allowed(matcher) == allowed(fresh)
        assert matcher.forced() == fresh.forced()


def test_a_clone_goes_its_own_way(matchers: Matchers) -> None:
    matcher = matchers.new_matcher(lark('start: "ab" | "ac"'))
    matcher.accept(tokens_of("a"))
    other = matcher.clone()
    matcher.accept(tokens_of("b"))
    assert matcher.may_end and not other.may_end
    other.accept(tokens_of("c"))
    assert other.length == 2 and other.may_end


def test_a_prototype_is_never_walked(matchers: Matchers) -> None:
    grammar = lark('start: "abc"')
    matchers.new_matcher(grammar).accept(tokens_of("ab"))
    assert matchers.new_matcher(grammar).count_allowed(tokens_of("abc")) == len(tokens_of("abc"))


def test_a_grammar_that_grows_too_complex_ends_in_a_typed_error() -> None:
    matchers = Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)
    matcher = matchers.new_matcher(lark("start: /(.*[ab].{14}c)|(.*[bd].{15}e)|(.*[ac].{16}f)/"))
    row = np.zeros(matchers.words, np.uint32)
    choose = random.Random(0)
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        for _ in range(3000):
            matcher.fill(row)
            matcher.accept(tokens_of(choose.choice("abcdef")))


def test_a_grammar_that_does_not_compile_is_refused(matchers: Matchers) -> None:
    with pytest.raises(InvalidRequest, match="does not compile"):
        matchers.new_matcher(lark("begin: /a/"))
