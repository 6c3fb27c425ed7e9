"""From a requested answer form to a grammar that is compiled once.

Owns the request's spellings (OpenAI's `response_format`, vLLM's `structured_outputs` and
`guided_*`), the text that the engine's matchers begin from, and its cache. Knows nothing about tool
calls (`tool_grammar.py` writes theirs), rows or masks.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.grammar_vocab import begin_match, fill_mask, mask_words, tag_term
from saccade.text.grammar.schema import place_name, prepare_schema, subschemas

MAX_GRAMMAR_BYTES = 65_536
"""Of a regular expression, a Lark grammar or a list of choices."""
MAX_BREAKS_CHARACTERS = 200
"""Of a pattern for white space, which stands between any two parts of a document."""
MAX_INTERSECTIONS = 8
"""`&` and `~` of a Lark grammar: a step of the matcher takes up to 2^n operations for n of them
(`schema.MAX_INTERSECTED`).
"""
MAX_KEPT_BYTES = 16 << 20
"""Of the texts of all grammars that are kept."""
MAX_CHOICES = 1_000
EXPLAIN_SECONDS = 0.5
"""CPU time after which the place of a fault is not looked for any more: others wait."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("json", "regex", "choice", "grammar", "json_object")
_OUR_WORDS = re.compile(
    r"<non-verbose/>|while processing json-schema:\S*|Enable 'coerce_one_of' option.*"
)
_LITERAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
"""What no operator stands in: comments, strings and regular expressions of Lark."""
_NOTHING_FITS = "Unsatisfiable"
_ANY_OBJECT = {"type": "object"}
_BREAKS = r"[ \t\n\r]{0,40}"
"""White space between the parts of a document: bounded, or a model may write it until the end."""

Part = dict[str, Any]
"""One grammar of several: {"name", "json_schema"} or {"name", "lark_grammar"}; Lark calls the
others @name.
"""


@dataclass(frozen=True, slots=True)
class Spacing:
    """White space within JSON.

    separators: after an item, after a key. breaks: a regular expression for what else may stand
    between two parts.
    """

    separators: tuple[str, str] = (", ", ": ")
    breaks: str | None = None

    def options(self) -> dict[str, Any]:
        item, key = self.separators
        return {
            "item_separator": item,
            "key_separator": key,
            "whitespace_flexible": False,
            "whitespace_pattern": self.breaks,
            "coerce_one_of": False,
            "lenient": False,
        }


AS_DUMPED = Spacing()
"""As Python's json.dumps writes it, and models learn it; all but the values is then forced."""
COMPACT = Spacing((",", ":"))
FREE = Spacing((",", ":"), _BREAKS)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """An answer's form. `param`: the field that asks for the form, as the client wrote it.

    json: `value` is a schema. regex, lark: their text. choice: the possible answers. parts: ready
    grammars, ours and never a client's, the first for the whole, made from the schemas in `inner`.
    """

    kind: Literal["json", "regex", "lark", "choice", "parts"]
    value: Any
    param: str
    spacing: Spacing = AS_DUMPED
    inner: tuple[OutputConstraint, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that compiles. text: the input of the engine's matchers. digest: its name."""

    text: str
    digest: str


def read_constraint(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Read the form that a request asks for, in any spelling.

    The spellings are `response_format`, `structured_outputs` and `guided_*`. Returns `None` if any
    text will do. Raises InvalidRequest that names the field, also if two fields ask for a form.
    """
    structured = fields.get("structured_outputs")
    constraints = [
        constraint
        for constraint in (
            read_response_format(fields.get("response_format") or None),
            read_structured_outputs(structured, "structured_outputs") if structured else None,
            read_guided(fields),
        )
        if constraint is not None
    ]
    if len(constraints) > 1:
        first, second = constraints[0].param, constraints[1].param
        raise InvalidRequest(f"{second}: excluded by {first}; give one", second)
    return constraints[0] if constraints else None


def read_response_format(
    value: Mapping[str, Any] | None, param: str = "response_format"
) -> OutputConstraint | None:
    """Read OpenAI's `response_format` at `param`. Return `None` if any text will do.

    Raises InvalidRequest.
    """
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return OutputConstraint("json", _ANY_OBJECT, param)
    if value.get("type") != "json_schema":
        raise InvalidRequest(
            f"{param}.type: only text, json_object or json_schema is supported", f"{param}.type"
        )
    inner, param = value.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"{param}: expected an object with name and schema", param)
    return read_json_schema(inner, param)


def read_json_schema(value: Mapping[str, Any], param: str) -> OutputConstraint:
    """Read the named schema of `response_format.json_schema`, or of Responses' `text.format`.

    `strict` may be either, as a schema is always kept to. Raises InvalidRequest.
    """
    if unknown := sorted({*value} - {"type", "name", "description", "schema", "strict"}):
        where = f"{param}.{unknown[0]}"
        raise InvalidRequest(
            f"{where}: this parameter is not supported", where, "unsupported_parameter"
        )
    name = value.get("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        where = f"{param}.name"
        raise InvalidRequest(f"{where}: expected 1 to 64 letters, digits, _ or -", where)
    if not isinstance(value.get("schema"), Mapping):
        where = f"{param}.schema"
        raise InvalidRequest(f"{where}: expected a JSON schema, an object", where)
    return OutputConstraint("json", value["schema"], f"{param}.schema")


def read_structured_outputs(value: Mapping[str, Any], param: str) -> OutputConstraint | None:
    """Read vLLM's `structured_outputs`.

    It holds one of json, regex, choice, grammar (Lark) or json_object, and how JSON is spaced.
    Raises InvalidRequest.
    """
    given = [mode for mode in _MODES if value.get(mode) is not None]
    others = {"disable_any_whitespace", "whitespace_pattern"}
    unknown = sorted(
        key for key, each in value.items() if key not in {*_MODES, *others} and each is not None
    )
    if unknown:
        where = f"{param}.{unknown[0]}"
        raise InvalidRequest(
            f"{where}: this parameter is not supported", where, "unsupported_parameter"
        )
    if len(given) != 1:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(_MODES)}, got {' and '.join(given) or 'none'}",
            param,
        )
    spacing = _spacing(
        value.get("disable_any_whitespace"),
        value.get("whitespace_pattern"),
        f"{param}.whitespace_pattern",
    )
    return _read_mode(given[0], value[given[0]], f"{param}.{given[0]}", spacing)


def read_guided(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Read vLLM's older fields.

    They are guided_json, guided_regex, guided_choice, guided_grammar and guided_whitespace_pattern.
    Raises InvalidRequest.
    """
    given = [mode for mode in _MODES if fields.get(f"guided_{mode}") is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(
            f"guided_{given[1]}: excluded by guided_{given[0]}; give one", f"guided_{given[1]}"
        )
    where = "guided_whitespace_pattern"
    spacing = _spacing(None, fields.get(where), where)
    param = f"guided_{given[0]}"
    return _read_mode(given[0], fields[param], param, spacing)


def _read_mode(mode: str, value: Any, param: str, spacing: Spacing) -> OutputConstraint | None:
    match mode:
        case "json":
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError) as error:
                    raise InvalidRequest(f"{param}: not JSON: {error}", param) from None
            return OutputConstraint("json", value, param, spacing)
        case "json_object":
            if not isinstance(value, bool):
                raise InvalidRequest(f"{param}: expected true or false", param)
            return OutputConstraint("json", _ANY_OBJECT, param, spacing) if value else None
        case "choice":
            whole = isinstance(value, list | tuple) and 0 < len(value) <= MAX_CHOICES
            if not whole or not all(isinstance(each, str) for each in value):
                raise InvalidRequest(f"{param}: expected a list of 1 to {MAX_CHOICES} texts", param)
            return OutputConstraint("choice", list(value), param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: expected a text that is not empty", param)
    return OutputConstraint("regex" if mode == "regex" else "lark", value, param)


def _spacing(compact: Any, breaks: Any, where: str) -> Spacing:
    """Return the white space for JSON answers. `where`: the client's name for `breaks`."""
    if breaks is not None:
        if not isinstance(breaks, str):
            raise InvalidRequest(f"{where}: expected a regular expression", where)
        if len(breaks) > MAX_BREAKS_CHARACTERS:
            raise InvalidRequest(
                f"{where}: {len(breaks)} characters; the limit is {MAX_BREAKS_CHARACTERS}", where
            )
        return Spacing((",", ":"), breaks)
    return {True: COMPACT, False: FREE}.get(compact, AS_DUMPED)


def schema_part(name: str, schema: Any, spacing: Spacing = AS_DUMPED) -> Part:
    """Return a part for documents under `schema`, which `prepare_schema` has checked."""
    if not isinstance(schema, dict):
        schema = {} if schema else {"allOf": [False]}
    return {"name": name, "json_schema": {**schema, "x-guidance": spacing.options()}}


def lark_part(name: str, lark: str) -> Part:
    """Return a part for what a Lark grammar derives from `start`."""
    return {"name": name, "lark_grammar": lark}


def quoted(text: str) -> str:
    """Return `text` as a Lark string. Lark takes JSON's strings except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Grammars:
    """Compiles requested forms and keeps the latest grammars."""

    def __init__(
        self,
        lexicon: LLTokenizer,
        vocab_size: int,
        most: int = 256,
        most_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Keep at most `most` grammars, with texts of at most `most_bytes`.

        The most recent grammar is kept at any size.
        """
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lexicon = lexicon
        self._row = np.zeros(mask_words(vocab_size), np.uint32)
        self._most = most
        self._known: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, constraint: OutputConstraint, thinks_until: str | None = None) -> Grammar:
        """Return the grammar for `constraint`. Takes milliseconds, or a lookup for a recent one.

        thinks_until: the mark that ends reasoning before the answer, e.g. "</think>". The reasoning
        itself is free. With `None` the answer begins at once. Raises InvalidRequest whose `param`
        names the place.
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
                f"{param}: {operators} of & and ~; the limit is {MAX_INTERSECTIONS}: each may "
                "double what it takes to follow the grammar",
                param,
            )
        return [lark_part("answer", text)]

    def _after_reasoning(self, ends: str, name: str) -> Part:
        """Return a part for free text up to the first `ends`, then the grammar `name`."""
        tag, text = tag_term(self._lexicon, ends), quoted(ends)
        thought = (
            f"thought[suffix={text}]: /(?s:.*)/" if tag == text else f"thought: /(?s:.*)/ {tag}"
        )
        return lark_part("thinking", f'start: thought "\\n\\n" @{name}\n{thought}\n')

    def _fault(self, parts: list[Part]) -> str:
        """Return why parts fail to compile, or why their first mask fails. Empty if they work."""
        matcher = begin_match(self._lexicon, json.dumps({"grammars": parts}))
        if not matcher.is_error():
            fill_mask(self._lexicon, matcher, self._row)
            if not (matcher.is_error() or self._row.any()):
                return "no token of this model begins it"
            # What is forced from the start may be too long to be followed.
            matcher.try_consume_tokens(matcher.compute_ff_tokens())
        return matcher.get_error()

    def _explain(self, constraint: OutputConstraint, error: str) -> InvalidRequest:
        """Return the library's words as an error.

        For a schema, it names the innermost place that has a fault by itself, if that is found
        soon.
        """
        late = time.thread_time() + EXPLAIN_SECONDS
        for inner in constraint.inner:
            if fault := self._fault(self._parts(inner)):
                return self._explain(inner, fault)
        param = constraint.param
        if constraint.kind == "json":
            # A branch that nothing satisfies is a fault only where the whole has the same.
            empty = error.startswith(_NOTHING_FITS)
            for place, alone in subschemas(prepare_schema(constraint.value, param)):
                if time.thread_time() > late:
                    break
                fault = self._fault([schema_part("answer", alone, constraint.spacing)])
                if fault and fault.startswith(_NOTHING_FITS) == empty:
                    param, error = place_name(param, place), fault
                    break
        said = " ".join(_OUR_WORDS.sub("", error).split())
        return InvalidRequest(f"{param}: no grammar can be made of it: {said[:300]}", param)


def _bounded(text: str, param: str) -> str:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param}: {size} bytes; the limit is {MAX_GRAMMAR_BYTES}: make it smaller", param
        )
    return text


def _digest(value: Any, param: str) -> str:
    """Return a name for `value` that depends on the order of a schema's properties."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: not JSON: {error}", param) from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
