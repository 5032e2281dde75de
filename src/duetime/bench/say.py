"""What a benchmark says while it runs: on stderr, because stdout is for its result."""

import typer


def say(text: str) -> None:
    """Tell a person what is being waited for."""
    typer.echo(text, err=True)
