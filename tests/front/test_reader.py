"""A reader of fields makes what it needs when it is first needed: a server has hundreds."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from msgspec import Struct

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader


class Inner(Struct):
    kind: Literal["a", "b"]


class Part(Struct):
    inner: Inner


def test_a_type_is_described_for_the_first_refusal_alone() -> None:
    reader: Reader[Literal["low", "high"]] = Reader(Literal["low", "high"])
    assert vars(reader).keys() == {"_kind"}, "nothing is made at import"
    assert reader.json(b'"low"', "detail") == "low"
    assert "_schema" not in vars(reader)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match='detail: only "high" or "low" is supported'):
            reader.json(b'"none"', "detail")
    assert "_schema" in vars(reader)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("size", [10, 60_000, 1_000_000])
def test_a_refusal_does_not_search_what_a_client_has_written_for_its_place(size: int) -> None:
    """Once, 31 KB of it took 7 seconds, and 125 KB took 90."""
    value = json.dumps(" - at `$" * (size // 8))
    with pytest.raises(InvalidRequest) as refused:
        Reader(Literal["low", "high"]).json(value.encode(), "detail")
    assert refused.value.param == "detail"
    with pytest.raises(InvalidRequest) as refused:
        Reader(dict[str, dict[str, Literal[1]]]).json(b'{"a": {"b": %s}}' % value.encode(), "x")
    assert refused.value.param == "x"
    with pytest.raises(InvalidRequest) as refused:
        Reader(Part).json(b'{"inner": {"kind": %s}}' % value.encode(), "part")
    assert refused.value.param == "part.inner.kind"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb'"\ud83d\ude00", x', ""),
        (rb'"\uD83D\uDE00", x', ""),
        (rb'"\\ud83d", x', ""),
        (rb'"\\\ud83d"', r"\ud83d"),
        (rb'"\ud83d\ude00\ude00"', r"\ude00"),
        (rb'"\ud83d\ud83d\ude00"', r"\ud83d"),
        (rb'"\ud83d\u0041"', r"\ud83d"),
        (b'"' + b"A" * 1_000_000 + rb'\udead"', r"\udead"),
        (b'"' + rb"\\" * 1_000_000, ""),
    ],
)
def test_only_half_of_a_pair_is_told_as_such(text: bytes, half: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Reader(list[str]).json(b"[" + text, "texts")
    message = refused.value.message
    assert message.startswith(f"texts: {half} is one half" if half else "texts is not valid JSON")
