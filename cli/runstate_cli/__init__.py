"""The `runstate` command: looks at the daemon and shows what it does.

The modules of the commands are thin: what takes long to import (rich, the client) is imported by the functions that
need it, because `runstate status` stands in prompts and loops, where every 100 ms is felt.
"""

from __future__ import annotations

import click

from . import budgets, demo, keys, limits, slots, status


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import runstate

        click.echo(f"runstate {runstate.__version__}")
        context.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`runstated start`, `stop` and `restart` manage the daemon itself. Programs start it when they need it.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """See how the processes of this machine share work through runstated.

    \b
    New here?          runstate demo
    Who does what?     runstate status
    Why is it waiting? runstate limits | slots | budgets show NAME
    """


cli.add_command(status.command)
cli.add_command(limits.command)
cli.add_command(slots.command)
cli.add_command(budgets.command)
cli.add_command(keys.command)
cli.add_command(demo.command)


def main() -> None:
    """The console script."""
    cli(prog_name="runstate")
