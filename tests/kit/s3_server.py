"""S3 servers in processes of their own, for tests: moto's and rclone's; and where to get them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from .closing import StartingProcess
from .ports import free_port
from .require import require
from .waiting import wait_until

ROOT = Path(__file__).parents[2]
PLACES = f"{ROOT / '.venv-servers/bin'}:{Path(sys.executable).parent}"
PROGRAM = shutil.which("moto_server", path=PLACES)
START_S = 20.0
BUCKET = "kvoffd-test"


class S3Server(StartingProcess):
    """moto's. Listens on a free port of 127.0.0.1 and keeps everything in memory.

    Where the program is missing its start skips the test, or fails it, as ``require`` says.
    """

    def __init__(self, options: Sequence[str] = (), scheme: str = "http") -> None:
        self._port = free_port()
        self.endpoint = f"{scheme}://localhost:{self._port}"
        self._options = options
        self._scheme = scheme

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/a/prefix?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> Self:
        require("s3", PROGRAM, "there is no moto_server; `make servers` installs it")
        assert PROGRAM is not None
        command = [PROGRAM, "-H", "127.0.0.1", "-p", str(self._port), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if self._scheme == "http":
            wait_until(self._answers, START_S)
            self.request("PUT", f"/{BUCKET}")
        return self

    def listens(self) -> bool:
        """Whether anyone does; also where ``request`` cannot tell, for want of its certificate's authority."""
        host, port = urlsplit(self.endpoint).netloc.split(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            return False
        return True

    def _answers(self) -> bool:
        try:
            self.request("GET", "/moto-api/")
        except OSError:
            return False
        return True

    def request(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.endpoint + path, method=method)
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            data: bytes = answer.read()
        return data

    def flush(self) -> None:
        self.request("POST", "/moto-api/reset")
        self.request("PUT", f"/{BUCKET}")

    @property
    def objects(self) -> int:
        return self.request("GET", f"/{BUCKET}?list-type=2").count(b"<Key>")
