"""Producers: calls, sends and results, and all that can be wrong with them."""

from __future__ import annotations

from tests.e2e.support import Daemon

WORKER = """
@runstate.queue("q", concurrency=2)
def handle(input):
    effect("handled", json.dumps(input))
    return {"got": input}
runstate.serve()
"""


def test_all_forms_of_a_call_give_the_same_result(daemon: Daemon) -> None:
    worker = daemon.program(WORKER)
    daemon.waits(1)
    said = daemon.program(
        """
q = runstate.queue("q")
job = q.send({"n": 1})
say(q({"n": 1}), job.result(), job.result("5s"), job.result(0))
async def main():
    say(await q({"n": 1}), await q.acall({"n": 1}), await (await q.asend({"n": 1})).aresult(), job.result())
asyncio.run(main())
say((q.name, q.servable, repr(q)), repr(job) == f"<Job {job.id} in q>", q.send({"n": 1}).id == job.id)
"""
    ).ends_well()
    got = "{'got': {'n': 1}}"
    assert said == [" ".join([got] * 4)] * 2 + ["('q', False, '<Queue q (producer-only)>') True True"]
    assert daemon.effects() == ['handled {"n": 1}']
    worker.send_signal(15)
    assert worker.ends_well() == []


def test_a_queue_takes_a_handler_in_every_form(daemon: Daemon) -> None:
    said = daemon.program(
        """
def plain(input):
    "What it does."
    return input
async def later(input):
    return input
a = runstate.queue("a", plain)
b = runstate.queue("b")(plain)
c = runstate.queue("c", attempts=2, lease="5s", concurrency=3, key=str)(later)
say(repr(a), a.__name__, a.__doc__, a.__wrapped__ is plain, b.servable, repr(c), c.servable)
say(asyncio.iscoroutine(coroutine := c(1))); coroutine.close()
for wrong in (dict(attempts=0), dict(attempts=101), dict(attempts=True), dict(concurrency=0), dict(concurrency=1.0),
              dict(lease="soon"), dict(key=7), dict(slots=7), dict(limit={"units": 1}), dict(budget={})):
    say(name(lambda: runstate.queue("q", **wrong)))
say(name(lambda: runstate.queue("")), name(lambda: runstate.queue("x" * 257)), name(lambda: runstate.queue(7)))
"""
    ).ends_well()
    assert said == [
        "<Queue a (handler)> plain What it does. True True <Queue c (handler)> True",
        "True",
        *["ConfigError CONFIG_ERROR"] * 10,
        " ".join(["ConfigError CONFIG_ERROR"] * 3),
    ]


def test_a_queue_that_nobody_has_declared_is_not_found(daemon: Daemon) -> None:
    said = daemon.program(
        """
try:
    runstate.queue("review")({"n": 1})
except runstate.RunstateError as error:
    say(type(error).__name__, error.code, error.status, error)
say(name(asyncio.run, runstate.queue("review").acall(1)))
"""
    ).ends_well()
    assert said == ["RunstateError NOT_FOUND 404 queue review not found", "RunstateError NOT_FOUND"]


def test_attempts_that_differ_are_a_conflict(daemon: Daemon) -> None:
    said = daemon.program(
        """
runstate.queue("q", attempts=3).send(1)
say(name(runstate.queue("q", attempts=4).send, 1), name(runstate.queue("q", lambda x: x).send, 1))
say(runstate.queue("q").send(1).id == runstate.queue("q", attempts=3).send(1).id)
"""
    ).ends_well()
    assert said == ["ConflictError CONFLICT ConflictError CONFLICT", "True"]


def test_inputs_that_cannot_be_sent_are_refused_before_anything_is_sent(daemon: Daemon) -> None:
    said = daemon.program(
        """
q = runstate.queue("q", attempts=1)
for wrong in ({1}, float("nan"), b"x", object(), {1: 2}, chr(0xD800), "x" * 65_535, {"a": {2}}):
    say(name(q.send, wrong))
say(q.send("x" * 65_534).id != q.send((1, 2)).id, q.send((1, 2)).id == q.send([1, 2]).id)
keyed = runstate.queue("q", attempts=1, key=lambda input: input["k"])
say(keyed.send({"k": "a", "at": 1}).id == keyed.send({"k": "a", "at": 2}).id)
for key in (lambda input: 7, lambda input: "", lambda input: "x" * 256):
    say(name(runstate.queue("q", attempts=1, key=key).send, 1))
"""
    ).ends_well()
    refused = ["ConfigError CONFIG_ERROR"]
    assert said == [*refused * 6, "ResultTooLargeError RESULT_TOO_LARGE", *refused, "True True", "True", *refused * 3]
    assert daemon.status().queues[0].counts == {"ready": 3}


def test_many_jobs_are_sent_in_few_requests_and_are_the_jobs_of_their_inputs(daemon: Daemon) -> None:
    said = daemon.program(
        """
q = runstate.queue("q", attempts=1)
first = q.send({"n": 7})
jobs = q.send_many({"n": n} for n in range(600))
say(len(jobs), len({job.id for job in jobs}), jobs[7].id == first.id, q.send({"n": 599}).id == jobs[599].id)
again = asyncio.run(q.asend_many([{"n": 3}, {"n": 600}, {"n": 3}]))
say([job.id == jobs[3].id for job in again], q.send_many([]))
large = q.send_many(str(n) + "x" * 65_000 for n in range(150))  # 10 MB: more than one frame
say(len({job.id for job in large}))
"""
    ).ends_well()
    assert said == ["600 600 True True", "[True, False, True] []", "150"]
    assert daemon.status().queues[0].counts == {"ready": 600 + 1 + 150}


def test_of_many_jobs_none_is_sent_where_one_input_is_wrong(daemon: Daemon) -> None:
    said = daemon.program(
        """
q = runstate.queue("q", attempts=1)
say(name(q.send_many, [1, 2, {3}]), name(q.send_many, [1] * 300 + ["x" * 65_535]))
runstate.queue("q", attempts=2).send(1)
say(name(q.send_many, [1, 2]))
"""
    ).ends_well()
    assert said == ["ConfigError CONFIG_ERROR ResultTooLargeError RESULT_TOO_LARGE", "ConflictError CONFLICT"]
    assert daemon.status().queues[0].counts == {"ready": 1}


def test_a_result_that_takes_too_long_is_a_timeout_and_the_job_goes_on(daemon: Daemon) -> None:
    said = daemon.program(
        """
job = runstate.queue("q", attempts=1).send({"n": 1})
for wait in (0, "10ms"):
    try:
        job.result(wait)
    except TimeoutError as error:
        say(type(error).__module__, error.code, isinstance(error, runstate.TimeoutError))
say(name(asyncio.run, job.aresult(timeout="10ms")), name(job.result, -1), name(job.result, "soon"))
"""
    ).ends_well()
    assert said == ["runstate.errors TIMEOUT True"] * 2 + [
        "TimeoutError TIMEOUT ConfigError CONFIG_ERROR ConfigError CONFIG_ERROR"
    ]


def test_an_exception_of_a_handler_that_the_wire_cannot_carry_is_still_recorded(daemon: Daemon) -> None:
    worker = daemon.program(
        """
class Worse(Exception):
    def __str__(self): raise RuntimeError("no text")
@runstate.queue("q", attempts=1)
def handle(input):
    raise Worse
runstate.serve()
"""
    )
    daemon.waits(1)
    said = daemon.program("say(name(runstate.queue('q').send(1).result, '15s'))").ends_well()
    assert said == ["TaskFailedError TASK_FAILED"]
    worker.send_signal(15)
    assert worker.ends_well() == []
