"""Computer use: a model acts on a screen, in its own action format."""

from saccade.plugin import Plugin, Requests, StepRule

_TRANSLATE = "saccade.plugins.computer.translate_actions:TranslateActions"

PLUGIN = Plugin(
    "computer",
    requests=Requests(
        steps=(
            StepRule("computer.begin", "begin", "computer", _TRANSLATE, "begin", "begin"),
            StepRule("computer.place", "history", "computer", _TRANSLATE, "place", "place"),
        )
    ),
)
