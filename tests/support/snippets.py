"""What README and docs show, block by block, and a way to run the Python of it."""

import re
import shlex
from typing import NamedTuple

from tests.support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Blocks of these pages are made from the code.
MADE = {"cli.md"}

#: The first words of a command line; a block of anything else shows what comes out, or a drawing.
PROGRAMS = {"make", "duetime", ".venv/bin/duetime", "curl", "python3", "docker", "kubectl"}

#: Where a snippet says it, a test has another.
BOOTSTRAP = "127.0.0.1:9092"


class Enough(Exception):
    """Ends a loop that is without an end."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks():
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in fenced.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            if path.name not in MADE:
                yield Block(path.name, line, found[1], found[2])


BLOCKS = list(blocks())


def of(*languages, page=None):
    return [each for each in BLOCKS if each.language in languages and page in {None, each.page}]


def changed(block, changes):
    """Its text, with the test's own words where it has others; each has to be there."""
    text = block.text
    for shown, ours in changes.items():
        assert shown in text, f"{block}: {shown}"
        text = text.replace(shown, ours)
    return text


def run(block, changes=(), **given):
    """Run it, with what its reader has already; returns its names."""
    exec(compile(changed(block, dict(changes)), str(block), "exec"), given)  # noqa: S102 (ours)
    return given


def is_shell(block):
    words = re.sub(r"^(\w+=\S+ )*", "", block.text).split()
    return block.language == "" and (words[0] in PROGRAMS or re.match(r"\w+=\$\(", block.text))


SHELL = [each for each in BLOCKS if is_shell(each)]

#: What is only looked at: an answer, a drawing, a line of the log.
OTHERS = [each for each in BLOCKS if each not in SHELL + of("toml", "json", "python")]


def assigned(line):
    """What a line of a shell sets for a command: names and values, also those given to Docker."""
    return dict(word.split("=", 1) for word in shlex.split(line) if re.match(r"DUETIME_\w+=", word))


def started(words):
    """The words behind `duetime`, where a command line is one of it."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:2] == ["docker", "run"]:
        # The image is called so; without words it does what the Dockerfile says.
        image = len(words) - words[::-1].index("duetime")
        yield words[image:] or ["run"]
    elif words[:1] == ["duetime"]:
        yield words[1:]
    else:
        at = [number for number, word in enumerate(words) if word.endswith("bin/duetime")]
        yield from (words[number + 1 :] for number in at)


def commands(*pages):
    """Every `duetime ...` of a block or a line of text, as its words; of all pages, or of these."""
    for block in SHELL:
        for line in block.text.splitlines():
            if not pages or block.page in pages:
                yield from started(shlex.split(line, comments=True))
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if not pages or path.name in pages:
            inline = re.findall(r"`(?:\.venv/bin/)?duetime ([a-z][^`\n]*)`", text)
            yield from map(shlex.split, inline)


#: As a reader would fill in what is written in capitals.
COMMANDS = sorted(
    {
        tuple(
            "1" if re.fullmatch(r"[A-Z]+(\.\.\.)?", word) else word for word in words if word != "&"
        )
        for words in commands()
    }
)
