"""``python -m kvoffd`` is ``kvoffd``."""

from __future__ import annotations

import sys

from kvoffd.cli import main

if __name__ == "__main__":
    sys.exit(main())
