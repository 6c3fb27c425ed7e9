"""Which servers run: counted with servers in this process, in place of real ones."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from saccade.core.errors import NotFound, Overloaded
from saccade.core.metrics import Metrics
from saccade.plugins.model_router import pool as pools
from saccade.plugins.model_router.pool import ManagedModel, ModelPool, ModelUnavailable
from tests.helpers.until import until
from tests.plugins.model_router.fakes import MIB, World, pooled


async def ask(pool: ModelPool, name: str, client: str = "one") -> str:
    """Use a model for a moment, and return the name of the server that was used."""
    async with pool.use(pool.find(name), client) as fleet:
        await asyncio.sleep(0.001)
        return fleet.replicas[0].name


def stops(metrics: Metrics, model: str, reason: str) -> float:
    return metrics.value("saccade_route_model_stops_total", model=model, reason=reason)


async def test_requests_that_come_together_start_one_server() -> None:
    async with pooled("a", "b") as (pool, world, metrics):
        assert await asyncio.gather(*(ask(pool, "a") for _ in range(20))) == ["a"] * 20
        assert await ask(pool, "") == "a", "a request without a name gets the first model"
        assert world.started == {"a": 1}
        assert metrics.value("saccade_route_model_starts_total", model="a") == 1


async def test_an_unknown_model_is_refused_with_the_list() -> None:
    async with pooled("a", "b") as (pool, world, _):
        with pytest.raises(
            NotFound, match=r"'c' does not exist; this router has 'a', 'b'"
        ) as raised:
            pool.find("c")
        assert raised.value.code == "model_not_found"
        assert not world.started


async def test_models_that_fit_together_stay() -> None:
    async with pooled("a", "b", budget=2) as (pool, world, _):
        for name in "abab":
            await ask(pool, name)
        assert world.started == {"a": 1, "b": 1}
        assert sorted(world.live()) == ["a", "b"]


async def test_the_least_recently_used_server_is_evicted() -> None:
    async with pooled("a", "b", "c", budget=2) as (pool, world, metrics):
        for name in "abac":
            await ask(pool, name)
        assert sorted(world.live()) == ["a", "c"]
        assert stops(metrics, "b", "evicted") == 1
        assert stops(metrics, "a", "evicted") == 0


async def test_a_server_in_use_is_not_stopped_before_its_requests_have_ended() -> None:
    async with pooled("a", "b") as (pool, world, _):
        async with pool.use(pool.find("a"), "one"):
            other = asyncio.create_task(ask(pool, "b"))
            await until(lambda: pool.find("a").yielding)
            assert world.live() == ["a"]
            later = asyncio.create_task(ask(pool, "a"))  # waits for its turn
            await asyncio.sleep(0.05)
            assert world.started == {"a": 1}
            assert world.live() == ["a"]
        assert await other == "b"
        assert await later == "a"
        assert world.order == ["a", "b", "a"]


async def test_two_models_under_load_with_room_for_one_lose_nothing() -> None:
    async with pooled("a", "b") as (pool, world, metrics):

        async def client(number: int) -> list[str]:
            names = ["ab"[(number + turn) % 2] for turn in range(15)]
            return [f"{name}{await ask(pool, name, client=str(number))}" for name in names]

        answers = [each for told in await asyncio.gather(*map(client, range(12))) for each in told]
        assert sorted(set(answers)) == ["aa", "bb"], "every request has used the server it named"
        assert len(answers) == 12 * 15
        assert stops(metrics, "a", "evicted") >= 1
        assert all(each.leases == 0 and not each.waiting for each in pool.models)
        assert len(world.live()) == 1


async def test_a_server_stays_for_a_while_before_it_is_evicted() -> None:
    async with pooled("a", "b", stay=1000.0, patience=0.1) as (pool, world, _):
        await ask(pool, "a")
        with pytest.raises(
            ModelUnavailable, match=r"needs 0.00 GiB.*'a' 0.00 GiB.*router's memory"
        ):
            await ask(pool, "b")
        assert world.live() == ["a"]
        assert await ask(pool, "a") == "a"
        assert world.started == {"a": 1}


async def test_a_server_yields_no_longer_once_nobody_waits_for_its_memory() -> None:
    async with pooled("a", "b") as (pool, world, _):
        async with pool.use(pool.find("a"), "one"):
            other = asyncio.create_task(ask(pool, "b"))
            await until(lambda: pool.find("a").yielding)
            later = asyncio.create_task(ask(pool, "a"))
            await asyncio.sleep(0)
            other.cancel()  # its client leaves
            assert await later == "a"
        assert world.started == {"a": 1}


async def test_a_server_that_works_without_a_client_is_not_stopped() -> None:
    async with pooled("a", "b", patience=0.2) as (pool, world, _):
        await ask(pool, "a")
        world.working.add("a")
        with pytest.raises(ModelUnavailable) as raised:
            await ask(pool, "b")
        assert (raised.value.status, raised.value.code) == (503, "insufficient_memory")
        world.working.clear()
        assert await ask(pool, "b") == "b"


async def test_memory_counts_as_declared_and_as_measured() -> None:
    async with pooled("a", "b", budget=4, memory={"b": 2 * MIB}) as (pool, world, metrics):
        world.resident["a"] = 3 * MIB
        await ask(pool, "a")
        assert metrics.value("saccade_route_model_memory_bytes", model="a") == 3 * MIB
        await ask(pool, "b")
        assert world.live() == ["b"], "3 and 2 MiB do not fit into 4"
        assert metrics.value("saccade_route_model_memory_bytes", model="b") == 2 * MIB
        assert pool.need(pool.find("a")) == 3 * MIB, "what it took last time"


async def test_a_model_that_never_fits_is_refused_with_value_limit_and_remedy() -> None:
    async with pooled("a", "b") as (pool, world, _):
        pool.find("b").peak = 3 << 30
        with pytest.raises(ModelUnavailable, match=r"needs 3.00 GiB; .* raise `memory`") as raised:
            await ask(pool, "b")
        assert raised.value.code == "insufficient_memory"
        assert await ask(pool, "a") == "a"
        assert world.started == {"a": 1}


async def test_an_impatient_request_is_told_that_its_model_loads() -> None:
    async with pooled("a", patience=0.05) as (pool, world, _):
        world.starting.clear()
        with pytest.raises(ModelUnavailable, match="still loading after") as raised:
            await ask(pool, "a")
        assert (raised.value.status, raised.value.code) == (503, "model_loading")
        assert raised.value.retry_after >= 1
        world.starting.set()
        await until(lambda: pool.find("a").open)
        assert await ask(pool, "a") == "a"
        assert world.started == {"a": 1}


async def test_so_many_requests_wait_and_no_more() -> None:
    async with pooled("a", "b", queue=3, max_waiting=5) as (pool, world, _):
        world.starting.clear()
        waiting = [asyncio.create_task(ask(pool, "a", str(number))) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(
            Overloaded, match=r"3 requests are waiting for the model 'a'.*limit is 3 \(queue\)"
        ):
            await ask(pool, "a", "another")
        waiting += [asyncio.create_task(ask(pool, "b", str(number))) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(
            Overloaded, match=r"5 requests are waiting for models.*limit is 5 \(max-waiting\)"
        ):
            await ask(pool, "b", "another")
        world.starting.set()
        assert await asyncio.gather(*waiting) == ["a", "a", "a", "b", "b"]


async def test_one_client_gets_half_of_the_places() -> None:
    async with pooled("a", "b", max_waiting=8) as (pool, world, _):
        world.starting.clear()
        waiting = [asyncio.create_task(ask(pool, "a", "greedy")) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="4 of your requests are waiting"):
            await ask(pool, "b", "greedy")
        waiting.append(asyncio.create_task(ask(pool, "b", "modest")))
        await asyncio.sleep(0)
        world.starting.set()
        assert await asyncio.gather(*waiting) == ["a", "a", "a", "a", "b"]


async def test_a_client_that_asks_for_all_models_waits_for_one_that_asks_for_one() -> None:
    async with pooled("a", "b", "c", "d") as (pool, world, _):
        async with pool.use(pool.find("a"), "greedy"):
            tasks = [asyncio.create_task(ask(pool, name, "greedy")) for name in "bc"]
            await asyncio.sleep(0.02)
            tasks.append(asyncio.create_task(ask(pool, "d", "modest")))
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
        assert world.order == ["a", "d", "b", "c"]


async def test_an_idle_server_is_stopped_and_started_again() -> None:
    async with pooled("a", idle=0.05) as (pool, world, metrics):
        await ask(pool, "a")
        await until(lambda: stops(metrics, "a", "idle") == 1)
        assert not world.live()
        assert await ask(pool, "a") == "a"
        assert world.started == {"a": 2}


async def test_a_server_that_never_idles_stays() -> None:
    async with pooled("a", idle=None) as (pool, world, _):
        await ask(pool, "a")
        await asyncio.sleep(0.1)
        assert world.live() == ["a"]


async def test_a_start_that_fails_is_told_and_is_not_tried_in_a_loop() -> None:
    async with pooled("a") as (pool, world, metrics):
        world.failing.add("a")
        for failures in (1, 2):
            with pytest.raises(
                ModelUnavailable, match="error: the checkpoint is damaged"
            ) as raised:
                await ask(pool, "a")
            assert (raised.value.status, raised.value.code) == (503, "model_failed")
            assert world.started == {"a": failures}
        with pytest.raises(ModelUnavailable, match="failed 2 times in a row") as raised:
            await ask(pool, "a")
        assert 4 <= raised.value.retry_after <= 5
        await asyncio.sleep(0.1)
        assert world.started == {"a": 2}, "no start within the back-off, nor without a request"
        assert pool.find("a").state_fields()["state"] == "failed"
        assert stops(metrics, "a", "failed") == 2
        world.failing.clear()
        pool.find("a").retry_at = 0.0
        assert await ask(pool, "a") == "a"


def crash(world: World) -> None:
    next(server for server in world.servers.values() if not server.ended.done()).crash()


async def test_a_server_that_crashes_is_started_at_the_next_request() -> None:
    async with pooled("a") as (pool, world, metrics):
        await ask(pool, "a")
        crash(world)
        await until(lambda: pool.find("a").state == "stopped")
        assert stops(metrics, "a", "crashed") == 1
        assert await ask(pool, "a") == "a"
        crash(world)
        await until(lambda: pool.find("a").state == "stopped")
        with pytest.raises(ModelUnavailable, match="failed 2 times in a row"):
            await ask(pool, "a")
        assert world.started == {"a": 2}


async def test_a_server_that_had_run_for_long_starts_over() -> None:
    with patch.object(pools, "STEADY_SECONDS", 0.0):
        async with pooled("a") as (pool, world, _):
            for _ in range(3):
                await ask(pool, "a")
                crash(world)
                await until(lambda: pool.find("a").state == "stopped")
            assert world.started == {"a": 3}


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    async with pooled("a") as (pool, world, metrics):
        world.starting.clear()
        model: ManagedModel = pool.find("a")
        leaving = [asyncio.create_task(ask(pool, "a")) for _ in range(5)]
        staying = asyncio.create_task(ask(pool, "a"))
        await until(lambda: len(model.waiting) == 6)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert metrics.value("saccade_route_model_waiting", model="a") == 1
        world.starting.set()
        assert await staying == "a"
        assert model.leases == 0


async def test_who_leaves_at_the_moment_of_the_start_leaves_nothing_behind() -> None:
    async with pooled("a") as (pool, world, _):
        world.starting.clear()
        model = pool.find("a")
        task = asyncio.create_task(ask(pool, "a"))
        await until(lambda: len(model.waiting) == 1)
        waiter = model.waiting[0]
        waiter.granted.add_done_callback(lambda _: task.cancel())
        world.starting.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.leases == 0


async def test_a_router_that_stops_ends_starts_and_refuses_who_waits() -> None:
    async with pooled("a", "b", budget=2) as (pool, world, metrics):
        await ask(pool, "b")
        world.starting.clear()
        waiting = asyncio.create_task(ask(pool, "a"))
        await until(
            lambda: pool.find("a").state == "starting" and pool.find("a").server is not None
        )
        pool.begin_stop()
        with pytest.raises(ModelUnavailable, match="the router is stopping"):
            await waiting
        with pytest.raises(ModelUnavailable, match="the router is stopping"):
            await ask(pool, "a")
        await pool.stop()
        assert not world.live()
        assert [stops(metrics, name, "shutdown") for name in "ab"] == [1, 1]


async def test_a_start_that_takes_too_long_has_failed() -> None:
    with patch.object(pools, "START_SECONDS", 0.05):
        async with pooled("a") as (pool, world, _):
            world.starting.clear()
            with pytest.raises(ModelUnavailable, match="the start took more than"):
                await ask(pool, "a")
            assert not world.live()
            assert world.started == {"a": 1}


async def test_who_waits_for_a_server_that_failed_again_is_told() -> None:
    async with pooled("a", "b") as (pool, world, _):
        model = pool.find("a")
        model.failures = 1
        async with pool.use(model, "one"):
            other = asyncio.create_task(ask(pool, "b"))
            await until(lambda: model.yielding)
            later = asyncio.create_task(ask(pool, "a"))
            await asyncio.sleep(0)
            crash(world)
            await until(lambda: model.state == "stopped")
        assert await other == "b"
        with pytest.raises(ModelUnavailable, match="failed 2 times in a row"):
            await later
        assert world.started == {"a": 1, "b": 1}
