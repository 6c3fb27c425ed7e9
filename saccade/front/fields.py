"""Converts JSON or Python values to typed fields, for HTTP bodies and for `LLM`.

This module has the rules for all fields: null means that a field is not set, 8.0 is accepted for 8,
integers have 64 bits, and images and videos are addressed by URL, uploaded file or base64. Errors
have msgspec's messages, preceded by the path of the field. `param` is this path. `unread_fields.py`
decides about fields that no class declares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, inspect

from saccade.core.decoders import convert, json_decoder
from saccade.core.errors import InvalidRequest
from saccade.front.unread_fields import INSTEAD, changes_nothing
from saccade.media.sources.source import Digest, FileId

V = TypeVar("V")

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
FrameCount = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # -1: all

_MAX_DROPPED = 32
"""Maximum number of unknown fields in one value that are ignored because they have no effect."""
_NOT_EMPTY = re.compile(
    r"Expected `(?:array|str|object)` of length <= 0|Expected `str \| object \| array \| null`"
)

_VERBATIM = frozenset({"arguments", "input", "input_schema", "schema"})
"""Fields with objects that the client defines. Null in them is kept because it has a meaning."""

_CHOICE = re.compile(r"Invalid enum value|Invalid value '|Expected `null`,")
_AUDIO = "audio is not supported: this model reads images and text"
UNSEEN = {
    **dict.fromkeys(("input_audio", "audio_url", "audio"), _AUDIO),
}
"""Types of content parts that only other models support, with what to send instead."""
_TAG = re.compile(r"Invalid value '(\w+)'")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*?)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[]+|\[\.\.\.\])")
_QUOTED = re.compile(r"Expected `(?:int|float|bool)\b.*, got `str`")
_SEARCHED, _MAX_ESCAPES = 4 << 20, 1 << 16
"""How many bytes of a JSON text, and how many escapes in it, are searched for an unpaired
surrogate.
"""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Matches one escape, or a pair of surrogates. The group matches an unpaired surrogate. The pattern
starts with a literal character, which makes the search fast.
"""


class Reader(Generic[V]):
    """Converts values to one type. The decoder and schema are built at first use, because a server
    has 390 readers.
    """

    def __init__(self, kind: Any) -> None:
        """Create a reader for `kind`, which can be any type that msgspec supports."""
        self._kind = kind

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[V]:
        return json_decoder(self._kind)

    @cached_property
    def _schema(self) -> inspect.Type:
        return inspect.type_info(self._kind)

    def json(self, raw: bytes | bytearray | msgspec.Raw, path: str) -> V:
        """Decode JSON. Raises InvalidRequest that names the field below `path`."""
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            first = str(error)  # the error itself would keep `raw` alive in a circle
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error, raw, path) from None
        try:
            value = msgspec.json.decode(raw)
        except msgspec.ValidationError:  # an integer of thousands of digits
            raise explain(first, self._schema, path) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error, raw, path) from None
        return self.value(value, path)

    def value(self, value: object, path: str) -> V:
        """Convert a Python value. Raises InvalidRequest that names the field below `path`."""
        try:
            return self._convert(_normalize(value), path)
        except RecursionError as error:
            raise not_json(error, b"", path) from None

    def _convert(self, value: Any, path: str) -> V:
        for _ in range(_MAX_DROPPED):
            try:
                converted: V = convert(value, self._kind, str_keys=True)
            except msgspec.ValidationError as error:
                message = str(error)
                if not _drop_unread(value, message):
                    break
            else:
                return converted
        raise explain(message, self._schema, path)


def _normalize(value: Any) -> Any:
    """Return `value` without keys whose value is null, and with integers instead of integral
    floats.
    """
    if isinstance(value, dict):
        return {
            key: each if key in _VERBATIM else _normalize(each)
            for key, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        return [_normalize(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _drop_unread(value: Any, message: str) -> bool:
    """Delete the unknown field that msgspec's message names, if it has no effect. Returns True if
    it was deleted.
    """
    text, place = _split_path(message)
    field = _UNKNOWN.match(text)
    if field is None:
        return False
    try:
        for index, name in _STEP.findall(place):
            value = value[int(index) if index else name]
        if unread := changes_nothing(field.group(1), value[field.group(1)]):
            del value[field.group(1)]
    except (KeyError, TypeError):  # in an object of any names, which msgspec writes as [...]
        return False
    return unread


def not_json(
    error: Exception, raw: bytes | bytearray | msgspec.Raw, path: str = ""
) -> InvalidRequest:
    """Return the error for text that is not valid JSON.

    error: the decoder's exception.
    path: the path of the text in the body; "" if it is the body.
    """
    at = path or "the body"
    if isinstance(error, RecursionError):
        why = f"{at} is nested too deeply"
    elif half := _unpaired_surrogate(raw):
        why = f"{at}: {half} is one half of a surrogate pair: send both halves"
    else:
        why = f"{at} is not valid JSON: {error}"
    return InvalidRequest(why, path or None, "invalid_json")


def _unpaired_surrogate(raw: bytes | bytearray | msgspec.Raw) -> str:
    """Return the first surrogate escape in JSON text that is not part of a pair, or ""."""
    for escape in islice(_ESCAPE.finditer(memoryview(raw)[:_SEARCHED]), _MAX_ESCAPES):
        if escape[1] is not None:
            return f"\\u{escape[1].decode()}"
    return ""


def _split_path(message: str) -> tuple[str, str]:
    """Split a message of msgspec into the text, and the path at its end.

    The text may quote the client's input, so the message is split from the end.
    """
    text, _, place = message.rpartition(" - at ")
    place = place.removeprefix("key in ")
    if place.startswith("`$") and place.endswith("`"):
        return text, place[2:-1]
    return message, ""


def explain(message: str, schema: inspect.Type, path: str) -> InvalidRequest:
    """Convert a message of msgspec to an error whose text starts with the field's path, which is
    also its `param`.

    schema: the type of the decoded value. If it allows only certain values, the error lists them.
    path: the path of the decoded value.

    A field with a single allowed value is reported as unsupported, because it belongs to a feature
    that this server does not have.
    """
    text, place = _split_path(message)
    below = place.replace("[...]", "")
    path = f"{path}{below}" if path else below.lstrip(".")
    field = _FIELD.match(text)
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        if "unknown" in text:
            return unknown(path, INSTEAD.get(field.group(1), ""))
        return InvalidRequest(
            f"{path}: this parameter is required", path, "missing_required_parameter"
        )
    instead = INSTEAD.get(path.rpartition(".")[2], "")
    if _NOT_EMPTY.match(text):
        if instead:
            return unsupported(path, instead)
        return InvalidRequest(
            f"{path}: this parameter is not supported, and would change what the model sees: send "
            "images as parts of the content, and limit their size by min_pixels and max_pixels",
            path,
            "unsupported_parameter",
        )
    tag = _TAG.match(text)
    if tag and (unseen := UNSEEN.get(tag.group(1))) and path.endswith(".type"):
        where = path.removesuffix(".type")
        return InvalidRequest(f"{where}: {unseen}", path, "unsupported_parameter")
    if _CHOICE.match(text):
        choices = _choices(schema, re.findall(r"\w+(?![\]\w])", below)) or [None]
        return only(path, choices, instead)
    hint = ": write it without quotes" if _QUOTED.match(text) else ""
    text = (text[:1].lower() + text[1:]).replace("`", "").replace(" | null", "") + hint
    return InvalidRequest(f"{path}: {text}" if path else f"the body: {text}", path or None)


def unsupported(
    path: str, instead: str = "", code: str = "unsupported_parameter"
) -> InvalidRequest:
    """Return the error for a field that is not supported.

    instead: advice to append to the message.
    """
    path = path if len(path) <= 200 else path[:200] + "..."
    advice = f": {instead}" if instead else ""
    return InvalidRequest(f"{path}: this parameter is not supported{advice}", path, code)


def unknown(path: str, instead: str = "") -> InvalidRequest:
    """Return the error for an unknown field."""
    return unsupported(path, instead, "unknown_parameter")


def only(path: str, choices: list[Any], instead: str = "") -> InvalidRequest:
    """Return the error for a value that is not one of `choices`.

    instead: advice to append to the message.
    """
    *most, last = (msgspec.json.encode(choice).decode() for choice in choices)
    allowed = f"{', '.join(most)} or {last}" if most else last
    code = None if most else "unsupported_parameter"
    advice = f": {instead}" if instead else ""
    return InvalidRequest(f"{path}: only {allowed} is supported{advice}", path, code)


def too_long(param: str, has: str, context_length: int, chat: bool = False) -> InvalidRequest:
    """Return the error for a prompt that leaves no tokens for an answer.

    has: the prompt's length as a phrase, such as "900 tokens".
    chat: also suggest smaller images.

    Clients recognize the error by its first words. Some search the Python `repr` of the whole
    error, so the message must not contain double quotes: `repr` would then escape the apostrophe.
    """
    advice = (
        "shorten it, send fewer images, or smaller ones (detail: low, or max_pixels)"
        if chat
        else "shorten it"
    )
    return InvalidRequest(
        f"This model's maximum context length is {context_length} tokens. The prompt has {has}; "
        f"the context length of {context_length} allows {context_length - 1} and an answer: "
        f"{advice}",
        param,
        "context_length_exceeded",
    )


def _choices(kind: inspect.Type, names: list[str]) -> list[object]:
    """Return the values that a schema allows for the field at the path `names`, without null.

    The list is empty if the field's type does not enumerate its values.
    """
    match kind:
        case inspect.UnionType(types):
            return [*dict.fromkeys(choice for each in types for choice in _choices(each, names))]
        case inspect.ListType(item):
            return _choices(item, names)
        case inspect.StructType() if names:
            if kind.tag_field == names[0]:
                return [kind.tag]
            return [
                choice
                for field in kind.fields
                if field.encode_name == names[0]
                for choice in _choices(field.type, names[1:])
            ]
        case inspect.LiteralType(values) if not names:
            return list(values)
    return []


_BASE64 = re.compile(r"[A-Za-z0-9+/_-][A-Za-z0-9+/_=\s-]{31,511}")
_BASE64_SEEN = 512
"""How many characters at the start of a URL are inspected to distinguish it from bare base64."""


def address(file_id: str | None, url: str | None, place: str, *names: str) -> str | FileId:
    """Return the address of an image or file from one of two fields. names: the names of the two
    fields.

    Raises InvalidRequest unless exactly one of them is set.
    """
    if file_id is not None and url is not None:
        raise InvalidRequest(
            (f"{place}: {names[0]} and {names[1]} are mutually exclusive: send one of them"), place
        )
    if file_id is not None:
        return FileId(file_id)
    if url is not None:
        return image_url(url)
    raise missing(f"{place}.{names[0]}", names[1:])


def image_address(
    digest: str | None, file_id: str | None, url: str | None, place: str, *names: str
) -> str | FileId | Digest:
    """Return the address of an image, which may also be the digest of stored bytes.

    names: the names of the fields `file_id` and `url`. Raises InvalidRequest unless exactly one of
    the three is set.
    """
    if digest is None:
        return address(file_id, url, place, *names)
    for name, given in zip(names, (file_id, url), strict=True):
        if given is not None:
            raise InvalidRequest(
                (f"{place}: digest and {name} are mutually exclusive: send one of them"), place
            )
    return Digest(digest)


def image_url(given: str) -> str:
    """Return the URL without surrounding white space. Base64 without a prefix becomes a data:
    URL.
    """
    given = given.strip()
    bare = _BASE64.fullmatch(given[:_BASE64_SEEN]) is not None
    return f"data:;base64,{given}" if bare else given


def missing(path: str, others: Sequence[str] = ()) -> InvalidRequest:
    """Return the error for a required field that is missing. others: fields that can be set
    instead.
    """
    words = " or ".join(["this parameter", *others])
    return InvalidRequest(f"{path}: {words} is required", path, "missing_required_parameter")
