"""The option for early decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saccade.core.options import ServeOptions
from saccade.core.tuning import tuned


@dataclass(frozen=True, slots=True)
class EarlyDecodeOptions:
    """Work on images before a request has arrived."""

    needs_server: ClassVar[bool] = True
    early_decode: bool = tuned(
        False,
        "Decode a new image of a chat as soon as its bytes have arrived, while the rest of the "
        "body is received.",
    )


def is_enabled(options: ServeOptions) -> bool:
    return options.role != "encode" and options.of(EarlyDecodeOptions).early_decode
