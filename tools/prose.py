"""Find sentences that reference English does not have: `python tools/prose.py [PATH ...]`.

Checks docstrings, comments and strings in `src`, and the pages of `docs`. Prints
`file:line: words`, and exits with 1 if there are any. A docstring begins with a verb or its
subject, and a sentence names who does what.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: How a docstring does not begin.
OPENINGS = re.compile(
    r"(What|Whether|How|Who|Whose|Where|The same|As above|Those|None of|Nobody|Somebody|Of)\b"
)

#: What no sentence has.
PHRASES = re.compile(
    r"\b(nobody|somebody|whoever|anew|(is|are|was|were) told|(is|are|was|were) said|"
    r"so many|as above|no word of)\b",
    re.IGNORECASE,
)

Finding = tuple[int, str]


def of_python(path: Path) -> Iterator[Finding]:
    """Yield the lines of a module whose docstrings, comments or strings have such words."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if found := OPENINGS.match(text):
                yield node.body[0].lineno, found[0]
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for found in PHRASES.finditer(token.string):
                    yield token.start[0] + token.string.count("\n", 0, found.start()), found[0]


def of_text(path: Path) -> Iterator[Finding]:
    """Yield the lines of a page that have such words."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for found in PHRASES.finditer(line):
            yield number, found[0]


def main() -> int:
    """Check the given files, or all."""
    given = [Path(each) for each in sys.argv[1:]]
    paths = given or [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
    count = 0
    for path in paths:
        for line, words in sorted((of_python if path.suffix == ".py" else of_text)(path)):
            print(f"{path.relative_to(ROOT)}:{line}: {words}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
