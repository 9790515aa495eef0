"""The check of words in ``make lint`` finds them in comments, docstrings, strings and prose, and nowhere else."""

from __future__ import annotations

from tests.tools.plain_words import findings, texts_of_c, texts_of_page, texts_of_python

PYTHON = '''"""Of the blocks that are pinned."""
count = 3  # so many that none is left, in the
# meantime
"""By key."""
text = f"{count} is none of them, goes on"
meantime = "Of course"
'''


def test_words_are_found_where_they_are_written() -> None:
    found = [(line, words) for line, words, _ in findings(texts_of_python(PYTHON))]
    assert sorted(found) == [(1, "Of"), (2, "in the\nmeantime"), (4, "By"), (5, "goes on")]
    c = 'int lest; /* so\n many */ char *s = "anew"; // room\n'
    assert [(line, words) for line, words, _ in findings(texts_of_c(c))] == [(1, "so\n many"), (2, "anew"), (2, "room")]
    page = "Beside `in vain` it\n\n```\nin vain\n```\n\n    in vain\n\n* goes\n"
    assert [(line, words) for line, words, _ in findings(texts_of_page(page))] == [(1, "Beside")]
