"""`runstate slots`: so many units at a time."""

from __future__ import annotations

import click

from . import render, resources


@click.group("slots")
def command() -> None:
    """Look at slots: units at a time."""


@command.command(
    "show",
    epilog="""\b
The object of --json: name max used waiting holders[]. "holders" has the label
of a worker for each hold, oldest first, at most 100.""",
)
@resources.options
def show(name: str, as_json: bool, space: str | None) -> None:
    """Show slots: how many are used, by whom, and how many calls wait."""
    from runstate import wire

    view = resources.look(wire.SlotsGet(pool=name), space)
    found = {
        "name": view.pool,
        "max": view.max,
        "used": view.used,
        "waiting": view.waiting,
        "holders": list(view.holders),
    }
    resources.show(
        found,
        [
            ("slots", view.pool),
            ("units", f"{view.used} of {view.max} used"),
            ("waiting", render.count(view.waiting, "call")),
            ("holders", ", ".join(view.holders) or render.NOTHING),
        ],
        as_json=as_json,
    )
