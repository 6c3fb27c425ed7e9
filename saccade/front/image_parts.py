"""Images and files in a message: the parts of OpenAI's API, LangChain, Anthropic's Messages, and
transformers' chats.

Options may be inside `image_url` and `file`, or next to them in the part. This module has the
schemas, and converts parts to sources. `unread_fields.py` decides about all other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta

from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import MarkedMedia
from saccade.front.fields import Integer, Positive, image_address, image_url, missing
from saccade.front.part_defaults import PageNumber, PartDefaults
from saccade.front.unread_fields import IgnoredFields
from saccade.media.content import Budget, Detail
from saccade.media.sources.source import (
    Address,
    Base64,
    Digest,
    FileId,
    ImageRegion,
    ImageSource,
    KnownImage,
    RegionSource,
    SentFile,
    source_from_object,
)

T = TypeVar("T")

ImageName = Annotated[str, Meta(min_length=1, max_length=256)]
DigestName = Annotated[str, Meta(pattern="^(blake3|sha256)-[0-9a-f]{64}$")]
"""The digest of bytes that the client has sent before."""
ContentHash = Annotated[str, Meta(pattern="^(sha256[:-])?[0-9a-fA-F]{64}$")]
Corners = Annotated[list[Integer], Meta(min_length=4, max_length=4)]
"""[x0, y0, x1, y1] in pixels, from the left and top of the image after EXIF rotation."""


# ---- schemas


class Pixels(IgnoredFields, kw_only=True):
    """Limits on the pixels of an image after resizing, and the region to show."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    digest: DigestName | None = None


class ImageSizeOptions(MarkedMedia, kw_only=True):
    """Options for an image that are next to it in its part, instead of inside its object."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    detail: Detail | None = None


class ImageURL(Pixels, kw_only=True):
    """An image's URL, its bytes in base64, or the digest of stored bytes."""

    url: str | None = None
    content_hash: ContentHash | None = None
    """The SHA-256 of the image's bytes, as in SGLang. Without a url, it refers to bytes that you
    have sent before.
    """
    # low allows 512 x 512 = 262144 pixels (`LOW_DETAIL_PIXELS`), unless `max_pixels` is set.
    # auto, high and original allow the model's maximum.
    detail: Detail | None = None
    # ignored, because the bytes determine the type
    format: str | None = None


class UploadedFile(Pixels, kw_only=True):
    """An image uploaded with POST /v1/files, or inline in `file_data` as a data: URL or base64.

    In a part of type file, it may also be a PDF. A PDF is shown as one image per page, or only its
    `page`.
    """

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    format: str | None = None
    page: PageNumber | None = None


class InlineSource(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """The bytes of an image in base64, in the format of Anthropic's Messages."""

    data: str
    media_type: str | None = None  # ignored, because the bytes determine the type


class LinkedSource(IgnoredFields, tag_field="type", tag="url", kw_only=True):
    """The URL of an image, in the format of Anthropic's Messages."""

    url: str


class UploadedSource(IgnoredFields, tag_field="type", tag="file", kw_only=True):
    """The id of an uploaded image, in the format of Anthropic's Messages."""

    file_id: str


class SourcedPart(ImageSizeOptions, kw_only=True):
    """An image or a file in the format of other libraries.

    These are LangChain's `url`, `base64`, `data`, `file_id`, and `id` with source_type "id", and
    Anthropic's `source`.
    """

    url: str | None = None
    base64: str | None = None
    """The content in base64, under LangChain's name."""
    data: str | None = None
    file_id: str | None = None
    digest: DigestName | None = None
    id: Any = None
    """A file's id, with source_type id. Otherwise it is ignored."""
    source_type: Any = None
    """LangChain's source type: url, base64, text or id. With id, the field id names a file."""
    source: InlineSource | LinkedSource | UploadedSource | None = None


class ImagePart(ImageSizeOptions, tag_field="type", tag="image_url", kw_only=True):
    """A part of a message that contains an image. Options may be in the part or inside
    `image_url`.
    """

    image_url: str | ImageURL | None = None
    # the client's name for the image, which can be sent alone while the image is cached
    uuid: ImageName | None = None


class InputImagePart(ImageSizeOptions, tag_field="type", tag="input_image", kw_only=True):
    """An image part with the type name of the Responses API."""

    image_url: str | None = None
    file_id: str | None = None
    digest: DigestName | None = None
    uuid: ImageName | None = None  # as in `ImagePart`


class ImageObjectPart(SourcedPart, tag_field="type", tag="image", kw_only=True):
    """An image by URL, or in the format of other libraries. In Python, it may also be bytes, a
    Pillow image, an array, or a path.
    """

    image: Any = None
    """A URL of the image, as in image_url."""


class ImageFilePart(ImageSizeOptions, tag_field="type", tag="image_file", kw_only=True):
    """A part of a message that refers to an uploaded image."""

    image_file: UploadedFile
    """The uploaded or inline image."""


class FilePart(SourcedPart, tag_field="type", tag="file", kw_only=True):
    """An uploaded or inline PDF or image in a message, or a file in the format of other
    libraries.
    """

    file: UploadedFile | None = None
    filename: str | None = None
    page: PageNumber | None = None


AnyImagePart = ImagePart | ImageFilePart | FilePart | ImageObjectPart | InputImagePart


# ---- reading


class Named(NamedTuple):
    """The image or file that a part refers to, in whatever format the part has."""

    url: Address
    inside: ImageURL | UploadedFile | None = None  # the object around the address
    uuid: str = ""
    heading: str = ""  # text before a document's pages


def read_image(part: AnyImagePart, place: str, defaults: PartDefaults) -> ImageSource | SentFile:
    """Convert an image or file part of any type to a source.

    Raises InvalidRequest that names the field below `place`, and ImageError for an object that is
    not an image.
    """
    named = _SPELLINGS[type(part)](part, place)
    budget = _budget(named.inside, part, place, defaults)
    within = named.inside or _NO_OPTIONS
    region = _region(within, part, place) if within.region or part.region else None
    inner = within.page if isinstance(within, UploadedFile) else None
    page = _either("page", inner, part.page, place) if isinstance(part, FilePart) else inner
    if isinstance(part, FilePart) or page is not None:
        return SentFile(named.url, place, budget, named.heading, defaults.view, page, region)
    if region is not None:
        return RegionSource(named.url, place, budget, named.uuid, region)
    return ImageSource(named.url, place, budget, named.uuid)


def _image_url(part: ImagePart, place: str) -> Named:
    given, uuid = part.image_url, part.uuid or ""
    if isinstance(given, ImageURL):
        where, digest = f"{place}.image_url", given.digest
        if digest is None and given.url is None and given.content_hash is not None:
            digest = f"sha256-{given.content_hash[-64:].lower()}"
        if digest is not None:
            return Named(
                image_address(digest, None, given.url, where, "file_id", "url"), given, uuid
            )
        if given.url is None:
            raise missing(f"{where}.url")
        return Named(image_url(given.url), given, uuid)
    if given is not None:
        return Named(image_url(given), uuid=uuid)
    if uuid:
        return Named(KnownImage(uuid))
    raise missing(f"{place}.image_url")


def _input_image(part: InputImagePart, place: str) -> Named:
    given = part.digest, part.file_id, part.image_url
    if part.uuid is not None and given == (None, None, None):
        return Named(KnownImage(part.uuid))
    url = image_address(*given, place, "file_id", "image_url")
    return Named(url, uuid=part.uuid or "")


def _image(part: ImageObjectPart, place: str) -> Named:
    if part.image is None:
        return Named(_sourced(part, place, "image"))
    _check_alone(part, place, "image")
    if isinstance(part.image, str):
        return Named(image_url(part.image))
    return Named(source_from_object(part.image, place).url)


def _image_file(part: ImageFilePart, place: str) -> Named:
    return _uploaded(part.image_file, f"{place}.image_file")


def _file(part: FilePart, place: str) -> Named:
    if part.file is None:
        named, name = Named(_sourced(part, place, "file")), part.filename
    else:
        _check_alone(part, place, "file")
        named, name = _uploaded(part.file, f"{place}.file"), part.file.filename or part.filename
    return named._replace(heading=f"{name}\n" if name else "")


def _uploaded(file: UploadedFile, place: str) -> Named:
    given = file.digest, file.file_id, file.file_data
    return Named(image_address(*given, place, "file_id", "file_data"), file)


_SPELLINGS: Mapping[type, Callable[[Any, str], Named]] = {
    ImagePart: _image_url,
    InputImagePart: _input_image,
    ImageObjectPart: _image,
    ImageFilePart: _image_file,
    FilePart: _file,
}


def _sourced(part: SourcedPart, place: str, name: str) -> Address:
    """Return the address of a part's image or file, which may be in one of several fields.

    name: the part's main field, which the error names if the part has no address. Raises
    InvalidRequest if the part has none or several.
    """
    given = _addresses(part)
    if not given:
        raise missing(f"{place}.{name}")
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequest(
            (f"{place}: {first} and {second} are mutually exclusive: send one of them"), place
        )
    return next(iter(given.values()))


def _check_alone(part: SourcedPart, place: str, name: str) -> None:
    for other in _addresses(part):
        raise InvalidRequest(
            (f"{place}: {name} and {other} are mutually exclusive: send one of them"), place
        )


def _addresses(part: SourcedPart) -> dict[str, Address]:
    found: dict[str, Address] = {}
    if part.url is not None:
        found["url"] = image_url(part.url)
    for name, text in (("base64", part.base64), ("data", part.data)):
        if text is not None:
            found[name] = text if text[:5].lower() == "data:" else Base64(text)
    if part.file_id is not None:
        found["file_id"] = FileId(part.file_id)
    if part.digest is not None:
        found["digest"] = Digest(part.digest)
    if part.source_type == "id" and isinstance(part.id, str):
        found["id"] = FileId(part.id)
    match part.source:
        case InlineSource(data=data):
            found["source"] = Base64(data)
        case LinkedSource(url=url):
            found["source"] = image_url(url)
        case UploadedSource(file_id=file_id):
            found["source"] = FileId(file_id)
    return found


def _budget(
    inside: ImageURL | UploadedFile | None,
    beside: ImageSizeOptions,
    place: str,
    defaults: PartDefaults,
) -> Budget:
    """Return the size options of an image, which may be inside its object or next to it in the
    part.

    If the part has none, return the request's. Raises InvalidRequest if the two places differ.
    """
    within = _NO_OPTIONS if inside is None else inside
    sizes = within.min_pixels, beside.min_pixels, within.max_pixels, beside.max_pixels
    if not any((*sizes, within.detail, beside.detail)):
        return defaults.image
    least = _either("min_pixels", within.min_pixels, beside.min_pixels, place)
    most = _either("max_pixels", within.max_pixels, beside.max_pixels, place)
    one, other = within.detail or "auto", beside.detail or "auto"
    if "auto" not in (one, other) and one != other:
        raise InvalidRequest(
            f"{place}: detail is set twice, to {one} and as {other}", f"{place}.detail"
        )
    return defaults.budget(other if one == "auto" else one, least, most)


_NO_OPTIONS = UploadedFile()


def _region(
    inside: ImageURL | UploadedFile, beside: ImageSizeOptions, place: str
) -> ImageRegion | None:
    """Return the region of the image to show, or None for the whole image.

    Raises InvalidRequest if the two places for this option differ.
    """
    corners = _either("region", inside.region, beside.region, place)
    return None if corners is None else region_of(corners, place)


def region_of(corners: list[int], place: str) -> ImageRegion:
    """Convert the option `region` of the part at `place`."""
    left, top, right, bottom = corners
    return ImageRegion(left, top, right, bottom, f"{place}.region")


def _either(name: str, one: T | None, other: T | None, place: str) -> T | None:
    if one is not None and other is not None and one != other:
        raise InvalidRequest(
            f"{place}: {name} is set twice, to {one} and as {other}", f"{place}.{name}"
        )
    return other if one is None else one
