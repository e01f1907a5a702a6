"""The result types: their fields in order, frozen, with what the hosted SDK promises of them."""

import copy
import dataclasses
import datetime
import pickle

import pytest

from runstate import results
from runstate.signals import Signal

NOW = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.timezone.utc)
RUN = results.RunInfo("run_1", "nightly")
STATE = results.RunState("run_1", "nightly", "running", NOW)
VALUES = [
    RUN,
    results.RunEvent("1", "task.failed", NOW, {"a": 1}),
    STATE,
    results.WorkerStatus("host-1", 1, None),
    results.Waiting("slots", "browser", 2),
    results.RunStatus(STATE, [results.WorkerStatus("host-1", 1, NOW)], [results.Waiting("slots", "browser", 2)]),
]
FIELDS = {
    results.RunInfo: ["id", "name"],
    results.RunContext: ["run", "signal", "attempt", "key"],
    results.RunEvent: ["id", "type", "at", "data"],
    results.RunState: ["id", "name", "state", "deadline"],
    results.WorkerStatus: ["worker", "holding", "lease_expires_at"],
    results.Waiting: ["kind", "name", "units"],
    results.RunStatus: ["run", "workers", "waiting"],
}


@pytest.mark.parametrize(("kind", "first"), FIELDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_promised_fields_come_first_and_in_order(kind, first):
    assert [field.name for field in dataclasses.fields(kind)][: len(first)] == first


@pytest.mark.parametrize("value", [*VALUES, results.RunContext(RUN, Signal(), 1, None)], ids=lambda v: type(v).__name__)
def test_results_are_frozen(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "x")


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_results_survive_pickling_and_copying(value):
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


@pytest.mark.parametrize("data", [[], [None], [{}]])
def test_an_event_without_a_payload_has_an_empty_one(data):
    assert results.RunEvent("1", "run.started", NOW, *data).data == {}


def test_two_events_without_a_payload_do_not_share_it():
    first, second = (results.RunEvent("1", "x", NOW) for _ in range(2))
    assert first.data is not second.data


def test_a_copied_context_still_sees_its_signal():
    signal = Signal()
    context = copy.deepcopy(results.RunContext(RUN, signal, 1, "k"))
    signal._set()
    assert context.signal.is_set()
