"""Several servers on a real Ray Serve: what is Ray's alone. What clients see there is asked in
`test_route.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from saccade_bench.fixtures.server import Server
from tests.e2e.fleets import ask, chat, chats, outcome
from tests.e2e.rays import START_SECONDS, RayFleet, deployed, write_config
from tests.fixtures.tiny import picture
from tests.helpers.images import text_part, user

pytest.importorskip("ray.serve")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # Ray's own
    pytest.mark.filterwarnings("ignore"),
]

CHATS = 24


@pytest.fixture(scope="module", params=["tiny", "demo"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayFleet]:
    """On a tiny checkpoint, and on the built-in model."""
    if request.param == "tiny":
        yield request.getfixturevalue("ray_fleet")
    else:
        with deployed("demo", tmp_path_factory.mktemp("r"), 2) as fleet:
            yield fleet


@pytest.fixture
def client(fleet: RayFleet) -> Iterator[openai.OpenAI]:
    with fleet.client() as client:
        yield client


def test_a_page_of_another_origin_is_refused(fleet: RayFleet) -> None:
    url = f"{fleet.router.url}/v1/models"
    assert httpx.get(url).status_code == 200
    rebound = httpx.get(url, headers={"host": "evil.example"})
    assert rebound.status_code == 403 and "--allowed-hosts" in rebound.text
    crossed = httpx.get(url, headers={"origin": "http://evil.example"})
    assert crossed.status_code == 403 and "--cors-origins" in crossed.text


def test_the_printed_file_is_what_ray_reads(folder: Path, tmp_path: Path) -> None:
    """By Ray's own schema, with and without autoscaling."""
    import yaml
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    for options in ((), ("--max-replicas", "4", "--target-requests", "8")):
        path = write_config(folder, tmp_path, 8000, "--replicas", "2", *options)
        read = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
        (application,) = read.applications
        engine, ingress = application.deployments
        assert application.import_path == "saccade.plugins.ray.serving:app"
        assert (engine.name, ingress.name) == ("engine", "ingress")
        if options:
            scale = AutoscalingConfig.model_validate(engine.autoscaling_config)
            assert (scale.min_replicas, scale.max_replicas) == (2, 4)
            assert scale.get_target_ongoing_requests() == 8
            assert scale.policy.get_policy().__name__ == "by_queue"
        else:
            assert engine.num_replicas == 2


def test_every_image_of_every_chat_is_encoded_once_in_the_whole_fleet(fleet: RayFleet) -> None:
    before = fleet.encodes
    chats(fleet.router.url, [picture(64, 64, seed=100 + number) for number in range(CHATS)])
    encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
    print(f"\n{encoded} encodes of {CHATS} images")
    assert sum(encoded) == CHATS
    assert min(encoded) > 0, "both have something to do"


def test_a_large_body_goes_through(client: openai.OpenAI) -> None:
    filler = {"user": "x" * 3_000_000}
    assert ask(client, [user(text_part("what?"))], extra_body=filler).choices


@pytest.mark.parametrize("whom", ["server", "replica"])
def test_what_is_killed_under_load_takes_nothing_along(
    fleet: RayFleet, client: openai.OpenAI, whom: str
) -> None:
    """24 chats go on in rounds while a replica, or the server that it owns, is killed: every round
    ends, soon, in an answer or in a typed error; the chat goes on elsewhere, and Ray starts another
    replica.
    """
    servers = {each.url: each for each in fleet.wait_for(2)}
    doomed, (owner, process) = next(iter(fleet.owners().items()))
    (left,) = (each for url, each in servers.items() if url != doomed)
    family = [owner, process, *process.children(recursive=True)]
    before = left.metric("saccade_images_encoded_total")
    deaths: list[float] = []
    seed = 4000 + 1000 * (whom == "server")
    images = [picture(64, 64, seed=seed + number) for number in range(CHATS)]

    def talk(number: int) -> list[str]:
        ends = [outcome(client, images[number], number % 2 == 0, deaths) for _ in range(4)]
        chat(client, images[number], rounds=2)
        return ends

    with ThreadPoolExecutor(CHATS) as pool:
        talking = [pool.submit(talk, number) for number in range(CHATS)]
        deadline = time.monotonic() + 60
        while servers[doomed].metric("saccade_requests_running") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        deaths.append(time.monotonic())
        (process if whom == "server" else owner).kill()
        gone = psutil.wait_procs(family, timeout=60)[1]
        ends = [end for each in talking for end in each.result(timeout=600)]
    print(f"\n{ends.count('answer')} answers, {ends.count('error')} typed errors")
    assert not gone, "a replica and its server end together"
    assert ends.count("answer") >= 4 * CHATS - CHATS
    assert left.metric("saccade_images_encoded_total") - before <= CHATS
    fleet.wait_for(2, but=[doomed])
    print(f"another replica after {time.monotonic() - deaths[0]:.1f} s")
    messages: Any = chat(client, images[0], rounds=1)
    assert ask(client, messages).choices


def test_images_are_encoded_by_a_deployment_of_encoders(folder: Path, tmp_path: Path) -> None:
    """24 chats, at random routing: each image once, by the encoder, which Ray then has to start
    again somewhere else; nobody else encodes before and after.
    """
    with deployed(folder, tmp_path, 2, "--encoders", "1", "--affinity", "none") as fleet:
        encoder = known_encoder(fleet)
        images = [picture(64, 64, seed=7000 + number) for number in range(CHATS)]
        chats(fleet.router.url, images)
        sent = sum(encoder.metric(SENT, source=source) for source in ("tower", "cache"))
        print(f"\nencoded: {encoder.metric(ENCODED)} by the encoder, {fleet.encodes} by others;")
        print(f"{sent:.0f} embeddings sent")
        assert encoder.metric(ENCODED) == CHATS and sum(fleet.encodes) == 0
        assert CHATS < sent <= 2 * CHATS, "to each server once"

        (process,) = encoders_of(fleet)
        process.kill()
        psutil.wait_procs([process], timeout=60)
        other = known_encoder(fleet, but=encoder.url)
        chats(fleet.router.url, [picture(64, 64, seed=8000 + number) for number in range(CHATS)])
        assert other.metric(ENCODED) == CHATS and sum(fleet.encodes) == 0


SENT, ENCODED = "saccade_embeddings_sent_total", "saccade_images_encoded_total"


def encoders_of(fleet: RayFleet) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(fleet.router.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = each.cmdline()
            if words[3:5] == ["saccade", "serve"] and "encode" in words:
                found.append(each)
    return found


def known_encoder(fleet: RayFleet, but: str = "") -> Server:
    """The encoder, once every server has been told of it."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert time.monotonic() < deadline, fleet.router.log.read_text()[-4000:]
        owners = [psutil.Process(owner.pid) for owner, _ in fleet.owners().values()]
        lists = [listed(each) for each in owners]
        if all(lists) and len(set(lists)) == 1 and lists[0] != but:
            time.sleep(1.5)  # the servers read it once a second
            return Server(lists[0], fleet.router.process, fleet.router.log)
        time.sleep(0.2)


def listed(owner: psutil.Process) -> str:
    """What its server is told of encoders."""
    for each in owner.children(recursive=True):
        with suppress(psutil.Error, FileNotFoundError, ValueError):
            words = each.cmdline()
            return Path(words[words.index("--encoders") + 1]).read_text().strip()
    return ""


def test_replicas_on_two_nodes_are_one_fleet(folder: Path, tmp_path: Path) -> None:
    """Two of Ray's nodes on this machine, a replica on each; one node dies, with its server, and
    perhaps with the ingress, which Ray then starts on the other.
    """
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        other = nodes.add_node(num_cpus=2)
        with deployed(folder, tmp_path, 2, cluster=nodes.address) as fleet:
            before = fleet.encodes
            chats(
                fleet.router.url, [picture(64, 64, seed=9000 + number) for number in range(CHATS)]
            )
            encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
            print(f"\n{encoded} encodes of {CHATS} images, on two nodes")
            assert sum(encoded) == CHATS and min(encoded) > 0
            both = [each.url for each in fleet.workers]
            nodes.remove_node(other, allow_graceful=False)
            left: list[Server] = []
            deadline = time.monotonic() + START_SECONDS
            while len(left) != 1:
                assert time.monotonic() < deadline, fleet.router.log.read_text()[-4000:]
                time.sleep(0.5)
                with suppress(httpx.TransportError, ValueError):
                    left = fleet.now()
            chats(fleet.router.url, [picture(64, 64, seed=9500)])
            assert left[0].url in both, "the other node's goes on"
    finally:
        nodes.shutdown()
    for url in both:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")


def test_servers_come_with_requests_and_go_when_theirs_have_ended(
    folder: Path, tmp_path: Path
) -> None:
    """A second server is started for a queue, and ended after it; what the server that goes was
    answering is answered whole.
    """
    options = ("--max-replicas", "2", "--target-requests", "8")
    with (
        deployed(folder, tmp_path, 1, *options) as fleet,
        fleet.client() as client,
        ThreadPoolExecutor(20) as pool,
    ):

        def stream(number: int, tokens: int) -> int:
            settings: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "timeout": 300}
            messages = [user(text_part(f"{number} go on"))]
            pieces = ask(client, messages, max_tokens=tokens, stream=True, **settings)
            return [each.choices[0].finish_reason for each in pieces if each.choices].count(
                "length"
            )

        began = time.monotonic()
        queue = [pool.submit(stream, number, 1000) for number in range(20)]
        servers = fleet.wait_for(2)
        print(f"\na second server after {time.monotonic() - began:.1f} s")
        assert all(each.result(timeout=300) for each in queue)
        last = [pool.submit(stream, number, 2000) for number in range(50, 57)]  # less than a queue
        deadline = time.monotonic() + 60
        while not all(each.metric("saccade_requests_running") for each in servers):
            assert time.monotonic() < deadline and not all(each.done() for each in last)
            time.sleep(0.1)
        (left,) = fleet.wait_for(1)
        assert all(each.result(timeout=300) for each in last)
        assert left.url in {each.url for each in servers}
