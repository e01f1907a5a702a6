"""The public names: those of the hosted SDK, in its order, apart from the ones that are still to come."""

from __future__ import annotations

import inspect

import runstate

SDK = """
    __version__
    Runstate configure run child run_id arun_id context
    once limit take atake slots budget queue serve aserve sleep asleep together atogether
    setup asetup stop astop finish afinish events aevents status astatus
    RunContext RunInfo Signal Queue Job RunEvent RunStatus RunState WorkerStatus Waiting Amount Duration Per
    RunstateError ConfigError AuthError StoppedError TimeoutError OnceFailedError TaskFailedError
    BudgetExceededError ResultTooLargeError ConflictError LeaseLostError UnavailableError
    map_error is_runstate_error
"""
# When one of these arrives a test fails: take it off this list, and off "Not there yet" in README.md.
LATER = """
    limit take atake slots budget sleep asleep together atogether setup asetup events aevents status astatus
"""
HOSTED, TO_COME = SDK.split(), LATER.split()

# What can be done through a client and through the module alike.
METHODS_ONLY_OF_THE_MODULE = {"is_runstate_error", "map_error"}


def test_the_names_are_those_of_the_hosted_sdk_in_its_order() -> None:
    assert len(HOSTED) == 58
    assert runstate.__all__ == [name for name in HOSTED if name not in TO_COME]


def test_what_is_to_come_is_not_there() -> None:
    assert set(TO_COME) <= set(HOSTED)
    assert [name for name in TO_COME if hasattr(runstate, name) or hasattr(runstate.Runstate, name)] == []


def test_every_name_exists_and_has_a_docstring() -> None:
    for name in runstate.__all__:
        value = getattr(runstate, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert (value.__doc__ or "").strip(), name


def test_every_function_of_the_module_is_one_of_a_client() -> None:
    functions = {name for name in runstate.__all__ if inspect.isroutine(getattr(runstate, name))}
    methods = {name for name in vars(runstate.Runstate) if not name.startswith("_")}
    assert functions - METHODS_ONLY_OF_THE_MODULE == methods


def test_star_import_gives_the_public_names_only() -> None:
    taken: dict[str, object] = {}
    exec("from runstate import *", taken)
    assert set(taken) - {"__builtins__"} == set(runstate.__all__)
