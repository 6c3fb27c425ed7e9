"""Compiles the requested formats of answers to grammars, once each.

The results are strings, which are cached and sent to the engine's matchers.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.plugins.grammar.schema import prepare_schema, subschemas
from saccade.plugins.grammar.vocabulary import begin_match, fill_mask, mask_words
from saccade.text.grammar.call_grammar import tag_term
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.parts import Part, lark_part, quoted, schema_part
from saccade.text.grammar.schema_types import place_name

MAX_GRAMMAR_BYTES = 65_536
"""Maximum size of a regular expression, a Lark grammar or a list of choices."""
MAX_INTERSECTIONS = 8
"""Maximum number of `&` and `~` in a Lark grammar. With n of them, a token can take 2^n operations
(`schema.MAX_INTERSECTED`).
"""
MAX_KEPT_BYTES = 16 << 20
"""Maximum total size of the cached grammars in bytes."""
EXPLAIN_SECONDS = 0.5
"""Maximum CPU time in seconds for locating an error in a schema. Other requests wait meanwhile."""
_OUR_WORDS = re.compile(
    r"<non-verbose/>|while processing json-schema:\S*|Enable 'coerce_one_of' option.*"
)
_LITERAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
"""Matches the parts of a Lark grammar without operators: comments, strings and regular
expressions.
"""
_NOTHING_FITS = "Unsatisfiable"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that has been compiled successfully."""

    text: str  # the input of the engine's matchers
    digest: str  # the cache key


class Grammars:
    """Compiles answer formats, and caches the most recently used grammars."""

    def __init__(
        self,
        lexicon: LLTokenizer,
        vocab_size: int,
        most: int = 256,
        most_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Create a cache of at most `most` grammars, with at most `most_bytes` in total.

        The most recent grammar is cached even if it is larger.
        """
        self.nbytes = 0
        self._most_bytes = most_bytes
        self.lexicon = lexicon
        self._row = np.zeros(mask_words(vocab_size), np.uint32)
        self._most = most
        self._known: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, constraint: OutputConstraint, thinks_until: str | None = None) -> Grammar:
        """Return the grammar for `constraint`, from the cache or compiled in milliseconds.

        thinks_until: the text that ends reasoning before the answer, e.g. "</think>". Reasoning is
        not constrained. With `None`, the answer starts immediately.

        Raises InvalidRequest with the location of an error in `param`.
        """
        key = _digest(
            [constraint.kind, constraint.value, constraint.spacing.options(), thinks_until],
            constraint.param,
        )
        known = self._known.get(key)
        if known is None:
            parts = self._parts(constraint)
            if thinks_until is not None:
                parts = [self._after_reasoning(thinks_until, parts[0]["name"]), *parts]
            if error := self._fault(parts):
                raise self._explain(constraint, error)
            known = self._known[key] = Grammar(json.dumps({"grammars": parts}), key)
            self.nbytes += len(known.text)
            while len(self._known) > 1 and (
                len(self._known) > self._most or self.nbytes > self._most_bytes
            ):
                self.nbytes -= len(self._known.popitem(last=False)[1].text)
        self._known.move_to_end(key)
        return known

    def _parts(self, constraint: OutputConstraint) -> list[Part]:
        param = constraint.param
        match constraint.kind:
            case "json":
                return [
                    schema_part(
                        "answer", prepare_schema(constraint.value, param), constraint.spacing
                    )
                ]
            case "parts":
                return list(constraint.value)
            case "choice":
                choices = " | ".join(map(quoted, dict.fromkeys(constraint.value)))
                return [lark_part("answer", _bounded(f"start: {choices}", param))]
            case "regex":
                regex = json.loads(LLMatcher.grammar_from_regex(_bounded(constraint.value, param)))
                return [lark_part("answer", regex["grammars"][0]["lark_grammar"])]
        text = _bounded(constraint.value, param)
        if "::=" in text or "%json" in text:
            what = "%json (use json)" if "%json" in text else "GBNF (rule ::= ...)"
            raise InvalidRequest(
                f"{param}: {what} is not supported; write it in Lark (rule: ...)",
                param,
                "unsupported_parameter",
            )
        operators = len(re.findall("[&~]", _LITERAL.sub("", text)))
        if operators > MAX_INTERSECTIONS:
            raise InvalidRequest(
                f"{param}: the operators & and ~ occur {operators} times; the limit is "
                f"{MAX_INTERSECTIONS}, because each may double the cost of the grammar",
                param,
            )
        return [lark_part("answer", text)]

    def _after_reasoning(self, ends: str, name: str) -> Part:
        """Return a grammar part that allows any text up to `ends`, and then what the grammar `name`
        allows.
        """
        tag, text = tag_term(self.lexicon, ends), quoted(ends)
        thought = (
            f"thought[suffix={text}]: /(?s:.*)/" if tag == text else f"thought: /(?s:.*)/ {tag}"
        )
        return lark_part("thinking", f'start: thought "\\n\\n" @{name}\n{thought}\n')

    def _fault(self, parts: list[Part]) -> str:
        """Return why the grammar's parts fail to compile or to compute a first mask, or "" if they
        succeed.
        """
        matcher = begin_match(self.lexicon, json.dumps({"grammars": parts}))
        if not matcher.is_error():
            fill_mask(self.lexicon, matcher, self._row)
            if not (matcher.is_error() or self._row.any()):
                return "no token of this model can start it"
            # Consume the forced prefix, which may exceed the matcher's limits.
            matcher.try_consume_tokens(matcher.compute_ff_tokens())
        return matcher.get_error()

    def _explain(self, constraint: OutputConstraint, error: str) -> InvalidRequest:
        """Convert the library's error message to an InvalidRequest.

        For a schema, the error has the location of the innermost invalid part, if it can be found
        in `EXPLAIN_SECONDS`.
        """
        late = time.thread_time() + EXPLAIN_SECONDS
        for inner in constraint.inner:
            if fault := self._fault(self._parts(inner)):
                return self._explain(inner, fault)
        param = constraint.param
        if constraint.kind == "json":
            # An unsatisfiable branch is an error only if the whole schema is unsatisfiable.
            empty = error.startswith(_NOTHING_FITS)
            for place, alone in subschemas(prepare_schema(constraint.value, param)):
                if time.thread_time() > late:
                    break
                fault = self._fault([schema_part("answer", alone, constraint.spacing)])
                if fault and fault.startswith(_NOTHING_FITS) == empty:
                    param, error = place_name(param, place), fault
                    break
        said = " ".join(_OUR_WORDS.sub("", error).split())
        return InvalidRequest(f"{param} cannot be compiled to a grammar: {said[:300]}", param)


def _bounded(text: str, param: str) -> str:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}: make it smaller", param
        )
    return text


def _digest(value: Any, param: str) -> str:
    """Return a digest of a JSON value. It depends on the order of a schema's properties."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
