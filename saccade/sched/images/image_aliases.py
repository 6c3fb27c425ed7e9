"""Aliases: images with equal pixels, whose one embedding serves all, under any name.

    pixels arrive ──▶ their name is known, and an embedding of the same ──▶ sequences show that
                  └─▶ else the image becomes the one of these pixels

The prefix cache and the front continue to use each image's own name. A sequence that shows
another image's embedding (`PromptImages.show_as`) takes its own name back before requesting pixels.
Owns the map from images to pixels. Pixels under different tenants (salts) are different.
"""

from __future__ import annotations

from collections.abc import Callable

from cachetools import LRUCache

from saccade.core.types import Image, ImageKey
from saccade.sched.sequence import Sequence

REMEMBERED = 1 << 15
"""Images, and names of pixels."""


class ImageAliases:
    """Images by their pixels.

    `others`: images shown by another's embedding. `found`: those found since `take_found`.

    `lives`: True if an image's embedding is cached, or available without the front.

    `users`: the sequences that show an image, by the name in use. This class keeps it up to date.
    """

    def __init__(
        self, lives: Callable[[ImageKey], bool], users: dict[ImageKey, list[Sequence]]
    ) -> None:
        self._lives = lives
        self._users = users
        self._first: LRUCache[tuple[bytes, str], Image] = LRUCache(REMEMBERED)
        self.others: LRUCache[ImageKey, Image] = LRUCache(REMEMBERED)
        self.found: list[tuple[ImageKey, Image]] = []

    def arrived(self, image: Image, pixels: bytes) -> Image | None:
        """Record the pixels' name for an image without an embedding.

        Returns the image whose embedding serves in its place from now on, if any.
        """
        name = pixels, image.key.salt
        first = self._first.get(name)
        if first is None or first.key == image.key or not self._lives(first.key):
            self._first[name] = image
            self.others.pop(image.key, None)
            return None
        self.others[image.key] = first
        self.found.append((image.key, first))
        for sequence in list(self._users.get(image.key, ())):
            self._rename(sequence, image.key, first)
        return first

    def learn(self, key: ImageKey, other: Image) -> None:
        """Learn an alias that was found in an earlier run."""
        if key.salt == other.key.salt:
            self.others.setdefault(key, other)

    def take_found(self) -> tuple[tuple[ImageKey, Image], ...]:
        """Return the aliases found since the last call, to be learned after a restart."""
        found, self.found = tuple(self.found), []
        return found

    def joined(self, sequence: Sequence) -> None:
        """Let a new sequence, with images by their own names, show aliases' embeddings."""
        for image in sequence.request.images:
            other = self.others.get(image.key)
            if (
                other is not None
                and other.num_tokens == image.num_tokens
                and self._lives(other.key)
                and not self._lives(image.key)
            ):
                self._rename(sequence, image.key, other)

    def reclaim(self, sequence: Sequence) -> list[ImageKey]:
        """Have a sequence use images' own names if the other embedding was evicted.

        Returns the names that it has given up.
        """
        gone = [
            (own, other)
            for own, other in sequence.shown.shared.items()
            if sequence.needs(other) and not self._lives(other)
        ]
        for own, _ in gone:
            image = next(each for each in sequence.request.images if each.key == own)
            self._rename(sequence, own, image)
        return [other for _, other in gone]

    def _rename(self, sequence: Sequence, own: ImageKey, image: Image) -> None:
        before = set(sequence.last_use)
        sequence.shown.show_as(own, image)
        sequence.blocked = None
        for key in before - set(sequence.last_use):
            if sequence in self._users.get(key, ()):
                self._users[key].remove(sequence)
                if not self._users[key]:
                    del self._users[key]
        if image.key not in before:
            self._users.setdefault(image.key, []).append(sequence)
