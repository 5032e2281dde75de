"""Showing a result: one line of JSON for a program, or a table for a person."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def show(name: str, result: Mapping[str, Any], *, as_json: bool) -> None:
    """Write the result to stdout."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    for title, content in _tables(name, result):
        Console().print(_table(title, content))


def _tables(name: str, result: Mapping[str, Any]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    flat = [
        {"figure": key, "value": _text(value)}
        for key, value in result.items()
        if not isinstance(value, list)
    ]
    lists = [(key, value) for key, value in result.items() if isinstance(value, list)]
    return [(f"bench {name}", flat), *lists]


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    return table


def _text(value: Any) -> str:  # noqa: ANN401 (anything that JSON can hold)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return " to ".join(_text(each) for each in value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)
