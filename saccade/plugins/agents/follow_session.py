"""Assigns requests to sessions, and predicts the next prompt from earlier requests."""

from __future__ import annotations

from functools import partial

from saccade.front.answer_update import AnswerUpdate
from saccade.front.extras import find_extra
from saccade.front.prepared import AnswerFollower, Answers, Preparation, PreparedRequest
from saccade.front.step_order import StepContext
from saccade.ipc.messages import Ready
from saccade.media.opened import OpenedImage
from saccade.plugins.agents.history_edits import AppliedEdit
from saccade.plugins.agents.next_prompts import NextPrompts
from saccade.plugins.agents.options import AgentOptions
from saccade.plugins.agents.sessions import Sessions, SessionTurn


class FollowSession:
    """Assigns chats with images to sessions, and prefills their next prompts."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        caches, own = context.options.caches, context.options.of(AgentOptions)
        self._prepares = own.prepare_next and not caches.disable_radix_cache
        self._sessions = Sessions()
        self._next_prompts: NextPrompts | None = None

    async def follow(self, preparation: Preparation) -> None:
        """Find the chat's session, and update it with this request. Chats with videos are not
        followed.
        """
        request, client = preparation.request, preparation.client
        images = [each for each in preparation.opened if isinstance(each, OpenedImage)]
        if not self._prepares or len(images) < len(preparation.opened):
            return
        if request.n > 1 or request.silent:
            return
        tenant = (
            client.salt(request.cache_salt),
            client.share(request.cache_salt),
            request.adapter.fingerprint,
        )
        applied = find_extra(preparation.extras, AppliedEdit)
        edited = applied is not None and applied.cleared_uses > 0
        if (turn := self._sessions.follow(tenant, request, images, edited)) is not None:
            preparation.follow += (partial(self._begin, turn),)
            preparation.shown_before = turn.shown_before

    def _begin(self, turn: SessionTurn, answers: Answers) -> AnswerFollower:
        if self._next_prompts is None:
            self._next_prompts = NextPrompts(
                self._sessions,
                self._context.prompts,
                self._context.spec,
                answers.generate,
                answers.spawn,
                answers.metrics,
            )
        self._next_prompts.stop(turn.session)
        return _Follower(self._next_prompts, turn)


class _Follower:
    """The `AnswerFollower` of one request in a session."""

    def __init__(self, next_prompts: NextPrompts, turn: SessionTurn) -> None:
        self._next_prompts = next_prompts
        self._turn = turn

    def take_update(self, update: AnswerUpdate) -> AnswerUpdate:
        return self._next_prompts.take_update(self._turn, update)

    def end(self, prepared: PreparedRequest, ready: Ready) -> None:
        self._next_prompts.answered(self._turn, prepared, ready)
