"""Waiters whose client has gone: they hold up nobody, and who is only slow has its place again."""

from __future__ import annotations

from pathlib import Path

from runstated.domain.waits import Call
from runstated.http.waiters import CLAIM_MS, REMEMBERED_MS, UNREAD_MS
from tests.engines import Life, life, play
from tests.http.test_spaces import Client, two_spaces


async def slots_of_one(it: Life) -> tuple[Client, str, str, dict[str, str]]:
    """A client, a run, slots with one unit, and the grant that holds it."""
    client, _ = await two_spaces(it)
    run = (await client.good("PUT /runs/{name}", {"path": {"name": "job"}}))["id"]
    permit = (await client.good("PUT /permits/by-name/{name}", {"path": {"name": "gpu"}, "units": 1}))["id"]
    grant = await client.good(
        "POST /permits/{permitId}/acquire", {"path": {"permitId": permit}, "scopeId": run, "leaseSeconds": 600}
    )
    return client, run, permit, grant


async def wait(client: Client, run: str, permit: str, holder: str) -> str:
    body = {"path": {"permitId": permit}, "scopeId": run, "holder": holder}
    answer = await client.good("POST /permits/{permitId}/wait", body)
    assert answer["state"] == "WAITING"
    waiter: str = answer["waiterId"]
    return waiter


def waiting(it: Life) -> list[Call]:
    """All calls that wait, in any space."""
    return [call for core in it.engine.spaces for call in core.calls()]


async def state(client: Client, waiter: str) -> str:
    answer: str = (await client.good("GET /permit-waiters/{waiterId}", {"path": {"waiterId": waiter}}))["state"]
    return answer


async def becomes_signaled(it: Life, client: Client, waiter: str) -> bool:
    """Within a few leases: the daemon counts a jump of its clock as sleep, which costs no lease its time."""
    for _ in range(200):
        if await state(client, waiter) == "SIGNALED":
            return True
        await it.pass_ms(CLAIM_MS // 50)
    return False


async def release(client: Client, grant: dict[str, str]) -> None:
    body = {"path": {"grantId": grant["grantId"]}, "token": grant["token"]}
    await client.good("POST /grants/{grantId}/release", body)


def test_a_waiter_that_nobody_asks_for_leaves_the_line_and_finds_its_place_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            client, run, permit, grant = await slots_of_one(it)
            dead, slow = [await wait(client, run, permit, name) for name in ("dead", "slow")]
            await it.pass_ms(UNREAD_MS)
            assert not waiting(it)
            late = await wait(client, run, permit, "late")
            assert await state(client, slow) == "WAITING"
            await release(client, grant)
            assert [await state(client, each) for each in (slow, late)] == ["SIGNALED", "WAITING"]
            await it.pass_ms(UNREAD_MS - 1)
            assert await state(client, late) == "WAITING"
            assert await becomes_signaled(it, client, late), "what was promised and not claimed goes to the next"
            assert await becomes_signaled(it, client, dead), "its turn, if it is there after all"

    play(story())


def test_a_waiter_that_left_its_line_twice_has_its_place_for_a_minute_from_the_second_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            client, run, permit, grant = await slots_of_one(it)
            slow = await wait(client, run, permit, "slow")
            await it.pass_ms(UNREAD_MS + REMEMBERED_MS // 2)
            assert await state(client, slow) == "WAITING"
            await it.pass_ms(REMEMBERED_MS // 2 + UNREAD_MS)
            assert not waiting(it)
            late = await wait(client, run, permit, "late")
            assert await state(client, slow) == "WAITING"
            await release(client, grant)
            assert [await state(client, each) for each in (slow, late)] == ["SIGNALED", "WAITING"]

    play(story())


def test_what_the_daemon_slept_counts_for_no_waiter(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            client, run, permit, _ = await slots_of_one(it)
            await wait(client, run, permit, "w")
            it.clock.stall(10 * UNREAD_MS)
            await it.pass_ms(UNREAD_MS - 1)
            assert waiting(it)
            await it.pass_ms(1)
            assert not waiting(it)

    play(story())
