"""The page for Prometheus."""

from __future__ import annotations

import re
import time
from pathlib import Path

import kvoffd.observe
from kvoffd.observe.metrics import all_metrics, metrics_reference, render_metrics
from kvoffd_proto.stats import DaemonStats

PAGE = Path(kvoffd.observe.__file__).with_name("METRICS.md")
METRICS = all_metrics(None)


def test_a_page_tells_when_the_process_started() -> None:
    page = render_metrics(DaemonStats()).decode()
    (started,) = re.findall(r"^process_start_time_seconds ([\d.e+]+)$", page, re.MULTILINE)
    assert 0 < time.time() - float(started) < 24 * 3600


def test_every_metric_has_a_conventional_name_and_a_description() -> None:
    for spec in METRICS:
        assert re.fullmatch("kvoffd_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert "per_second" not in spec.name, "Prometheus takes rates itself"
        assert "namespace" not in spec.labels, "it is Kubernetes' own"
        assert len(set(spec.labels)) == len(spec.labels), spec.name
        assert spec.description.endswith("."), spec.name
        assert len(spec.description.split()) >= 4, "a subject and what of it"
        for word, ending in {"second": "_seconds", "byte": "_bytes"}.items():
            assert not re.match(f"(cpu )?{word}", spec.description.lower()) or ending in spec.name, spec.name


def test_there_are_few_metrics_and_none_twice() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS) <= 75


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == metrics_reference(), "run: python -m kvoffd.observe.metrics > kvoffd/observe/METRICS.md"
