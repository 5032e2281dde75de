"""Write the tables of settings in docs/ from the settings: `python tools/settings_page.py`.

A table stands below a line `<!-- settings: NAME NAME ... -->`, which names its settings in order;
those of a queue are named by `<!-- settings of queues: NAME ... -->`.
"""

import json
import re
from pathlib import Path

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted(DOCS.glob("configuration*.md")), DOCS / "queue-reference.md"]
MARK = re.compile(r"(<!-- settings( of queues)?: ([\w ]+) -->\n)(?:\n?(?:\|.*\n)+)?")


def default(model: type[BaseModel], name: str) -> str:
    """Return the default of a setting as a cell, in TOML where it is one value."""
    field = model.model_fields[name]
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value is PydanticUndefined or value == "":
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def meaning(model: type[BaseModel], name: str) -> str:
    """Return the description of a setting, in one line and without a full stop."""
    return " ".join((model.model_fields[name].description or "").split()).removesuffix(".")


def table(model: type[BaseModel], names: str) -> str:
    """Return the rows of these settings."""
    rows = [
        f"| `{name}` | {default(model, name)} | {meaning(model, name)} |" for name in names.split()
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def written(text: str) -> str:
    """Return a page with its tables as they are now."""

    def with_table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{table(QueueSettings if found[2] else Settings, found[3])}"

    return MARK.sub(with_table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
