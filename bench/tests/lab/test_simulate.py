"""The simulator counts what the server counts: a measured chat is replayed call by call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from msgspec import structs

from saccade.core.config import EmbeddingBudgets, PageTierConfig
from saccade.core.errors import ConfigError
from saccade.core.options import CacheOptions
from saccade.edge.rank import SLACK, rank
from saccade.plugins.tiers.options import TierOptions
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.lab.options import (
    FleetOptions,
    MachineOptions,
    Routing,
    SimulateOutput,
    TraceOptions,
)
from saccade_bench.lab.simulator.command import compare, simulate
from saccade_bench.lab.simulator.costs import PROFILES, Costs, Machine, load_profile, read_costs
from saccade_bench.lab.simulator.fleet import Outcome, SimulatedRouter, Simulation
from saccade_bench.lab.simulator.traces import Replay, Synthetic, tokens_of
from saccade_bench.load.serve import Bench
from saccade_bench.load.serve import serve as bench_serve
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    TargetOptions,
    TextOptions,
)

H200 = PROFILES["h200"]
NAMES = ("a", "b", "c")
ROUTINGS: tuple[Routing, ...] = ("random", "affinity")
DECODED, ENCODED, HITS = (
    "saccade_images_decoded_total",
    "saccade_images_encoded_total",
    "saccade_image_hits_total",
)
SMALL = TraceOptions(
    num_prompts=60,
    pictures=20,
    image_resolution="random:64x64-640x480",
    rate=2.0,
    output_len=6,
    think_time=0.5,
)


def test_memory_for_embeddings_is_named_as_the_server_names_it() -> None:
    machine, device, tiers = (
        {each.name for each in fields(options) if "_cache_" in each.name}
        for options in (MachineOptions, CacheOptions, TierOptions)
    )
    served = device | tiers
    elsewhere = {"embedding_cache_dir", "embedding_cache_shared", "kv_cache_dir"}
    disk = {"embedding_cache_disk_mb", "kv_cache_disk_mb"}  # of a folder: FOLDER:SIZE
    assert machine - {"disable_radix_cache"} - disk == (served & machine) == served - elsewhere
    options = MachineOptions(
        embedding_cache_device_mb=3, embedding_cache_host_mb=2, embedding_cache_disk_mb=1
    )
    assert load_profile(options, None).machine.budgets == EmbeddingBudgets(
        3 << 20, 2 << 20, 1 << 20
    )


def machine(**changes: object) -> Machine:
    return replace(H200.machine, **changes)  # type: ignore[arg-type]


# ---- a measured run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A replay contains only the requests, not what a server computes in advance.
    alone = "--tune", "prepare_next=false"
    with serving("demo", tmp_path_factory.mktemp("server"), *alone) as server:
        yield server


def measure(server: Server, path: Path, sessions: int, together: int) -> Path:
    """Measure 8-round chats with a new image in each round by `bench serve`."""
    bench_serve(
        Bench(
            target=TargetOptions(base_url=server.url),
            load=LoadOptions(
                num_prompts=sessions,
                max_concurrency=together,
                warmup_requests=0,
                seed=10 * sessions + together,
            ),
            data=DatasetOptions(dataset_name="multiturn-image", rounds=8),
            images=ImageOptions(image_resolution="random:96x96-320x240", image_content="blank"),
            text=TextOptions(random_input_len=20, random_output_len=7, disable_ignore_eos=True),
            output=OutputOptions(output_file=path, save_text=True, trace=True, quiet=True),
        )
    )
    return path


@pytest.mark.parametrize(("sessions", "together"), [(1, 1), (3, 2)])
def test_a_replayed_chat_hits_exactly_what_was_hit(
    server: Server, tmp_path: Path, sessions: int, together: int
) -> None:
    counters = [
        (DECODED, {}),
        (ENCODED, {}),
        (HITS, {"level": "kv"}),
        (HITS, {"level": "embedding"}),
    ]
    before = [server.metric(name, **labels) for name, labels in counters]
    path = measure(server, tmp_path / "run.jsonl", sessions, together)
    measured = [
        server.metric(name, **labels) - old for (name, labels), old in zip(counters, before)
    ]

    profile = load_profile(MachineOptions(), Replay(path, "demo", PROFILES["cpu"].machine).spec)
    trace = Replay(path, "demo", profile.machine)
    assert (trace.sessions, trace.requests) == (sessions, 8 * sessions)
    outcome = Simulation(trace, profile.machine, profile.costs).run()
    counts = outcome.counts
    assert [
        counts["images_decoded"],
        counts["images_encoded"],
        counts["images_kv"],
        counts["images_embedding"],
    ] == measured
    assert counts["images_decoded"] == 8 * sessions
    check = compare(trace, outcome)
    assert not check.wrong and check.compared == 8 * sessions
    assert [line.cached for line in check.rounds] == [line.cached_measured for line in check.rounds]
    assert check.rounds[-1].cached > 0
    assert check.encoded == (8 * sessions, 8 * sessions)
    print(
        f"TTFT: mean error {check.ttft_error:+.1%}"
    )  # not asserted, because other processes may be using the CPU


def test_a_run_without_its_questions_cannot_be_replayed(tmp_path: Path, server: Server) -> None:
    path = measure(server, tmp_path / "run.jsonl", 1, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    without = [
        {name: value for name, value in line.items() if name != "messages"} for line in lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in without))
    with pytest.raises(ConfigError, match="--save-text"):
        Replay(path, "demo", PROFILES["cpu"].machine)
    longer = [
        line | ({"prompt_tokens": 9999} if line["kind"] == "request" else {}) for line in lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in longer))
    with pytest.raises(ConfigError, match=r"9999 prompt tokens.*--model"):
        Replay(path, "demo", PROFILES["cpu"].machine).call(0, 0)


# ---- drawn traces


def stepwise(wanted: TraceOptions, at: Machine, costs: Costs = H200.costs) -> Outcome:
    return Simulation(Synthetic(wanted, at), at, costs).run()


def test_a_chat_begins_with_the_chat_so_far() -> None:
    trace = Synthetic(replace(SMALL, trace="chat", rounds=3), H200.machine)
    before, after = (tokens_of(trace.call(0, round)) for round in (1, 2))
    assert after[0][: len(before[0])] == before[0]
    assert after[1][: len(before[1])] == before[1]
    assert trace.call(0, 2).length == len(after[0])


def test_an_agent_drops_old_screens_and_repeats_some() -> None:
    trace = Synthetic(
        replace(SMALL, trace="agent", rounds=6, keep_images=2, num_prompts=600, repeat_ratio=0.5),
        H200.machine,
    )
    assert [len(trace.call(0, round).pictures) for round in range(6)] == [1, 2, 2, 2, 2, 2]
    same = [
        trace.call(chat, 5).pictures[0] == trace.call(chat, 5).pictures[1]
        for chat in range(trace.sessions)
    ]
    assert 30 <= sum(same) <= 70


def test_the_same_seed_gives_the_same_estimate() -> None:
    once, again = (stepwise(SMALL, H200.machine) for _ in range(2))
    assert once == again
    assert stepwise(replace(SMALL, seed=2), H200.machine) != once


def test_an_embedding_comes_back_from_disk() -> None:
    per_token = H200.machine.embedding_bytes
    wanted = replace(
        SMALL, image_resolution="320x320", repeat_ratio=1.0, num_prompts=40, pictures=4
    )
    at = machine(kv_tokens=1600, budgets=EmbeddingBudgets(200 * per_token, 0, 10_000 * per_token))
    outcome = stepwise(replace(wanted, rate=0.1), at)
    assert outcome.counts["images_encoded"] == 4
    assert outcome.tiers["disk"]["hits"] > 0
    assert outcome.moved["disk to staged"] > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_that_left_the_device_comes_back(tier: str) -> None:
    """As many tokens are found as on a device with enough space for all of them."""
    wanted = replace(SMALL, trace="chat", rate=0.05, think_time=60.0, num_prompts=48, tenants=2)
    room = 1 << 40
    tiers = PageTierConfig(disk_bytes=room * (tier == "disk"), host_bytes=room * (tier == "host"))
    little = machine(kv_tokens=4000)
    quick_disk = structs.replace(H200.costs, disk_gbs=H200.costs.host_gbs)
    none = stepwise(wanted, little)
    kept = stepwise(wanted, replace(little, pages=tiers), quick_disk)
    all_found = stepwise(wanted, machine())
    assert kept.counts["prompt_tokens"] == none.counts["prompt_tokens"]
    assert none.counts["cached_tokens"] < kept.counts["cached_tokens"]
    assert kept.counts["cached_tokens"] == all_found.counts["cached_tokens"]
    (told,) = kept.page_tiers.values()
    assert told["read"] * little.page_size == told["restored"] > 0
    assert told["saved"] > 0 and told["evictions"] == told["slow"] == 0
    assert kept.moved[f"KV from {tier}"] == told["read"] * little.page_bytes
    assert not none.page_tiers


def test_a_tier_that_is_read_more_slowly_than_computing_is_left_alone() -> None:
    wanted = replace(SMALL, trace="chat", rate=0.05, think_time=60.0, num_prompts=48)
    at = machine(kv_tokens=4000, pages=PageTierConfig(disk_bytes=1 << 40))
    outcome = stepwise(wanted, at, structs.replace(H200.costs, disk_gbs=0.1))
    told = outcome.page_tiers["disk"]
    assert told["slow"] > 0 and told["read"] * at.page_size < outcome.counts["cached_tokens"] / 10


def test_all_calls_are_answered_when_everything_comes_at_once() -> None:
    wanted = replace(SMALL, trace="chat", rate=float("inf"), num_prompts=64)
    outcome = Simulation(Synthetic(wanted, H200.machine), machine(kv_tokens=6000), H200.costs).run()
    assert outcome.counts["requests"] == 64 and outcome.counts["refused"] == 0
    assert all(0 < busy <= 1 for busy in outcome.busy)


def test_a_prompt_that_fits_nowhere_ends_its_chat() -> None:
    wanted = replace(SMALL, trace="chat", num_prompts=16, image_resolution="640x480")
    assert stepwise(wanted, machine(kv_tokens=1024)).counts["refused"] == 2


# ---- replicas


def test_affinity_sends_a_chat_and_a_picture_to_one_replica() -> None:
    trace = Synthetic(replace(SMALL, trace="chat", num_prompts=160), H200.machine)
    outcomes = {
        routing: Simulation(trace, H200.machine, H200.costs, (*NAMES, "d"), routing).run()
        for routing in ROUTINGS
    }
    places: dict[int, set[int]] = {}
    for served in outcomes["affinity"].served:
        places.setdefault(served.session, set()).add(served.replica)
    assert all(len(where) == 1 for where in places.values())
    assert outcomes["affinity"].counts["cached_tokens"] > outcomes["random"].counts["cached_tokens"]
    assert (
        outcomes["affinity"].counts["images_encoded"] < outcomes["random"].counts["images_encoded"]
    )


def test_calls_go_where_the_router_would_send_them() -> None:
    """The simulator ranks servers by names, digests and loads, as `saccade.plugins.route` does."""
    call = Synthetic(SMALL, H200.machine).call(0, 0)
    key = call.pictures[0].image.key.digest
    first, second, third = rank((key,), NAMES, {})
    router = SimulatedRouter("affinity", NAMES, 0)
    assert NAMES[router.choose(call, 0, [0, 0, 0])] == first
    loads = [SLACK if name == first else 0 for name in NAMES]
    assert NAMES[router.choose(call, 0, loads)] == second
    assert NAMES[router.choose(call, 0, [SLACK if n != third else 0 for n in NAMES])] == third
    renamed = SimulatedRouter("affinity", NAMES[::-1], 0)
    assert NAMES[::-1][renamed.choose(call, 0, [0, 0, 0])] == first


# ---- costs


def test_constants_come_from_a_file_that_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(structs.asdict(H200.costs)))
    assert read_costs(path, PROFILES["cpu"].costs) == H200.costs
    path.write_text('{"token": 1.5}')
    assert load_profile(MachineOptions(constants=path), None).costs == structs.replace(
        PROFILES["cpu"].costs, token=1.5
    )
    for text, wrong in (
        ('{"tokens": 1}', "unknown field `tokens`"),
        ('{"token": -1}', r"\$\.token"),
        ("[", "costs.json"),
        ("[]", "object"),
        ('{"workers": 1.5}', r"int.*\$\.workers"),
        ('{"disk_gbs": 0}', r"> 0.*\$\.disk_gbs"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=wrong):
            read_costs(path, H200.costs)


def test_the_published_figures_of_the_vision_tower_are_met() -> None:
    """SPEC.md S5, Qwen3-VL-8B on an H200: 17 / 39 / 88 ms at 720p / 1080p / 1440p."""
    costs: Costs = H200.costs
    for (height, width), ms in {(720, 1280): 17, (1080, 1920): 39, (1440, 2560): 88}.items():
        rows, columns = H200.machine.size(height, width)
        assert costs.encode_ms([rows * columns // 256]) == pytest.approx(ms, rel=0.01)


# ---- the commands


def test_the_command_prints_an_estimate_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    options, two = MachineOptions(profile="h200"), FleetOptions(replicas=2)
    assert simulate(None, SMALL, options, SimulateOutput(output_file=path), two) == 0
    said = capsys.readouterr().out
    assert "ESTIMATE" in said and "affinity" in said
    written = json.loads(path.read_text())
    assert written["kind"] == "estimate"
    assert [outcome["routing"] for outcome in written["outcomes"]] == ["affinity", "random"]
    assert {outcome["counts"]["requests"] for outcome in written["outcomes"]} == {60}
    with pytest.raises(ConfigError, match="measured run"):
        simulate(None, SMALL, options, SimulateOutput(check=True))
    for wrong in ({"rate": 0.0}, {"num_prompts": 0}, {"repeat_ratio": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
            replace(SMALL, **wrong)
