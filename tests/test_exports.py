"""The public names: those of the hosted SDK, in its order."""

from __future__ import annotations

import inspect
import subprocess
import sys

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
HOSTED = SDK.split()

# What can be done through a client and through the module alike.
METHODS_ONLY_OF_THE_MODULE = {"is_runstate_error", "map_error"}


def test_the_names_are_those_of_the_hosted_sdk_in_its_order() -> None:
    assert len(HOSTED) == 58
    assert runstate.__all__ == HOSTED


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


def test_importing_brings_nothing_that_only_a_call_needs() -> None:
    heavy = "asyncio concurrent.futures datetime msgspec socket ssl tempfile"
    script = f"import sys, runstate; print([name for name in {heavy.split()} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "[]\n"
