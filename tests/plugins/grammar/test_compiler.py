"""Whose grammar is compiled next."""

from __future__ import annotations

import asyncio

from saccade.plugins.grammar.compiler import Compiler
from saccade.text.grammar.constraint import OutputConstraint
from tests.helpers.served import TOKENIZER
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB


def test_clients_take_turns_at_the_compiler() -> None:
    """Once, one client's many large grammars came before everybody else's."""
    compiler = Compiler(TOKENIZER, DEMO_VOCAB, DEMO_ENDS)
    order: list[str] = []

    async def ask(client: str, number: int) -> None:
        constraint = OutputConstraint("regex", f"{client}{number}", "guided_regex")
        assert await compiler.compile(constraint, client=client) is not None
        order.append(f"{client}{number}")

    async def run() -> None:
        asks = [asyncio.create_task(ask("a", number)) for number in range(6)]
        await asyncio.sleep(0)
        asks += [asyncio.create_task(ask(client, 0)) for client in "bc"]
        await asyncio.sleep(0)
        asks[3].cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        assert await compiler.compile(OutputConstraint("regex", "later", "r")) is not None

    asyncio.run(run())
    assert order == ["a0", "a1", "b0", "c0", "a2", "a4", "a5"]


async def test_a_turn_that_nobody_waits_for_any_more_is_passed_on() -> None:
    compiler = Compiler(TOKENIZER, DEMO_VOCAB, DEMO_ENDS)
    first, *others = [
        asyncio.create_task(compiler.compile(OutputConstraint("regex", f"x{number}", "r")))
        for number in range(4)
    ]
    await asyncio.sleep(0)
    for task in others:
        task.cancel()
    first.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert (
        await asyncio.wait_for(compiler.compile(OutputConstraint("regex", "y", "r")), 60)
        is not None
    )
