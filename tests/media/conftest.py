"""What the tests of the picture path share: a family's CPU facts, and a media path of its own for
each test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path as Folder

import pytest

from saccade.core.arena import Arena
from saccade.core.family import FamilySpec, PixelBounds, TileLayout
from saccade.core.metrics import Metrics
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Grid
from saccade.families.kit.native_images import ImageRules
from saccade.families.qwen_vl.video import QwenVideo
from saccade.media.media import Media
from saccade.media.workers.fork_server import ForkServers
from saccade.plugins import plugins
from tests.helpers.fork_servers import image_fork_servers
from tests.helpers.options import serve_options


@dataclass(frozen=True)
class PictureSpec:
    """The part of a FamilySpec that pictures need, with Qwen3-VL's rules at a smaller size."""

    family: str = "test"
    sees_images: bool = True
    tiles: TileLayout | None = None
    image_rules: ImageRules = field(
        default_factory=lambda: ImageRules(
            16, 2, 64 * 64, 1024 * 1024, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
        )
    )

    @property
    def video(self) -> QwenVideo:
        return QwenVideo(
            self.image_rules, False, 2.0, None, 4, 768, False, 128_000, None, frame_tokens=0
        )

    @property
    def pixel_bounds(self) -> PixelBounds:
        return self.image_rules.pixel_bounds

    @property
    def sample(self) -> PreprocessParams:
        return self.recipe(64, 64, self.pixel_bounds)

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        return self.image_rules.recipe(height, width, bounds)

    def settings(self, recipe: PreprocessParams) -> bytes:
        return self.image_rules.settings(self.family, recipe)

    def num_tokens(self, grid: Grid) -> int:
        return self.image_rules.num_tokens(grid)

    def num_patches(self, grid: Grid) -> int:
        return self.image_rules.num_patches(grid)


@pytest.fixture(scope="session")
def spec() -> FamilySpec:
    return PictureSpec()  # type: ignore[return-value]


@dataclass(frozen=True)
class Path:
    """A media path and what it works on."""

    media: Media
    arena: Arena
    metrics: Metrics


MakePath = Callable[..., AbstractAsyncContextManager[Path]]


@pytest.fixture
def media_path(spec: FamilySpec) -> MakePath:
    """`async with media_path(arena_bytes, **media options) as path`."""
    return paths_of(spec, image_fork_servers)


def paths_of(spec: FamilySpec, fork_servers: Callable[[], ForkServers]) -> MakePath:
    """As `media_path`, with image workers from these stocks."""

    @asynccontextmanager
    async def make(
        arena_bytes: int = 16 << 20, metadata_folder: Folder | None = None, **options: object
    ) -> AsyncIterator[Path]:
        arena, metrics = Arena.create(arena_bytes), Metrics()
        told = serve_options(**{"media_workers": 1, **options})
        media = Media(
            spec,
            told,
            arena,
            metrics,
            fork_servers=fork_servers(),
            metadata_folder=metadata_folder,
            cards=[card for plugin in plugins() for card in plugin.requests.media],
        )
        media.start()
        try:
            yield Path(media, arena, metrics)
        finally:
            await media.close()
            arena.close()

    return make
