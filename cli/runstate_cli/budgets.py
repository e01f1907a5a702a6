"""`runstate budgets`: money that calls reserve and spend."""

from __future__ import annotations

import click

from . import resources


@click.group("budgets")
def command() -> None:
    """Look at budgets: money that calls reserve and spend."""


@command.command(
    "show",
    epilog="""\b
The object of --json: name currency scale limit_minor reserved_minor
spent_minor. Amounts are whole numbers of minor units: 40 at scale 2 is 0.40.""",
)
@resources.options
def show(name: str, as_json: bool, space: str | None) -> None:
    """Show a budget: its limit, what is reserved, spent and left."""
    from runstate import units, wire

    view = resources.look(wire.BudgetsGet(budget=name), space)
    found = {
        "name": view.budget,
        "currency": view.currency,
        "scale": view.scale,
        "limit_minor": view.limit_minor,
        "reserved_minor": view.reserved_minor,
        "spent_minor": view.spent_minor,
    }
    left = view.limit_minor - view.reserved_minor - view.spent_minor
    amounts = [("limit", view.limit_minor), ("spent", view.spent_minor), ("reserved", view.reserved_minor)]
    rows = [
        (what, f"{units.from_minor(minor, view.scale)} {view.currency}") for what, minor in [*amounts, ("left", left)]
    ]
    resources.show(found, [("budget", view.budget), *rows], as_json=as_json)
