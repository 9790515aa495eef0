"""What the engine's log says."""

from __future__ import annotations

import logging

import kvoffd_client.vllm.log  # noqa: F401 - joins the two loggers


def test_what_the_client_logs_appears_in_the_engines_log(said: list[str]) -> None:
    logging.getLogger("kvoffd_client").warning("No daemon in %s.", "/run/kvoffd")
    assert said == ["No daemon in /run/kvoffd."]
