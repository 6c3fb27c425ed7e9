"""Keys in messages and parts that would change what the model sees, and that this server leaves
unread.

Owns the words: carriers of images, videos, sounds and files, and sizes. Messages and parts in every
dialect have them as fields that must be empty (null, "", [] or {}). A part that reads one declares
it anew. All other unknown keys are ignored, for servers' and SDKs' answers carry many when sent
back. Knows nothing of what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from saccade.front.fields import Nothing

if TYPE_CHECKING:
    Unread = Any
    """Fields may be declared anew with a type of their own."""
    Uncut = Any
else:
    Unread = Nothing
    Uncut = str | float | bool | dict[str, Any] | Annotated[list[Any], Meta(max_length=0)] | None
    """Corners are refused where nothing is cut. Anything else may be a note of the client's."""


class SpokenAnswer(Struct):
    """The sound of an earlier answer, by its id, as OpenAI's SDK sends it back: accepted, and left
    out.
    """

    id: str


class RefusedWords(Struct, kw_only=True):
    """A message or a part."""

    # ---- carriers: images
    image: Unread = None
    images: Unread = None
    image_url: Unread = None
    image_urls: Unread = None
    image_data: Unread = None
    image_base64: Unread = None
    image_file: Unread = None
    image_files: Unread = None
    image_path: Unread = None
    image_paths: Unread = None
    image_embeds: Unread = None
    input_image: Unread = None
    input_images: Unread = None
    pixel_values: Unread = None
    picture: Unread = None
    pictures: Unread = None
    # ---- carriers: videos and sounds
    video: Unread = None
    videos: Unread = None
    video_url: Unread = None
    video_urls: Unread = None
    video_data: Unread = None
    input_video: Unread = None
    frames: Unread = None
    audio: (
        SpokenAnswer
        | Annotated[list[Any], Meta(max_length=0)]
        | Annotated[str, Meta(max_length=0)]
        | None
    ) = None
    audios: Unread = None
    audio_url: Unread = None
    audio_urls: Unread = None
    audio_data: Unread = None
    input_audio: Unread = None
    # ---- carriers: files and anything
    file: Unread = None
    files: Unread = None
    file_id: Unread = None
    file_ids: Unread = None
    file_data: Unread = None
    file_url: Unread = None
    file_urls: Unread = None
    fileData: Unread = None  # noqa: N815 - Gemini's name
    document: Unread = None
    documents: Unread = None
    attachment: Unread = None
    attachments: Unread = None
    experimental_attachments: Unread = None
    media: Unread = None
    media_url: Unread = None
    media_urls: Unread = None
    multi_modal_data: Unread = None
    multimodal_data: Unread = None
    mm_data: Unread = None
    inline_data: Unread = None
    inlineData: Unread = None  # noqa: N815 - Gemini's name
    parts: Unread = None
    base64: Unread = None
    b64_json: Unread = None
    # ---- sizes of images
    min_pixels: Unread = None
    max_pixels: Unread = None
    image_min_pixels: Unread = None
    image_max_pixels: Unread = None
    resized_height: Unread = None
    resized_width: Unread = None
    height: Unread = None
    width: Unread = None
    size: Unread = None
    image_size: Unread = None
    min_size: Unread = None
    max_size: Unread = None
    shortest_edge: Unread = None
    longest_edge: Unread = None
    detail: Unread = None
    resolution: Unread = None
    media_resolution: Unread = None
    max_tokens_per_image: Unread = None
    min_dynamic_patch: Unread = None
    max_dynamic_patch: Unread = None
    max_slice_nums: Unread = None
    num_crops: Unread = None
    do_resize: Unread = None
    crop: Unread = None
    region: Uncut = None
    # ---- sizes of videos
    total_pixels: Unread = None
    video_min_pixels: Unread = None
    video_max_pixels: Unread = None
    video_total_pixels: Unread = None
    fps: Unread = None
    sample_fps: Unread = None
    nframes: Unread = None
    num_frames: Unread = None
    min_frames: Unread = None
    max_frames: Unread = None
    frames_indices: Unread = None
    source_fps: Unread = None
    video_start: Unread = None
    video_end: Unread = None
