"""Options of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.tuning import at_least, tuned


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The responses that POST /v1/responses stores, for previous_response_id and GET, and its
    tools. With several API keys, each key can access only its own responses, and use at most half
    the budget.
    """

    refuse_unsupported_tools: bool = tuned(
        False,
        "Answer 400 if a request of POST /v1/responses offers tools that this server does not run, "
        "such as web_search. By default these are left out, and the response lists them.",
    )
    responses_mb: int = tuned(
        256,
        "MiB of memory for responses and their conversations. The least recently used are dropped "
        "first. With 0, the server keeps none.",
    )

    def __post_init__(self) -> None:
        at_least(0, self, "responses_mb")
