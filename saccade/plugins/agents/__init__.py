"""Support for long conversations: edits that shorten them, and prefill of an agent's next
prompt.
"""

from saccade.plugin import Plugin, Requests, StepRule

_EDIT = "saccade.plugins.agents.edit_history:EditHistory"
_SESSION = "saccade.plugins.agents.follow_session"

PLUGIN = Plugin(
    "agents",
    options="saccade.plugins.agents.options:AgentOptions",
    requests=Requests(
        steps=(
            StepRule(
                "agents.length", "length", "agents.edit", _EDIT, "set_readable", "set_readable"
            ),
            StepRule("agents.edit", "edit", "agents.edit", _EDIT, "apply", "apply"),
            StepRule(
                "agents.session",
                "agents.edit",
                "saccade.front.step_order:goes_on_with_media",
                f"{_SESSION}:FollowSession",
                "follow",
            ),
        )
    ),
)
