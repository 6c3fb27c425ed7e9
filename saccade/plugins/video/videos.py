"""Reads videos: files, or frames that are sent as images. Pairs of frames become images."""

from __future__ import annotations

from saccade.core.video import FrameBudget
from saccade.media.kind import KindContext
from saccade.media.opened import CachedFrame, OpenedImage, OpenedVideo, ReadTimes, jobs_of
from saccade.media.sources.source import VideoSource, comes_along
from saccade.media.sources.source_reader import Reads, SourceRead
from saccade.media.workers.decode_queue import Job
from saccade.plugins.video.frames import (
    assemble,
    check_decoder,
    check_frames,
    frame_name,
    rules_of,
    times_of_file,
    times_of_frames,
)


class Videos:
    """Reads all videos of a server. Implements `MediaKind`.

    The metadata of a video are those of the file, or of each frame.
    """

    def __init__(self, context: KindContext) -> None:
        self._spec = context.spec
        self._limits = context.limits

    def check(self, source: VideoSource) -> None:
        rules = rules_of(self._spec, source.param)
        if isinstance(source.url, tuple):
            times_of_frames(source, rules)
        else:
            check_decoder(source.param)

    def begin_reads(self, source: VideoSource, reads: Reads) -> None:
        if not isinstance(source.url, tuple):
            reads.read_source(source.url, video=True)
            return
        for url in source.url:
            if not comes_along(url):  # frames within the request need no task
                reads.read_source(url)

    async def metadata(self, source: VideoSource, reads: Reads) -> list[SourceRead]:
        rules_of(self._spec, source.param)
        if isinstance(source.url, tuple):
            return await reads.frames(source.url)
        return [await reads.read_source(source.url, video=True)]

    async def units(
        self, source: VideoSource, metadata: list[SourceRead], reads: Reads
    ) -> OpenedVideo:
        rules, probes = rules_of(self._spec, source.param), [each.probe for each in metadata]
        is_file = not isinstance(source.url, tuple)
        if is_file:
            times = times_of_file(source, probes[0], rules)
        else:
            times = times_of_frames(source, rules)
            check_frames(probes, source.param)
        budget = FrameBudget(source.count or len(times.indices), source.options)
        recipe = rules.recipe(budget.count, *probes[0].upright, budget.wishes)
        height, width = recipe.canvas
        largest = max(metadata, key=lambda each: len(each.encoded.data))
        canvas, nbytes = (rules.frames * height, width), len(largest.encoded.data)
        self._limits.check(canvas, largest.probe, nbytes, recipe)
        if is_file:
            file, turned = metadata[0].encoded, probes[0].orientation
            frames = [
                CachedFrame(frame_name(file.digest, index, turned), file, probes[0], recipe, index)
                for index in times.indices
            ]
        else:
            frames = [
                CachedFrame(each.encoded.digest, each.encoded, each.probe, recipe)
                for each in metadata
            ]
        spent = ReadTimes.together([each.times for each in metadata])
        asked = None if is_file else budget
        return assemble(frames, times, self._spec, rules, reads.salt, reads.requester, spent, asked)

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        return jobs_of(image) if image.there else None

    def forget(self) -> None:
        """Do nothing, since no pixels are cached."""

    async def close(self) -> None:
        """Do nothing, since there are no open files."""
