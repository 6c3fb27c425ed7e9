"""Functions that create msgspec decoders, in only one thread at a time.

msgspec crashes the process if a thread decodes a class while another thread inspects its fields. It
inspects the fields once, when the first decoder is created for the class or for a type that
contains it.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_LOOKING_UP = Lock()


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: object) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a JSON decoder for `kind`, which can be any type that msgspec supports."""
    with _LOOKING_UP:
        return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: object) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a MessagePack decoder for `kind`, which can be any type that msgspec supports."""
    with _LOOKING_UP:
        return msgspec.msgpack.Decoder(kind)


def convert(value: object, kind: Any, *, strict: bool = True, str_keys: bool = False) -> Any:
    """Convert a value to `kind` as `msgspec.convert` does. Raises msgspec.ValidationError."""
    _look_up(kind)
    return msgspec.convert(value, kind, strict=strict, str_keys=str_keys)


@cache
def _look_up(kind: Any) -> None:
    json_decoder(kind)
