"""Images and files within a message, as clients write them: OpenAI's parts, LangChain's, and those
in Anthropic's Messages and transformers' chats.

Owns the schemas, and reads them into sources. The fields inside `image_url` and `file` decide the
image. Those that are not read are `unread_fields.py`'s.
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
"""The name of bytes that the client has sent."""
ContentHash = Annotated[str, Meta(pattern="^(sha256[:-])?[0-9a-fA-F]{64}$")]
Corners = Annotated[list[Integer], Meta(min_length=4, max_length=4)]
"""[x0, y0, x1, y1], from the left and from the top of the upright image."""


# ---- schemas


class Pixels(IgnoredFields, kw_only=True):
    """Bounds on the pixels of an image after resizing, and the region that is shown."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    digest: DigestName | None = None


class ImageSizeOptions(MarkedMedia, kw_only=True):
    """The same, beside an image."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None
    detail: Detail | None = None


class ImageURL(Pixels, kw_only=True):
    """An image's address: a URL, its bytes in base64, or the digest of bytes sent before."""

    url: str | None = None
    content_hash: ContentHash | None = None
    """The SHA-256 of the image's bytes, as in SGLang. Without a url it names bytes sent before."""
    # low is at most 512 x 512 = 262144 pixels (`LOW_DETAIL_PIXELS`), unless `max_pixels` says
    # otherwise. auto, high and original are as many as the model takes.
    detail: Detail | None = None
    # the client's claim about the type, which the bytes themselves decide
    format: str | None = None


class UploadedFile(Pixels, kw_only=True):
    """An image uploaded with POST /v1/files, or inline: `file_data` is a data: URL or base64. Of a
    part `file`, also a PDF, with an image for each page, or for one `page`.
    """

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    format: str | None = None
    page: PageNumber | None = None


class InlineSource(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """The bytes of an image, as Anthropic's Messages have them. media_type: the client's claim."""

    data: str
    media_type: str | None = None


class LinkedSource(IgnoredFields, tag_field="type", tag="url", kw_only=True):
    """An image's address, as Anthropic's Messages have it."""

    url: str


class UploadedSource(IgnoredFields, tag_field="type", tag="file", kw_only=True):
    """An uploaded image, as Anthropic's Messages have it."""

    file_id: str


class SourcedPart(ImageSizeOptions, kw_only=True):
    """An image or a file as other libraries name it: LangChain's `url`, `base64`, `data`,
    `file_id`, and `id` with source_type "id"; Anthropic's `source`.
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
    """An image within a message. Its pixels may be bounded in the part or beside its URL.

    uuid: the client's name for the image, which may replace it while the image is cached.
    """

    image_url: str | ImageURL | None = None
    uuid: ImageName | None = None


class InputImagePart(ImageSizeOptions, tag_field="type", tag="input_image", kw_only=True):
    """An image, under the Responses API's name. uuid: as in `ImagePart`."""

    image_url: str | None = None
    file_id: str | None = None
    digest: DigestName | None = None
    uuid: ImageName | None = None


class ImageObjectPart(SourcedPart, tag_field="type", tag="image", kw_only=True):
    """An image by URL, or in Python as an object: bytes, a Pillow image, an array, a path; or as
    other libraries name it.
    """

    image: Any = None
    """A URL of the image, as in image_url."""


class ImageFilePart(ImageSizeOptions, tag_field="type", tag="image_file", kw_only=True):
    """An uploaded image within a message."""

    image_file: UploadedFile
    """The uploaded or inline image."""


class FilePart(SourcedPart, tag_field="type", tag="file", kw_only=True):
    """An uploaded or inline PDF within a message, or an image; or as other libraries name it."""

    file: UploadedFile | None = None
    filename: str | None = None
    page: PageNumber | None = None


AnyImagePart = ImagePart | ImageFilePart | FilePart | ImageObjectPart | InputImagePart


# ---- reading


class Named(NamedTuple):
    """What a part names."""

    url: Address
    inside: ImageURL | UploadedFile | None = None  # the object around the address
    uuid: str = ""
    heading: str = ""  # put before a document


def read_image(part: AnyImagePart, place: str, defaults: PartDefaults) -> ImageSource | SentFile:
    """Read a part in any spelling. Raises InvalidRequest that names the fault below `place`, and
    ImageError for an object other than an image.
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
    """Return the one address that a part names. Raises InvalidRequest for several, and for none,
    which names the part's own field.
    """
    given = _addresses(part)
    if not given:
        raise missing(f"{place}.{name}")
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequest(f"{place}: {first} and {second} exclude each other", place)
    return next(iter(given.values()))


def _check_alone(part: SourcedPart, place: str, name: str) -> None:
    for other in _addresses(part):
        raise InvalidRequest(f"{place}: {name} and {other} exclude each other", place)


def _addresses(part: SourcedPart) -> dict[str, Address]:
    """Return a part's addresses by the names of their fields."""
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
    """Read a part's options for its size, from two places that must agree. Without any, return the
    request's.
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
            f"{place}: detail is given twice, as {one} and as {other}", f"{place}.detail"
        )
    return defaults.budget(other if one == "auto" else one, least, most)


_NO_OPTIONS = UploadedFile()


def _region(
    inside: ImageURL | UploadedFile, beside: ImageSizeOptions, place: str
) -> ImageRegion | None:
    """Read the part of an image to show, from two places that must agree."""
    corners = _either("region", inside.region, beside.region, place)
    return None if corners is None else region_of(corners, place)


def region_of(corners: list[int], place: str) -> ImageRegion:
    """Return the region that `corners` of a part at `place` name."""
    left, top, right, bottom = corners
    return ImageRegion(left, top, right, bottom, f"{place}.region")


def _either(name: str, one: T | None, other: T | None, place: str) -> T | None:
    if one is not None and other is not None and one != other:
        raise InvalidRequest(
            f"{place}: {name} is given twice, as {one} and as {other}", f"{place}.{name}"
        )
    return other if one is None else one
