"""MaxSim in blocks, and when a server has a vector per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from saccade.core.errors import ConfigError, InvalidRequest
from saccade.families.registry import load_spec
from saccade.front import late_interaction
from saccade.front.assemble import find_task
from saccade.front.late_interaction import MAX_VALUES, LateScoring, max_sim
from saccade.front.score_prompts import CHATS
from saccade.text.prompt.template import Tokenizer
from tests.fixtures.colqwen import WIDTH, make_colqwen


@pytest.mark.parametrize("products", [1, 7, 40, 1 << 22])
def test_max_sim_is_the_sum_of_maxima_in_any_blocks(
    products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_interaction, "MAX_PRODUCTS", products)
    random = np.random.default_rng(0)
    query, page = (random.standard_normal((n, 16), np.float32) for n in (11, 5))
    expected = sum(max(float(q.astype(np.float64) @ p) for p in page) for q in query)
    assert max_sim(query, page) == pytest.approx(expected, rel=1e-5)


def test_the_checkpoint_decides_unless_it_is_disabled(tmp_path: Path) -> None:
    make_colqwen(tmp_path)
    spec, tokenizer = load_spec(tmp_path), Tokenizer.load(tmp_path)
    scoring = find_task("auto", tmp_path, spec, tokenizer)
    assert scoring is not None and isinstance(scoring.late, LateScoring)
    assert (scoring.late.width, scoring.late.max_tokens) == (WIDTH, MAX_VALUES // WIDTH)
    assert find_task("none", tmp_path, spec, tokenizer) is None
    with pytest.raises(ConfigError, match="--pooling embed: this checkpoint was trained for a"):
        find_task("embed", tmp_path, spec, tokenizer)
    with pytest.raises(InvalidRequest, match="ColQwen"):
        CHATS.check_late()
