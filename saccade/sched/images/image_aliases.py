"""Aliases: images that have different keys but equal pixels, so that one embedding serves all of
them.

    pixels arrive ──▶ their hash is known, and an image with equal pixels has an embedding: use it
                  └─▶ otherwise the image becomes the original for these pixels

The prefix cache and the front end use each image's own key. A sequence that uses another image's
embedding (`PromptImages.show_as`) returns to its own key before it requests pixels. Images of
different tenants (salts) are never aliases.
"""

from __future__ import annotations

from collections.abc import Callable

from cachetools import LRUCache

from saccade.core.types import Image, ImageKey
from saccade.sched.sequence import Sequence

REMEMBERED = 1 << 15
"""Maximum number of aliases, and of hashes of pixels."""


class ImageAliases:
    """Finds images with equal pixels, and makes sequences use one embedding for all of them."""

    def __init__(
        self, lives: Callable[[ImageKey], bool], users: dict[ImageKey, list[Sequence]]
    ) -> None:
        """Start without aliases.

        lives: returns True if an image's embedding is cached, or will be without another request to
            the front end.
        users: maps the key in use to the sequences that use this image. This class updates it.
        """
        self._lives = lives
        self._users = users
        self._first: LRUCache[tuple[bytes, str], Image] = LRUCache(REMEMBERED)
        self.others: LRUCache[ImageKey, Image] = LRUCache(REMEMBERED)  # alias -> the image in use
        self.found: list[tuple[ImageKey, Image]] = []  # new aliases, until `take_found`

    def arrived(self, image: Image, pixels: bytes) -> Image | None:
        """Record the hash of the pixels of an image that has no embedding.

        If another image with equal pixels has an embedding, return that image, and use it from now
        on. Otherwise return None.

        pixels: the hash.
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
        """Add an alias that was found in an earlier run of the server."""
        if key.salt == other.key.salt:
            self.others.setdefault(key, other)

    def take_found(self) -> tuple[tuple[ImageKey, Image], ...]:
        """Return the aliases found since the last call, and clear them.

        The front end may store them for later runs of the server.
        """
        found, self.found = tuple(self.found), []
        return found

    def joined(self, sequence: Sequence) -> None:
        """Make a new sequence use the shared embedding for each of its images that is an alias."""
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
        """Use an image's own key again if the shared embedding was evicted.

        Returns the keys that the sequence no longer uses.
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
