"""What a grammar costs: milliseconds until its first mask, microseconds per token after that.

    python -m saccade_bench.grammar TOKENIZER_JSON [--schemas 100]

Walks through generated schemas as random weights would, with the classes that front and engine use,
in one thread. CPU time of that thread, so that a busy machine says the same.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.grammar_vocab import read_lexicon
from saccade.sched.grammar_state import Matchers
from saccade.text.grammar.grammars import Grammars, OutputConstraint
from saccade_bench.fixtures.schemas import SchemaMaker

T = TypeVar("T")
LONGEST = 200
"""Tokens of an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--schemas", type=int, default=100)
    options = parser.parse_args()
    backend = Tokenizer.from_file(str(options.tokenizer))
    vocab = -(-backend.get_vocab_size() // 32) * 32
    ends = [backend.get_vocab_size() - 1]
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], T]) -> T:
        begin = time.thread_time()
        result = work()
        spent[name].append((time.thread_time() - begin) * 1e6)
        return result

    lexicon = timed("lexicon", lambda: read_lexicon(backend.to_str(), vocab, ends))
    grammars, matchers = Grammars(lexicon, vocab), Matchers(lexicon, vocab, ends)
    maker, choose = SchemaMaker(2026), random.Random(0)
    row = np.zeros(matchers.words, np.uint32)
    for _ in range(options.schemas):
        wish = OutputConstraint("json", maker.schema(), "schema")
        try:
            grammar = timed("front: compile and check", partial(grammars.compile, wish)).text
        except InvalidRequest:
            continue
        matcher = timed("engine: begin", partial(matchers.begin, grammar))
        timed("engine: first mask", partial(matcher.fill, row))
        for _ in range(LONGEST):
            if matcher.must_end:
                break
            forced = timed("forced tokens, asked for", matcher.forced)
            if forced:
                timed("accept", partial(matcher.accept, forced))
                spent["forced tokens per run"].append(len(forced))
                continue
            timed("mask", partial(matcher.fill, row))
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(choose.choice(allowed))
            timed("accept", partial(matcher.accept, [token]))
    for name, values in spent.items():
        ordered = sorted(values)
        at = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)}
        unit = "tokens" if name.endswith("run") else "us"
        print(
            f"{name:28} n={len(values):6} mean {sum(values) / len(values):10.1f} {unit}  "
            f"p50 {at[50]:10.1f}  p99 {at[99]:10.1f}  max {ordered[-1]:10.1f}"
        )


if __name__ == "__main__":
    main()
