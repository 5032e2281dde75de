"""Everything that tests share and that is not a test."""

from pathlib import Path

#: Of the repository.
ROOT = Path(__file__).parents[2]

#: This folder, where its files are.
SUPPORT = Path(__file__).parent

#: Records that others' programs wrote, byte by byte.
GOLDEN = SUPPORT / "golden"
