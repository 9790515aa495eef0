"""A real ``redis-server`` (or ``valkey-server``) in a process of its own, for tests; and where to get one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from .closing import Starting, StartingProcess
from .ports import free_ports
from .require import require
from .waiting import wait_until

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "there is no redis-server; Debian's package has it"
START_S = 10.0
MAX_STARTS = 5
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificate(NamedTuple):
    """Files of a server: the certificate of who signed, its own, and its key."""

    authority: str
    cert: str
    key: str


class Authority:
    """Signs certificates with openssl; ``place`` is where its files are."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._openssl(
            "req", "-x509", *NEW_KEY, "-days", "2", "-subj", "/CN=authority", "-keyout", "ca-key", "-out", "ca"
        )

    def sign(self, name: str) -> Certificate:
        """Make a certificate for a name."""
        made = Certificate(*(str(self._place / part) for part in ("ca", f"cert-{name}", f"key-{name}")))
        self._openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", "request")
        (self._place / "more").write_text(f"subjectAltName=DNS:{name}\nbasicConstraints=CA:FALSE\n")
        signed = ("-CA", "ca", "-CAkey", "ca-key", "-CAcreateserial", "-days", "2", "-extfile", "more")
        self._openssl("x509", "-req", "-in", "request", *signed, "-out", made.cert)
        return made

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30, cwd=self._place)


class RedisServer(StartingProcess):
    """Listens on a free port of 127.0.0.1 and keeps nothing on disk. With a certificate on another one over TLS too.

    Where the program is missing its start skips the test, or fails it, as ``require`` says.

    Args:
        before: a command before its own, which runs what follows it, as in a network namespace.
        address: where it listens, as seen there.
    """

    def __init__(
        self,
        *options: str,
        certificate: Certificate | None = None,
        before: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        self.certificate = certificate
        self._before, self._address = before, address
        self.options = options
        self.port, self.bus_port, self.tls_port = free_ports(3)
        self._started = False
        self._directory = Path(tempfile.mkdtemp(prefix="kvoffd-redis-"))

    @property
    def url(self) -> str:
        return f"rediss://localhost:{self.tls_port}" if self.certificate else f"redis://{self._address}:{self.port}"

    @property
    def name(self) -> str:
        """As operators see it."""
        return self.url.partition("://")[2]

    @property
    def _tls_options(self) -> list[str]:
        if self.certificate is None:
            return []
        authority, cert, key = self.certificate
        files = ["--tls-ca-cert-file", authority, "--tls-cert-file", cert, "--tls-key-file", key]
        return ["--tls-port", str(self.tls_port), *files, "--tls-auth-clients", "no"]

    def start(self) -> Self:
        require("redis", PROGRAM, MISSING)
        assert PROGRAM is not None
        for _ in range(MAX_STARTS):
            command = [*self._before, PROGRAM, "--port", str(self.port), "--bind", self._address]
            command += ["--save", "", "--appendonly", "no", "--unixsocket", str(self._directory / "socket")]
            if "--cluster-enabled" in self.options:
                command += ["--cluster-port", str(self.bus_port)]
                if self.certificate is not None:
                    command += ["--tls-cluster", "yes", "--cluster-announce-hostname", "localhost"]
                    command += ["--cluster-preferred-endpoint-type", "hostname"]
            with (self._directory / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, "--dir", str(self._directory), *self._tls_options, *self.options], stdout=log, stderr=log
                )
            wait_until(self._answers_or_ended, START_S, explain=lambda: (self._directory / "log").read_text())
            if self._process.poll() is None:
                self._started = True
                return self
            if not self._started:  # another process took a port
                self.port, self.bus_port, self.tls_port = free_ports(3)
        raise AssertionError((self._directory / "log").read_text())

    def _answers_or_ended(self) -> bool:
        return (self._process is not None and self._process.poll() is not None) or self._answers()

    def _answers(self) -> bool:
        try:
            return self.command("PING")[:1] in (b"+", b"-")
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Send one command, and return the first 64 KiB of what is answered."""
        data = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.socket(socket.AF_UNIX) as connected:  # its port may be in another network namespace
            connected.settimeout(5.0)
            connected.connect(str(self._directory / "socket"))
            connected.sendall(b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in data))
            return connected.recv(65536)

    @property
    def node_id(self) -> str:
        """Of a cluster's."""
        return self.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()

    @property
    def objects(self) -> int:
        return int(self.command("DBSIZE")[1:])

    def block_keys(self) -> list[bytes]:
        return [line for line in self.command("KEYS", "*").split(b"\r\n") if line.startswith(b"kvoffd/")]

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class RedisCluster(Starting):
    """Three masters, each with a third of the slots; with a certificate, they speak TLS among themselves too."""

    def __init__(self, *more: str, certificate: Certificate | None = None) -> None:
        self.options = (
            *more,
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "10000",  # a server that waits for a CPU has not failed
            "--repl-diskless-sync-delay",
            "0",
            "--cluster-require-full-coverage",
            "no",
        )
        self.servers = [RedisServer(*self.options, certificate=certificate) for _ in range(3)]

    @property
    def url(self) -> str:
        return self.servers[0].url.replace("://", "+cluster://")

    def flush(self) -> None:
        for server in self.servers:
            server.command("FLUSHALL")

    def start(self) -> Self:
        for number, server in enumerate(self.servers):
            server.start()
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            assert server.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
            # As redis-cli does: the servers need not agree on who is the later one first.
            assert server.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == b"+OK\r\n"
        for server in self.servers[1:]:
            self.meet(server)
        wait_until(self._whole, 20.0, explain=lambda: self.servers[0].command("CLUSTER", "NODES"))
        return self

    def meet(self, server: RedisServer) -> None:
        """Have a server join the cluster."""
        port = server.tls_port if server.certificate else server.port
        met = self.servers[0].command("CLUSTER", "MEET", "127.0.0.1", str(port), str(server.bus_port))
        assert met == b"+OK\r\n"

    def _whole(self) -> bool:
        infos = [server.command("CLUSTER", "INFO") for server in self.servers]
        return all(b"cluster_state:ok" in info and b"cluster_slots_assigned:16384" in info for info in infos)

    def close(self) -> None:
        for server in self.servers:
            server.close()
