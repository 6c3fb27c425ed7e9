"""How published harnesses trim by default: rules to try before a client has shown its own.

Data alone. A rule whose stub is a text is none of these: a text is known once it was seen.

    Anthropic's computer-use-demo   keeps 3 images, in chunks of 3: the image leaves its tool result
    cua                             keeps 3: a call is removed with its screenshot
    UI-TARS                         keeps 5: the screenshot's message is removed, not the answer
    sliding windows                 keep 5 turns
"""

from __future__ import annotations

from saccade.plugins.agents.trimming import TrimRule

CALLED = 1
"""Messages before a tool's result that go with it: its call."""
OF_TOOLS = (
    TrimRule(3, 3),
    TrimRule(3, 3, stub=None, lead=CALLED),
    TrimRule(5, 3),
    TrimRule(5, 5, stub=None, lead=CALLED),
)
"""For screenshots that are results of tools."""
OF_USERS = (
    TrimRule(3, 3),
    TrimRule(3, 3, stub=None),
    TrimRule(5, 3),
    TrimRule(5, 5, stub=None),
    TrimRule(5, 5, stub=None, behind=0),
)
"""For screenshots in messages of the user's role."""
