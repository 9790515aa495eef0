"""Context managers of the tests' helpers: what is started is closed in any case."""

from __future__ import annotations

import signal
import socketserver
import subprocess
import threading
from abc import abstractmethod
from typing import Self

from kvoffd_client.session import Closing as Closing


class Starting(Closing):
    """An object that is started at the begin of a ``with``, and closed when that fails or at its end."""

    @abstractmethod
    def start(self) -> Self: ...

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise


class StartingProcess(Starting):
    """A program in a process of its own, ``_process`` once it is started."""

    _process: subprocess.Popen[bytes] | None = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()


class ThreadsServer(socketserver.ThreadingTCPServer):
    """On a free port of 127.0.0.1, with a thread for each connection, for none of which its end waits."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, handler: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)


class ServerThread(Starting):
    """A server of the standard library, served by a thread of its own."""

    def __init__(self, server: socketserver.TCPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
