"""Imports point one way, and what a user starts does not start Spark."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "duetime"

#: From the bottom up; a module may import from its own layer and those below.
LAYERS = (
    {"errors", "wording"},
    {"clock", "misnamed", "wheel", "ladder", "message", "payload", "backoff", "segments"},
    {"tables", "recurrence", "standing"},
    {"config"},
    {"connection", "leaving", "metrics", "topics", "required"},
    {"java"},
    {"columns"},
    {"envelopes", "stores"},
    {"outgoing", "recurring", "series", "hearing", "producing", "copies"},
    {"client", "http", "delaying", "admin", "advice", "callbacks", "status", "totals", "reach"},
    {"delayed", "kmq"},
    {"transaction", "retry"},
    {"reschedule", "dead", "failed", "rejected", "cancelling", "asking", "local", "pipeline"},
    {"doctor", "spark"},
    {"api"},
    {"bench"},
    {"cli", "__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules():
    return sorted(
        path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE
    )


def part(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "duetime":
                names = [
                    f"duetime.{each.name}" for each in node.names if each.name != "__version__"
                ]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("duetime."))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_its_own_layer_and_below(path):
    above = {name for name in imported_parts(path) if RANK[name] > RANK[part(path)]}

    assert not above
