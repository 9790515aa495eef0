"""Prints what became of doctor's advice on ten made-up days: ``python -m tests.advice``."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.report_file import markdown_table, print_report, run_facts

from .days import DAYS
from .test_days import SIZE
from .trial import rows, try_day

HEADER = ["day", "computed", "advice", "done", "promised", "came", "in replay", "kept"]


def main() -> None:
    facts, tried = run_facts("python -m tests.advice"), []
    for name in DAYS:
        print(f"{name} ...", file=sys.stderr)
        with TemporaryDirectory(prefix="kvoffd-days-") as place:
            tried += try_day(name, SIZE, Path(place))
    print_report("Doctor's advice on ten made-up days", facts, markdown_table([HEADER, *rows(tried)]))


if __name__ == "__main__":
    main()
