"""Structured outputs: a grammar holds the answer to a form, or to calls of tools."""

from saccade.plugin import Plugin, StepRule

_HOLD = f"{__name__}.hold_answer:HoldAnswer"

PLUGIN = Plugin(
    "grammar",
    grammars=f"{__name__}.grammar_loader:GrammarLoader",
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
)
