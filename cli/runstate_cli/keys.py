"""`runstate keys`: who may come over TCP or HTTP."""

from __future__ import annotations

import click

from . import render, resources

PERMISSIONS = ("work", "resource_config", "usage")


@click.group("keys")
def command() -> None:
    """Make, list and revoke the keys for TCP and HTTP. For the daemon's owner, over its Unix socket."""


@command.command(
    "create",
    epilog="""\b
The object of --json: id secret space permissions[] name.""",
)
@click.option("--space", default="default", show_default=True, metavar="NAME", help="The space the key works in.")
@click.option(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice(PERMISSIONS),
    help="work: join runs and work in them. resource_config: create queues, limits, slots and budgets. usage: see"
    " status. May be given several times. Default: all three.",
)
@click.option("--name", default="", metavar="TEXT", help="A note for `list`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def create(space: str, permissions: tuple[str, ...], name: str, as_json: bool) -> None:
    """Make a key. Its secret is shown once and kept nowhere."""
    from runstate import wire

    asked = [each for each in wire.PERMISSIONS if each in permissions or not permissions]
    made = resources.look(wire.KeysCreate(space=space, permissions=tuple(asked), name=name), None)
    found = {
        "id": made.id,
        "secret": made.secret,
        "space": made.space,
        "permissions": list(made.permissions),
        "name": made.name,
    }
    rows = [("id", made.id), ("secret", made.secret), ("space", made.space)]
    resources.show(found, [*rows, ("permissions", ", ".join(made.permissions))], as_json=as_json)


@command.command(
    "list",
    epilog="""\b
The object of --json: keys[]: id space permissions[] name created_ms revoked_ms.""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(as_json: bool) -> None:
    """List all keys, also those that are revoked. Secrets are not kept."""
    import msgspec

    from runstate import wire

    keys = resources.look(wire.KeysList(), None).keys
    if as_json:
        found = [{**msgspec.structs.asdict(key), "permissions": list(key.permissions)} for key in keys]
        click.echo(render.json({"keys": found}), nl=False)
        return
    for key in keys:
        state = "revoked" if key.revoked_ms is not None else "live"
        note = f"  {key.name}" if key.name else ""
        click.echo(f"{key.id}  {state:<7}  {key.space}  {', '.join(key.permissions)}{note}")
    if not keys:
        click.echo("there are no keys; `runstate keys create` makes one")


@command.command("revoke")
@click.argument("id")
def revoke(id: str) -> None:
    """End a key for good: its sessions end at once, and what they held is handed on."""
    from runstate import wire

    resources.look(wire.KeysRevoke(key=id), None)
    click.echo(f"revoked {id}")
