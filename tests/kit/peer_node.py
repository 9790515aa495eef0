"""A daemon that lends to peers and reads from them, or shares a store with other nodes, with an engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvoffd_client import AdminClient, GroupSpec, NamespaceSpec
from kvoffd_client.testing import FakeEngine

from .daemon import DaemonProcess
from .waiting import wait_until
from .wire import SharedStats, books, keys

PAGE_BYTES, BLOCKS, DEADLINE_S = 65536, 8, 60.0
LOG_CHARACTERS = 4000
"""Of a daemon's log, at its end, in the message of a wait that failed."""


class Node:
    """A daemon that lends at ``address``, if not empty, and reads from ``peers``, with an engine."""

    def __init__(
        self,
        secret: Path | None,
        address: str,
        *peers: str,
        pool_size: str = "128MiB",
        page_bytes: int = PAGE_BYTES,
        before: Sequence[str] = (),
        directory: Path | None = None,
        **flags: Any,
    ) -> None:
        if secret:
            flags["peer_secret_file"] = str(secret)
        if address:
            flags["peer_listen"] = address
        if peers:
            flags["peers"] = ",".join(peers)
        self.daemon = DaemonProcess(pool_size, directory, before=before, **flags)
        self._page_bytes, self.address = page_bytes, address
        self.spec = NamespaceSpec.named("peers", groups=[GroupSpec("full_attention", 16)], page_bytes=page_bytes)

    def __enter__(self) -> Self:
        self.daemon.start()
        self.engine = FakeEngine(self.daemon.directory, self.spec, page_bytes=self._page_bytes, blocks=2 * BLOCKS)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()
        self.daemon.close()

    def restart(self) -> None:
        """Kill the daemon, and start one with an empty pool."""
        self.daemon.kill()
        self.daemon.start()
        assert self.engine.wait_ready(DEADLINE_S)

    @property
    def peers(self) -> list[SharedStats]:
        return books(self.daemon.directory).said.shared

    @property
    def peer(self) -> SharedStats:
        (peer,) = self.peers
        return peer

    def _state(self) -> str:
        """What a wait that failed needs to be understood: its directory is gone when somebody reads of it."""
        log = self.daemon.log[-LOG_CHARACTERS:]
        return f"peers {self.peers}\nproblems {self.problems}\nhelper {self.helper}\n{log}"

    @property
    def problems(self) -> list[str]:
        return list(books(self.daemon.directory).problems)

    @property
    def helper(self) -> int:
        """Process id of its helper; 0 for none. A forked one has its fork server's command line, which names it."""
        children = Path(f"/proc/{self.daemon.pid}/task").glob("*/children")
        for child in " ".join(one.read_text() for one in children).split():
            try:
                if b"_helper" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
            except OSError:  # it has just ended
                continue
        return 0

    @property
    def lends(self) -> bool:
        """Whether its helper has started."""
        lent = books(self.daemon.directory).said.lent
        return lent is not None and lent.up

    def wait_helper(self) -> int:
        wait_until(lambda: self.helper, DEADLINE_S)
        return self.helper

    def kill_helper(self) -> None:
        os.kill(self.wait_helper(), signal.SIGKILL)

    def wait_up(self) -> None:
        wait_until(lambda: all(one.up for one in self.peers), DEADLINE_S, explain=self._state)

    def store(self, first: int, seed: int) -> list[int]:
        self.engine.fill(range(BLOCKS), seed)
        assert self.engine.store(keys(*range(first, first + BLOCKS)), range(BLOCKS)).ok
        return self.engine.checksums(range(BLOCKS))

    def clear(self) -> None:
        with AdminClient(self.daemon.directory) as admin:
            admin.clear(self.spec.fingerprint)

    def clear_all_nodes(self) -> int:
        """As ``kvoffd-cli clear NAME --all-nodes``; return the number of blocks that this node has dropped."""
        with AdminClient(self.daemon.directory) as admin:
            return admin.reset_fleet(self.spec.fingerprint)

    def most_found(self, first: int, seconds: float) -> int:
        """Return how many blocks lookups find at most in this time."""
        until, wanted, most = time.monotonic() + seconds, keys(*range(first, first + BLOCKS)), 0
        while time.monotonic() < until:
            most = max(most, self.engine.lookup(wanted))
            time.sleep(0.02)
        return most

    def load(self, first: int, peer: str = "") -> list[int]:
        """Look up until all is there, load, and return the checksums."""
        wanted = keys(*range(first, first + BLOCKS))
        wait_until(lambda: self.engine.lookup(wanted, peer=peer) == BLOCKS, DEADLINE_S, explain=self._state)
        assert self.engine.load(wanted, range(BLOCKS, 2 * BLOCKS)).ok
        return self.engine.checksums(range(BLOCKS, 2 * BLOCKS))
