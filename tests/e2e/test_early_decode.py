"""A server with early_decode=true has decoded an image before its request is here, and answers as
one without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saccade_bench.attacks import raw
from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import image_part, text_part, user
from tests.media.pictures import encode, noise

pytestmark = pytest.mark.more

CHAT = "/v1/chat/completions"
DECODES, ENCODED = "saccade_decodes_total", "saccade_images_encoded_total"


def split(server: Server, body: dict[str, Any], decodes: int) -> Any:
    """The answer to a body that arrives with a pause before its last bytes, in which so many
    decodes are counted.
    """
    data = raw.post(CHAT, body)
    with raw.connect(server.url) as connection:
        connection.sendall(data[:-20])
        server.wait_for_metric(DECODES, decodes)
        connection.sendall(data[-20:])
        answer = raw.read(connection)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def check_stages(trace: dict[str, Any], early: bool) -> None:
    """Check the order of an image's stages, and that only the first two may precede the request's
    arrival.
    """
    image = trace["images"][-1]
    starts, ms = image["starts"], image["ms"]
    assert image["found"] == "none"
    assert trace["ms"]["body"] > 0
    assert min(ms[stage] for stage in ("digest", "decode", "ship", "encode")) > 0
    assert starts["decode"] + ms["decode"] <= starts["ship"] + 0.01
    assert starts["ship"] + ms["ship"] <= starts["encode"] + ms["encode"]
    assert (starts["decode"] < 0) == early, "before all of the body was here"
    assert starts["ship"] > starts["fetch"] > 0


def test_an_image_is_decoded_while_its_request_arrives(tmp_path: Path) -> None:
    images = [encode(noise(192, 192, seed)) for seed in range(3)]
    asked = text_part("what is in the picture?")
    bodies = [
        {
            "saccade": {"trace": True},
            "messages": [user(*map(image_part, images[:shown]), asked)],
            "temperature": 0,
        }
        for shown in (1, 2, 3)
    ]
    answers = []
    for name, options in (("early", ["--tune", "early_decode=true"]), ("late", [])):
        (tmp_path / name).mkdir()
        with serving("demo", tmp_path / name, *options) as server:
            texts = []
            for number, body in enumerate(bodies, 1):
                answer = split(server, body, number if options else number - 1)
                check_stages(answer["saccade"], bool(options))
                texts.append(answer["choices"][0]["message"]["content"])
                server.wait_for_metric(DECODES, number)
                server.wait_for_metric(ENCODED, number)
            answers.append(texts)
            assert server.metric("saccade_early_decodes_total") == (3 if options else 0)
            assert server.metric("saccade_early_decodes_unused_total") == 0
            assert server.metric("saccade_image_worker_renewals_total") == 0
            server.wait_for_metric("saccade_request_bytes_buffered", 0)
    assert answers[0] == answers[1]
