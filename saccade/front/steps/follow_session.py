"""A request's session: what the requests before teach about the next one's prompt."""

from __future__ import annotations

from saccade.front.prepared import Preparation
from saccade.front.sessions.sessions import Sessions
from saccade.media.opened import OpenedImage


class FollowSession:
    """For chats that go on and have images."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def follow(self, preparation: Preparation) -> None:
        """Find the session, and learn from what changed. Chats with videos are left alone."""
        request, client = preparation.request, preparation.client
        images = [each for each in preparation.opened if isinstance(each, OpenedImage)]
        if len(images) < len(preparation.opened) or request.n > 1 or request.silent:
            return
        tenant = (
            client.salt(request.cache_salt),
            client.share(request.cache_salt),
            request.adapter.fingerprint,
        )
        edited = preparation.edited is not None and preparation.edited.cleared_uses > 0
        preparation.turn = self._sessions.follow(tenant, request, images, edited)
