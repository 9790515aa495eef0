"""The connector's metrics are on its page as they are."""

from __future__ import annotations

from pathlib import Path

import kvoffd_client
from kvoffd_client.vllm.metrics import DEFINITIONS

PAGE = Path(kvoffd_client.__file__).parents[1] / "README.md"


def test_the_page_has_every_metric_with_its_meaning() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `vllm:")]
    assert lines == [f"| `{name}` | {metric.documentation} |" for name, metric in DEFINITIONS.items()]
