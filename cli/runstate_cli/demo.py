import click


@click.command("demo")
def command() -> None: ...
