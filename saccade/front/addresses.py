"""Addresses of images and videos as clients write them: by URL, uploaded file, or base64.

Knows nothing of fetching.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saccade.core.errors import InvalidRequest
from saccade.media.sources.source import Digest, FileId

_BASE64 = re.compile(r"[A-Za-z0-9+/_-][A-Za-z0-9+/_=\s-]{31,511}")
_BASE64_SEEN = 512
"""Characters from the start of a URL that are looked at to tell bare base64 from a URL."""


def address(file_id: str | None, url: str | None, place: str, *names: str) -> str | FileId:
    """Return the one address that two fields give, called `names` below `place`. Raises
    InvalidRequest unless exactly one is given.
    """
    if file_id is not None and url is not None:
        raise InvalidRequest(f"{place}: {names[0]} and {names[1]} exclude each other", place)
    if file_id is not None:
        return FileId(file_id)
    if url is not None:
        return image_url(url)
    raise missing(f"{place}.{names[0]}", names[1:])


def image_address(
    digest: str | None, file_id: str | None, url: str | None, place: str, *names: str
) -> str | FileId | Digest:
    """Return the one address of an image that may be held. Raises as `address`."""
    if digest is None:
        return address(file_id, url, place, *names)
    for name, given in zip(names, (file_id, url), strict=True):
        if given is not None:
            raise InvalidRequest(f"{place}: digest and {name} exclude each other", place)
    return Digest(digest)


def image_url(given: str) -> str:
    """Return a URL without the spaces around it. Bare base64 becomes a data: URL."""
    given = given.strip()
    bare = _BASE64.fullmatch(given[:_BASE64_SEEN]) is not None
    return f"data:;base64,{given}" if bare else given


def missing(path: str, others: Sequence[str] = ()) -> InvalidRequest:
    """Return the refusal for an absent required field, in place of which `others` would do."""
    words = " or ".join(["this parameter", *others])
    return InvalidRequest(f"{path}: {words} is required", path, "missing_required_parameter")
