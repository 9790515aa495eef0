"""Finds words that make text hard to read: ``python -m tests.tools.plain_words [PATH...]``, a part of ``make lint``.

It reads comments, docstrings and strings of Python, comments and strings of C, and the prose of pages. It prints file,
line, what it found and what to write.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

WORDS = {
    r"\bso (many|much|high|long|large|few|small|often|fast|low|little)\b(?! as\b)(?![^.;:]*\bthat\b)": (
        "the number, `this many`, or `at least`"
    ),
    r"\bof (no|little) use\b": "`invalid`, or `unusable`",
    r"\b(go|goes|going|went|gone) on\b": "`continue`",
    r"\bin vain\b": "`without success`",
    r"\b(meanwhile|(in the )?meantime)\b": "`by then`, or `since then`",
    r"\blest\b": "`so that ... not`",
    r"(?<!-)\bbeside\b": "`besides`, `next to`, or `in addition to`",
    r"\b(?<!make\s)room\b": "`space`",
    r"\bin place of\b": "`instead of`",
    r"\bas ever\b": "`as before`",
    r"\banew\b": "`again`",
    r"\bof before\b": "`earlier`",
    r"\b(is|are|was|were) told of\b": "`is notified`",
    r"\b(is|are|be) said\b": "`is reported`",
    r"\bif need be\b|\bwhere need be\b": "`if needed`",
    r"\btells? (nobody|of)\b": "`reports`, or `shows`",
    r"(?<!there\s)(?<!There\s)\b(is|are|was|were) (?-i:none)\b(?! of)": "`is not a ...`, or `there is none`",
    r"\bwhat was before\b": "`the previous value`",
    r"\bdear\b": "`expensive`",
    r"\bas is wanted\b": "`if wanted`",
}
"""A pattern, and what to write instead."""

DOCSTRING_START = re.compile(
    r"(Of|What|How|When|Why|Where|Who|By|In|Into|After|Before|Behind|Without|From|To|For|Since|Until|At|On|Between|Beside"
    r"|Besides|Among|Not|That)\b(?! vLLM's\b)"
)
START_ADVICE = "a docstring that begins with a noun, or with a verb for a function"
_PATTERNS = [(re.compile(one.replace(" ", r"\s+"), re.IGNORECASE), advice) for one, advice in WORDS.items()]
_C_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_CODE_SPAN = re.compile(r"`[^`]*`")


class Text(NamedTuple):
    """A comment, docstring, string or paragraph, and the line where it begins."""

    line: int
    text: str
    is_docstring: bool = False


def texts_of_python(source: str) -> Iterator[Text]:
    """Yield the comments, docstrings and strings of a Python file."""
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == line:
                comments[-1] = comments[-1][0], f"{comments[-1][1]}\n{text}"
            else:
                comments.append((line, text))
    yield from (Text(*comment) for comment in comments)
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(node.lineno, node.value, id(node) in docstrings)


def texts_of_c(source: str) -> Iterator[Text]:
    """Yield the comments and strings of a C file."""
    for found in _C_TEXT.finditer(source):
        yield Text(source.count("\n", 0, found.start()) + 1, found.group())


def texts_of_page(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a page without its code."""
    kept: list[str] = []
    in_code = False
    for line in source.splitlines():
        is_fence = line.startswith("```")
        in_code ^= is_fence
        kept.append("" if in_code or is_fence or line.startswith("    ") else _CODE_SPAN.sub("``", line))
    number = 1
    for paragraph in re.split(r"(\n\s*\n)", "\n".join(kept)):
        if paragraph.strip():
            yield Text(number, paragraph)
        number += paragraph.count("\n")


def findings(texts: Iterator[Text]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words and the advice of what is hard to read in these texts."""
    for text in texts:
        if text.is_docstring and (start := DOCSTRING_START.match(text.text)):
            yield text.line, start.group(), START_ADVICE
        for pattern, advice in _PATTERNS:
            for found in pattern.finditer(text.text):
                yield text.line + text.text.count("\n", 0, found.start()), found.group(), advice


def files() -> Iterator[Path]:
    """Yield every file that is checked. Generated pages are checked where they are made."""
    for package in ("client", "proto", "kvoffd", "deploy"):
        yield from (ROOT / package).rglob("*.md")
        if package != "deploy":
            yield from (path for path in (ROOT / package).rglob("*.*") if path.suffix in (".py", ".c", ".h"))
    yield from (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "RELIABILITY.md"))


def main(arguments: Sequence[str]) -> int:
    """Print findings, with paths those of these alone; return 1 if there are any."""
    wanted = [Path(each).resolve() for each in arguments] or [ROOT]
    readers = {".py": texts_of_python, ".c": texts_of_c, ".h": texts_of_c, ".md": texts_of_page}
    status = 0
    for path in sorted(files()):
        if path.name in ("PROTOCOL.md", "METRICS.md") or not any(path.is_relative_to(each) for each in wanted):
            continue
        for line, words, advice in sorted(findings(readers[path.suffix](path.read_text()))):
            print(f"{path.relative_to(ROOT)}:{line}: {' '.join(words.split())!r}: write {advice}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
