"""A reader of fields makes what it needs when it is first needed: a server has hundreds."""

from __future__ import annotations

from typing import Literal

import pytest

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader


def test_a_type_is_described_for_the_first_refusal_alone() -> None:
    reader: Reader[Literal["low", "high"]] = Reader(Literal["low", "high"])
    assert vars(reader).keys() == {"_kind"}, "nothing is made at import"
    assert reader.json(b'"low"', "detail") == "low"
    assert "_schema" not in vars(reader)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match='detail: only "high" or "low" is supported'):
            reader.json(b'"none"', "detail")
    assert "_schema" in vars(reader)
