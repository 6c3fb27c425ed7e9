"""The rules by which published agents trim their history. They are tried until the client's own
rule is known.

Rules that replace images with a text are not included, because the text is unknown in advance.

    Anthropic's computer-use-demo   keeps 3 images, removes 3 at a time, and keeps the tool results
    cua                             keeps 3, and removes calls with their screenshots
    UI-TARS                         keeps 5, and removes the screenshot's message, not the answer
    sliding windows                 keep 5 turns
"""

from __future__ import annotations

from saccade.plugins.agents.trimming import TrimRule

CALLED = 1
"""The number of messages before a tool's result that are removed with it: the message with the
call.
"""
OF_TOOLS = (
    TrimRule(3, 3),
    TrimRule(3, 3, stub=None, lead=CALLED),
    TrimRule(5, 3),
    TrimRule(5, 5, stub=None, lead=CALLED),
)
"""Rules for screenshots in tool results."""
OF_USERS = (
    TrimRule(3, 3),
    TrimRule(3, 3, stub=None),
    TrimRule(5, 3),
    TrimRule(5, 5, stub=None),
    TrimRule(5, 5, stub=None, behind=0),
)
"""Rules for screenshots in user messages."""
