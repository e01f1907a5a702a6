"""A tier of its own: it needs a C compiler, and minutes rather than seconds. So README's command, which needs neither,
does not collect it; who names it does: `pytest tests/power`. Nothing is skipped: `.ci/run` names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.power.disk import compile_shim

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Whether nobody has asked for this directory or a file in it."""
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in asked) else True


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim."""
    return compile_shim(tmp_path_factory.mktemp("shim"))
