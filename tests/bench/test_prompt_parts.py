"""The parts of a prompt's time are told apart, and the program that measures them works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.prompt_parts import IDLE, KINDS, KVOFFD, Part, Prompt, Turn, measure, page
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_tiny_llama


def test_calls_belong_to_the_prompt_in_whose_time_they_began_before_or_after_its_first_token() -> None:
    records = [
        ("look", 0.5, 1.0, 1.0, 9),
        ("look", 1.0, 0.004, 0.001, 2),
        ("look", 1.1, 0.001, 0.001, 0),
        ("send", 2.0, 0.002, 0.002, 0),
        ("look", 3.0, 0.006, 0.001, 1),
    ]
    turn = Turn([Prompt(1.0, 2.0, 3.0), Prompt(3.0, 4.0, 5.0)], [8.0, 6.0], records, {"the daemon": (0.004, 6)})
    assert turn.parts() == [Part(2, 2.0, 3.0, 2), Part(1, 1.0, 5.0, 1)]
    assert turn.parts("send") == [Part(), Part()]
    assert turn.parts("send", after=True) == [Part(1, 2.0, 0.0, 0), Part()]
    text = page({IDLE: [turn], KVOFFD: [turn]})
    assert "| first token                                   | 7.00         | 7.00   |" in text
    assert "* `the daemon`: 2000 µs of CPU and 3 wake-ups a prompt" in text


@pytest.mark.engine
@pytest.mark.nightly
def test_each_kind_of_connector_is_measured(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    with DaemonProcess() as daemon:
        found = {kind: [measure(kind, model, daemon, 2)] for kind in KINDS}
    text = page(found)
    assert all(len(turn.first_token_ms) == 2 for (turn,) in found.values())
    for name in ("on_new_request", "get_num_new_matched_tokens", "handle_preemptions"):
        assert f"| `{name}`" in text
    assert "`kvoffd-scheduler`" in text
