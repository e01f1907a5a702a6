"""What `runstate limits`, `slots` and `budgets` share: one resource is looked at and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import render

if TYPE_CHECKING:
    from runstate import wire

R = TypeVar("R")
Command = TypeVar("Command", bound=Callable[..., None])


def options(function: Command) -> Command:
    """The name, and how to show it."""
    for add in (
        click.option(
            "--space", metavar="NAME", help="Which space to look in. Default: RUNSTATE_SPACE_ID, else `default`."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
        click.argument("name"),
    ):
        function = add(function)
    return function


def look(request: wire.Request[R], space: str | None) -> R:
    """Asks the daemon that runs; never starts one. Raises CannotLook."""
    from .look import Onlooker

    onlooker = Onlooker(space)
    try:
        return onlooker.ask(request)
    finally:
        onlooker.close()


def show(found: Mapping[str, Any], rows: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """One object of JSON, or one line for each of its sides."""
    if as_json:
        click.echo(render.json(found), nl=False)
        return
    wide = max(len(what) for what, _ in rows) + 1
    render.show(render.line(f"{what + ':':<{wide}} {value}") for what, value in rows)
