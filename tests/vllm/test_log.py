"""What the engine's log says."""

from __future__ import annotations

import logging

from kvoffd_client.vllm.log import ConnectionWatch


def test_a_connection_is_told_each_time_it_comes_and_only_then(said: list[str]) -> None:
    watch = ConnectionWatch("worker 0", "/run/kvoffd")
    for up in (False, True, True, False, False, True):
        watch.observe(up)
    assert said == ["kvoffd: the worker 0 is connected to the daemon in /run/kvoffd."] * 2


def test_what_the_client_logs_appears_in_the_engines_log(said: list[str]) -> None:
    logging.getLogger("kvoffd_client").warning("No daemon in %s.", "/run/kvoffd")
    assert said == ["No daemon in /run/kvoffd."]
