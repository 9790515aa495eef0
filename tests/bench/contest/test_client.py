"""The contest's client: tokens and their times by answer, failed requests, and a deadline for all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.contest.client import send
from tests.kit.closing import ServerThread

REFUSED, SILENT = 1, 2
"""First tokens of prompts that are refused, and that are never answered."""


class Server(ServerThread):
    """Streams two tokens for each of ``n`` answers of a prompt, in turns.

    Attributes:
        resumed: ends what is silent.
    """

    def __init__(self) -> None:
        self.resumed = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = body["prompt"][0]
                if first == SILENT:
                    server.resumed.wait()
                self.send_response(503 if first == REFUSED else 200)
                self.end_headers()
                for at in range(2):
                    for number in range(body.get("n", 1)):
                        choice = {"index": number, "token_ids": [first + 10 * at + number]}
                        self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
                self.wfile.write(b"data: [DONE]\n\n")

        super().__init__(ThreadingHTTPServer(("127.0.0.1", 0), Handler))

    def close(self) -> None:
        self.resumed.set()
        super().close()


@pytest.fixture
def engine() -> Iterator[Any]:
    with Server() as server:
        yield SimpleNamespace(port=server.port, model="model")


def test_each_answer_has_its_tokens_and_the_gaps_between_them(engine: Any) -> None:
    found = send(engine, [[100], [200]], max_tokens=2, at_once=2, deadline_s=30.0, n=2)
    assert found.answers == [[(0, [100, 110]), (1, [101, 111])], [(0, [200, 210]), (1, [201, 211])]]
    assert (len(found.ttft_s), len(found.gaps_s), found.failed) == (2, 4, [])


def test_a_refused_request_is_counted_with_its_cause(engine: Any) -> None:
    found = send(engine, [[100], [REFUSED]], max_tokens=2, at_once=1, deadline_s=30.0)
    assert len(found.failed) == 1
    assert "503" in found.failed[0]
    assert [bool(tokens) for tokens in found.answers] == [True, False]


def test_a_silent_server_costs_no_more_than_the_deadline(engine: Any) -> None:
    with pytest.raises(AssertionError, match="1 of 2 requests"):
        send(engine, [[100], [SILENT]], max_tokens=2, at_once=2, deadline_s=1.0)
