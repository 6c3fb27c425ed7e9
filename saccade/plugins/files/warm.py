"""Reads the fields of an upload that describe its first question, so that the image and the prompt
before it can be cached in advance.

Forms have no objects, so clients send JSON in one field. Alternatively, they send one field per
leaf, as SDKs do for nested objects, with lists as columns:

    warm={"max_pixels": 65536}    warm[max_pixels]=65536    warm[prefix][][role]=system
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.datastructures import FormData

from saccade.core.errors import InvalidRequest
from saccade.front.content import check_lengths, message_from_json
from saccade.front.conversation import Chat, Message
from saccade.front.fields import Positive, Reader
from saccade.front.part_defaults import PartDefaults
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.content import Detail, looks_like_video

LONGEST = 1 << 19
"""Maximum bytes of all these fields together. Images in a prefix must be uploaded files."""
_NAME = re.compile(r"(?:saccade\[)?warm\b")
_PREFIX = re.compile(r"^(?:saccade\[warm\]|warm)")
_STEP = re.compile(r"\[([A-Za-z_]*)\]")
_DEEPEST = 3


class Warm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Encodes the upload, and caches its prompt, in advance. min_pixels, max_pixels, detail,
    cache_salt: must be the same as in the question, or nothing is reused. prefix: the messages
    before the one that starts with the upload.
    """

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    detail: Detail | None = None
    prefix: list[msgspec.Raw] | None = None
    cache_salt: str | None = None

    def messages(self, context_length: int, place: str) -> tuple[Message, ...]:
        """Parse the messages before the upload. Raises InvalidRequest with the location of an
        error.
        """
        given = self.prefix or []
        check_lengths(given, context_length, f"{place}.prefix")
        return tuple(
            message_from_json(raw, f"{place}.prefix[{i}]", PartDefaults())
            for i, raw in enumerate(given)
        )

    def question(self, before: Sequence[Message], id: str, data: bytes) -> GenerationRequest:
        """Return a request with the start of a question about an upload.

        before: the messages before the upload.
        data: the bytes of the upload.
        """
        part: dict[str, Any] = {"type": "file", "file": {"file_id": id}}
        if looks_like_video(data):
            part = {"type": "input_video", "file_id": id}
        elif self.detail is not None:
            part["file"]["detail"] = self.detail
        part |= {
            name: value
            for name in ("min_pixels", "max_pixels")
            if (value := getattr(self, name)) is not None
        }
        last = msgspec.Raw(msgspec.json.encode({"role": "user", "content": [part]}))
        shown = message_from_json(last, "file", PartDefaults())
        return GenerationRequest(
            Chat((*before, shown), add_generation_prompt=False),
            {"max_tokens": 1},
            cache_salt=self.cache_salt or "",
            silent=True,
        )


class _Extension(Struct, forbid_unknown_fields=True):
    """The field `saccade` of an upload."""

    warm: Warm


_WARM: Reader[Warm] = Reader(Warm)
_EXTENSION: Reader[_Extension] = Reader(_Extension)


def warm_fields(form: FormData) -> set[str]:
    """Return the names of the form's fields for warm-up."""
    return {name for name in form if name == "saccade" or _NAME.match(name)}


def read_warm(form: FormData) -> tuple[Warm, str] | None:
    """Read the warm-up fields of a form. Returns them, and the name of the field that contains
    them.

    Returns None if there are none. Raises InvalidRequest with the location of an error.
    """
    names = warm_fields(form)
    if not names:
        return None
    values = [(name, value) for name, value in form.multi_items() if name in names]
    if any(not isinstance(value, str) for _, value in values):
        raise InvalidRequest("warm: expected JSON, not a file", "warm")
    size = sum(len(str(value).encode()) for _, value in values)
    if size > LONGEST:
        raise InvalidRequest(
            f"warm has {size} bytes; the limit is {LONGEST}: send a shorter prefix, and its images "
            "as uploaded files",
            "warm",
        )
    roots = {name.partition("[")[0] for name in names}
    if len(roots) > 1 or (names & {"warm", "saccade"} and len(names) > 1):
        raise InvalidRequest("warm is set twice: send it once", "warm")
    if "warm" in names:
        return _WARM.json(str(form["warm"]).encode(), "warm"), "warm"
    if "saccade" in names:
        return _EXTENSION.json(str(form["saccade"]).encode(), "saccade").warm, "saccade.warm"
    root = "warm" if roots == {"warm"} else "saccade.warm"
    leaves = [(_PREFIX.sub("", name), str(value)) for name, value in values]
    return _WARM.json(msgspec.json.encode(_nested(leaves, root)), root), root


def _nested(leaves: Sequence[tuple[str, str]], root: str) -> dict[str, Any]:
    """Build an object from the form fields of its leaves. Only a prefix has leaves that are nested
    more than one level deep.
    """
    found: dict[str, Any] = {}
    columns: dict[str, list[str]] = {}
    for name, value in leaves:
        steps = _STEP.findall(name)
        if "".join(f"[{step}]" for step in steps) != name or not 1 <= len(steps) <= _DEEPEST:
            raise _as_json(root)
        if steps == ["prefix"]:
            try:
                found["prefix"] = msgspec.json.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise _as_json(root) from None
        elif len(steps) == 1:
            found[steps[0]] = int(value) if value.isdecimal() and len(value) < 19 else value
        elif steps[:2] == ["prefix", ""] and len(steps) == _DEEPEST and steps[2]:
            columns.setdefault(steps[2], []).append(value)
        else:
            raise _as_json(root)
    if columns:
        if len({len(column) for column in columns.values()}) > 1 or "prefix" in found:
            raise _as_json(root)
        found["prefix"] = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return found


def _as_json(root: str) -> InvalidRequest:
    return InvalidRequest(
        f"{root}: in a form, it is ambiguous which message each field of prefix belongs to: send "
        f"{root} (or "
        f"{root}[prefix]) as a text of JSON",
        root,
    )
