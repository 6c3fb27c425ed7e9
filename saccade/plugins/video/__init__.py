"""Videos, which are sent as files or as lists of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import MediaCard, Plugin, Requests

if TYPE_CHECKING:
    from saccade.core.family import FamilySpec
    from saccade.media.media import Readable

PLUGIN = Plugin(
    "video",
    requests=Requests(
        media=(
            MediaCard(
                "video", "saccade.plugins.video.videos:Videos", "saccade.plugins.video:readable"
            ),
        )
    ),
)


def readable(spec: FamilySpec) -> tuple[Readable, ...]:
    """Return the formats of videos that this model and installation can read. frames: videos as
    lists of images.
    """
    from saccade.media.content import video_reader

    if spec.video is None:
        return ()
    return ("frames", "videos") if video_reader() else ("frames",)
