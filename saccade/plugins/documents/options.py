"""The option for documents."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.tuning import at_least, tuned


@dataclass(frozen=True, slots=True)
class PdfOptions:
    """The limit for a document."""

    max_pages: int = tuned(
        200, "Maximum pages of a PDF that a request shows. It may choose them from a longer file."
    )

    def __post_init__(self) -> None:
        at_least(1, self, "max_pages")
