"""Reads documents: PDFs whose pages a model sees as text, as images, or both."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from saccade.plugin import MediaCard, Plugin, Requests

if TYPE_CHECKING:
    from saccade.core.family import FamilySpec
    from saccade.media.media import Readable

PLUGIN = Plugin(
    "documents",
    options="saccade.plugins.documents.options:PdfOptions",
    requests=Requests(
        media=(
            MediaCard(
                "document",
                "saccade.plugins.documents.documents:Documents",
                "saccade.plugins.documents:readable",
                starts=(b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"{\\rtf"),
                marks=(b"%PDF-",),
            ),
        )
    ),
)


@cache
def renderer_version() -> str:
    """Return the version of the PDF library, or "" if it is not installed."""
    try:
        return version("pypdfium2")
    except PackageNotFoundError:
        return ""


def has_renderer() -> bool:
    return bool(renderer_version())


def readable(_: FamilySpec) -> tuple[Readable, ...]:
    """Return the types of files that this installation can read."""
    return ("pdfs",) if has_renderer() else ()
