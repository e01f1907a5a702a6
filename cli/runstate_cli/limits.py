"""`runstate limits`: so many units in each window of time."""

from __future__ import annotations

import click

from . import render, resources


@click.group("limits")
def command() -> None:
    """Look at limits: units per window of time."""


@command.command(
    "show",
    epilog="""\b
The object of --json: name max per_seconds used waiting. "used" counts the
units of the present window, "waiting" the calls in line.""",
)
@resources.options
def show(name: str, as_json: bool, space: str | None) -> None:
    """Show a limit: how much of the present window is used, and how many calls wait."""
    from runstate import wire

    view = resources.look(wire.LimitsGet(limit=name), space)
    found = {
        "name": view.limit,
        "max": view.max,
        "per_seconds": view.per_seconds,
        "used": view.used,
        "waiting": view.waiting,
    }
    resources.show(
        found,
        [
            ("limit", view.limit),
            ("units", f"{view.used} of {view.max} used in this window"),
            ("window", render.duration(view.per_seconds * 1000)),
            ("waiting", render.count(view.waiting, "call")),
        ],
        as_json=as_json,
    )
