"""``gather``: submit a group of jobs, take results as they come, stop when there are enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import awake, errors, functions, keys, payloads, units
from .context import inherited, within
from .steps import Deliver, Run, Steps

if TYPE_CHECKING:
    from . import wire
    from .queues import Queue

MEMBERS_MAX = 100


def gather(
    queue: Queue,
    inputs: Sequence[Any],
    need: int | str,
    accept: Callable[[Any, Any], Any] | None,
    timeout: units.Duration | None,
) -> Steps[list[Any]]:
    """The accepted results, in completion order. Raises ConfigError, TaskFailedError (need is out of reach),
    TimeoutError, StoppedError, and what ``accept`` raises. What is left is cancelled in every case."""
    from . import wire

    items = list(inputs)
    wanted = _need(need, len(items))
    if accept is not None:
        _check_accept(accept)
    if not items:
        return []
    ends = None if timeout is None else awake.now_s() + units.milliseconds(timeout, "timeout") / 1000
    members = tuple(
        wire.NewJob(
            key=keys.queue_key(queue.name, item, queue._key),
            input=payloads.encode(f"the input of {queue.name}", item),
        )
        for item in items
    )
    binding = queue._client._binding()
    info = yield from binding.join()
    needs = yield from queue._needs()
    try:
        answer = yield wire.GroupsSubmit(
            run=info.id, queue=queue.name, members=members, attempts=queue._declared_attempts(), needs=needs
        )
        group: wire.GroupView = answer.reply
        try:
            return (yield from _collect(queue, group, items, wanted, accept, ends, timeout))
        finally:
            yield from _end(group.run)
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904


def _collect(
    queue: Queue,
    group: wire.GroupView,
    items: list[Any],
    wanted: int | None,
    accept: Callable[[Any, Any], Any] | None,
    ends: float | None,
    timeout: units.Duration | None,
) -> Steps[list[Any]]:
    """Takes results until ``wanted`` are accepted (None: until all have ended)."""
    from . import wire

    accepted: list[Any] = []
    first_failure: wire.JobView | None = None
    waiting: dict[str, list[Any]] = {}
    for job, item in zip(group.jobs, items, strict=True):
        waiting.setdefault(job, []).append(item)  # the same input twice is the same job, and counts twice
    cursor = 0
    while waiting:
        wait_ms = None if ends is None else max(0, int((ends - awake.now_s()) * 1000))
        answer = yield wire.GroupsEnded(
            run=group.run, after=cursor, wait_ms=wait_ms, within=within(), inherited=inherited()
        )
        if not answer.reply.jobs:
            raise errors.TimeoutError(f"gather on {queue.name}: {len(accepted)} accepted within {timeout}")
        cursor = answer.reply.cursor
        for view in answer.reply.jobs:
            for item in waiting.pop(view.job, ()):
                if view.state != "succeeded":
                    first_failure = first_failure or view
                    continue
                result = payloads.decode(view.result)
                if accept is None or (yield Run(accept, (result, item), {}, None, may_await=True)):
                    accepted.append(result)
                if wanted is not None and len(accepted) == wanted:
                    return accepted
        left = sum(len(same) for same in waiting.values())
        if wanted is not None and len(accepted) + left < wanted:
            reason, traceback = f"only {len(accepted) + left} results can still be accepted", None
            if first_failure is not None:
                reason, traceback = first_failure.reason or first_failure.state, first_failure.traceback
            failed = errors.TaskFailedError(
                f"gather on {queue.name} cannot reach {wanted}: {reason.removeprefix('handler_error: ')}", reason=reason
            )
            raise errors.failed_elsewhere(failed, traceback)
    return accepted


def _end(run: str) -> Steps[None]:
    """Ends the group: what has not ended is cancelled."""
    from . import wire

    try:
        yield Deliver(wire.RunsEnd(run=run, state="stopped"), None, patient=False)
    except errors.RunstateError:
        pass  # it is told later, or the group has ended with its run


def _check_accept(accept: object) -> None:
    if not callable(accept):
        raise errors.ConfigError(f"accept is {units.shown(accept)}: give a function of (result, input)")
    if functions.kind(accept) in (functions.GENERATOR, functions.ASYNC_GENERATOR):
        raise errors.ConfigError("accept is a generator function: give one that returns whether the result is accepted")
    functions.check(accept, "accept", "result", "input")


def _need(need: int | str, count: int) -> int | None:
    if count > MEMBERS_MAX:
        raise errors.ConfigError(f"gather takes at most {MEMBERS_MAX} inputs at once, not {count}: call it in parts")
    if need == "all":
        return None
    if count == 0:
        return None
    return units.whole(need, 'need ("all" or a number of results)', 1, count)
