"""What a client has to send in time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from runstated.http import body
from runstated.http.errors import ApiError
from tests.engines import life, play


def test_a_body_that_does_not_come_is_waited_for_while_the_daemon_is_awake(tmp_path: Path) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            reading = asyncio.ensure_future(body.read(Request({"type": "http", "headers": []}, never), it.engine))
            await it.pass_ms(0)  # it has begun
            await it.pass_ms(body.TIME_MS - 1)
            it.clock.stall(600_000)
            for _ in range(4):
                await asyncio.sleep(0)
            assert not reading.done()
            await it.pass_ms(1)
            assert reading.done()
            with pytest.raises(ApiError, match="the body did not arrive within 10 s"):
                await reading
            assert it.clock.next_alarm_ms() is None

    play(story())


def test_a_body_that_has_come_leaves_no_timer(tmp_path: Path) -> None:
    async def at_once() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            assert await body.read(Request({"type": "http", "headers": []}, at_once), it.engine) == b"{}"
            assert it.clock.next_alarm_ms() is None

    play(story())
