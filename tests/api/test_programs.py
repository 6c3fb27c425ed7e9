"""Bodies as real programs write them: taken from what their own code sent to the demo server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.test_tools import LOOK
from tests.helpers.images import data_url
from tests.helpers.served import Served
from tests.media.pictures import encode, noise


@pytest.fixture(scope="module")
def module_server(caller: Served) -> Served:
    return caller


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("client", ["Cline", "Open WebUI", "Open WebUI with llama.cpp"])
def test_a_turn_after_a_tool_is_read_as_clients_send_it(served: Served, client: str) -> None:
    """Cline (@cline/llms 0.0.86) moves images out of results, Open WebUI (0.12.4) strips them."""
    url = data_url(encode(noise(64, 64)))
    image = {"type": "image_url", "image_url": {"url": url}}
    asked = {"role": "user", "content": [{"type": "text", "text": "Which?"}, image]}
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "index": 0}],
    }
    told: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
    options: dict[str, Any] = {"stream": True, "max_tokens": 4, "tools": [LOOK]}
    messages = [asked, said, told]
    match client:
        case "Cline":
            said |= {"content": "I look.", "tool_calls": [CALL]}
            told["content"] = '[{"type":"text","text":"(see following user message for image)"}]'
            messages = [{"role": "system", "content": "You are a coding agent."}, *messages]
            messages.append({"role": "user", "content": [image]})
            options |= {"tool_choice": "auto", "stream_options": {"include_usage": True}}
        case "Open WebUI":
            said["reasoning_content"] = "hm"
            options |= {"seed": 0, "stop": ["\n\n"], "reasoning_effort": "medium", "min_p": 0.0}
            options |= {"logit_bias": {"7": 10}, "top_k": 40, "frequency_penalty": 0.0}
        case _:
            messages = [asked, {"role": "assistant", "content": "It is"}]
            options |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = served.http.post("/v1/chat/completions", json={"messages": messages, **options})
    assert answer.status_code == 200, answer.text
    assert '"finish_reason"' in answer.text and answer.text.rstrip().endswith("data: [DONE]")
    (request,) = served.submitted
    assert len(request.images) == (2 if client == "Cline" else 1)
