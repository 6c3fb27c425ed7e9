"""Error messages for media that cannot be read: fixed sentences with placeholders for numbers.

Hostile bytes may take control of an image worker. So a worker sends only the name of a sentence and
its numbers, and the front end formats the message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from string import Formatter

from saccade.core.errors import ImageError
from saccade.core.extras import ask_operator

READS_HEIC = find_spec("pillow_heif") is not None
"""True if the extra `heic` is installed. Only image workers import the decoder."""
READABLE = (
    "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000, " + "HEIC, " * READS_HEIC + "ICO or PPM"
)
OTHER_KINDS = (
    *("WebM or Matroska", "Flash", "Ogg", "MPEG", "Windows Media", "MP4 or QuickTime"),
    *("QuickTime", "AVI", "MPEG transport stream"),
)
"""Video formats that are recognized by their first bytes, to name them in an error."""
IMAGE_KINDS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF", "JPEG2000", "ICO", "PPM"),
)
MOST = 1e15
"""The maximum absolute value of a number in a reason."""


@dataclass(frozen=True, slots=True)
class _Sentence:
    """An error message. `text` has a placeholder `{}` for each number."""

    text: str
    code: str = ""

    @property
    def places(self) -> int:
        return sum(field is not None for _, field, _, _ in Formatter().parse(self.text))


_NO_IMAGE = {
    f"no image: {kind}": _Sentence(f"the image is {kind}; images must be {READABLE}")
    for kind in (
        *(f"{video} video bytes" for video in OTHER_KINDS),
        *("an SVG drawing", "an HTML page", "a PDF document", "text", "in an unknown format"),
        "gzip-compressed",
        "a HEIF image of another codec than HEVC",
    )
}
_BAD_HEADER = {
    f"bad header: {kind}": _Sentence(
        f"the image starts like {'an' if kind[0] in 'AI' else 'a'} {kind} but its header cannot be "
        "read: it is damaged or cut short"
    )
    for kind in IMAGE_KINDS
}
_IMAGE = {
    "empty": _Sentence("the image is empty (0 bytes)"),
    "no heic": _Sentence(
        "the image is a HEIC image, which this server cannot read: send it as JPEG, "
        f"or {ask_operator('heic')}"
    ),
    "cut array": _Sentence("the image array is cut short"),
    "no pixels": _Sentence("the image is {} x {} px: it has no pixels"),
    "too many pixels": _Sentence(
        "the image is {} x {} px ({:.0f} Mpx); the limit is {:.0f} Mpx: resize it, or start the "
        "server with a larger --max-image-pixels",
        "image_too_large",
    ),
    "header memory": _Sentence("reading the image's header takes too much memory"),
    "header time": _Sentence("reading the image's header takes too long"),
    "header crash": _Sentence("the image's header crashes its reader"),
}
_VIDEO = {
    "no frames": _Sentence("the video has no frames"),
    "frame rate": _Sentence("the video's header gives a frame rate of {:g}: save it again"),
    "no video here": _Sentence(
        "the video is in another format than mp4, mov, mkv, webm, avi or ts, or it is damaged"
    ),
    "damaged video": _Sentence("the video is damaged or cut short"),
    "streams": _Sentence("the video has {} streams; the limit is {}"),
    "no video stream": _Sentence("the file contains no video stream"),
    "codec": _Sentence(
        "the video's codec is not supported: use h264, hevc, vp8, vp9, av1, mjpeg or mpeg4"
    ),
    "frame size": _Sentence(
        "the video's frames are {} x {} px; the limit is {} on a side and {:.0f} Mpx",
        "image_too_large",
    ),
    "length": _Sentence("the video's header gives a length of {:g} s; the limit is {:g} hours"),
    "packets": _Sentence("the video has more than {} packets: send a shorter one"),
}
_PIXELS = {
    "no threads": _Sentence(
        "it is a HEIC image, and this kernel cannot limit the threads of its decoder: send it as "
        "JPEG"
    ),
    "another size": _Sentence("its header says {} x {} px, but its content is {} x {} px"),
    "damaged": _Sentence("it is damaged or cut short"),
    "truncated": _Sentence("its file is truncated"),
    "scans": _Sentence("it has more than {} scans: save it again"),
    "memory": _Sentence("decoding it needs too much memory for its size"),
    "late load": _Sentence(
        "its decoder needs a library that the sandbox does not allow: send it as PNG or JPEG"
    ),
    "processor": _Sentence("the model's own image processor rejects it"),
    "frame beyond": _Sentence("frame {} was requested, but it has {}"),
    "frame missing": _Sentence("its frame {} is missing or damaged"),
    "frames change size": _Sentence("its frames change size in mid-stream, to {} x {}"),
    "crash": _Sentence("its decoder crashed"),
}
_DOCUMENT = {
    "encrypted": _Sentence(
        "the PDF is encrypted, and passwords are not supported: send it without one",
        "encrypted_document",
    ),
    "damaged document": _Sentence(
        "the PDF is damaged or cut short: save it again", "invalid_document"
    ),
    "no pages": _Sentence("the PDF has no pages", "invalid_document"),
    "pages": _Sentence(
        "the PDF has {} pages; the limit is {}: send fewer, or start the server with a larger "
        "--tune max_pages=PAGES",
        "too_many_pages",
    ),
    "page size": _Sentence(
        "page {} of the PDF is {:g} x {:g} points: save it again on a common paper size",
        "invalid_document",
    ),
    "page": _Sentence("page {} of the PDF cannot be read: save it again", "invalid_document"),
    "characters": _Sentence(
        'page {} of the PDF has {} characters; the limit is {}: use documents "images"',
        "too_much_text",
    ),
    "page memory": _Sentence(
        "reading a page of the PDF takes too much memory", "document_too_large"
    ),
}
_SENTENCES = _NO_IMAGE | _BAD_HEADER | _IMAGE | _VIDEO | _PIXELS | _DOCUMENT


@dataclass(frozen=True, slots=True)
class Reason:
    """Why bytes were rejected: an error message's name, and the numbers for its placeholders."""

    name: str
    numbers: tuple[int | float, ...] = ()

    @property
    def valid(self) -> bool:
        """True if the sentence exists and has a placeholder for each number."""
        sentence = _SENTENCES.get(self.name)
        return (
            sentence is not None
            and len(self.numbers) == sentence.places
            and all(math.isfinite(number) and abs(number) <= MOST for number in self.numbers)
        )

    @property
    def text(self) -> str:
        return _SENTENCES[self.name].text.format(*self.numbers)

    @property
    def code(self) -> str | None:
        """The error code, or None if the sentence has none."""
        return _SENTENCES[self.name].code or None


def _reason(name: str, numbers: tuple[int | float, ...]) -> Reason:
    bounded = (0 if math.isnan(number) else max(-MOST, min(MOST, number)) for number in numbers)
    return Reason(name, tuple(bounded))


class Unreadable(ImageError):
    """Raised if a header, a file's metadata or a page cannot be read."""

    def __init__(self, name: str, *numbers: int | float) -> None:
        self.reason = _reason(name, numbers)
        super().__init__(self.reason.text, code=self.reason.code)


class Undecodable(ValueError):
    """Raised if an image's pixels cannot be decoded."""

    def __init__(self, name: str, *numbers: int | float) -> None:
        self.reason = _reason(name, numbers)
        super().__init__(self.reason.text)
