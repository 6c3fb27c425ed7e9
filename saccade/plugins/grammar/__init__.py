"""Structured outputs: a grammar constrains an answer to a format, or to tool calls."""

from saccade.plugin import Plugin, Requests, StepRule

_HOLD = f"{__name__}.hold_answer:HoldAnswer"

PLUGIN = Plugin(
    "grammar",
    requests=Requests(
        steps=(
            StepRule(
                "grammar.compile",
                "form",
                "saccade.front.step_order:is_held_early",
                _HOLD,
                "compile",
            ),
            StepRule(
                "grammar.complete",
                "form.complete",
                "saccade.front.step_order:is_held_late",
                _HOLD,
                "compile",
            ),
        ),
        grammars=f"{__name__}.grammar_loader:GrammarLoader",
    ),
)
