"""Nodes in network namespaces of their own, and a link between them that can be slow or cut. For root.

Each has a TUN device, and a thread of the test carries packets between them: kernels without ``netem`` can delay too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter, deque

from kvoffd_client.session import Closing

from .require import require

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 9000


class Network(Closing):
    """
    Attributes:
        delay_s: time that each packet takes.
        cut: whether packets are lost.
        apart: nodes that are cut off from all others, and not from each other.
        loss: part of all packets that are lost.
        sent: packets that each node has sent to others.
        only_port: by node, the TCP port of it that others' packets reach, and may come from; all without an entry. As a
            NetworkPolicy, which drops the others.
    """

    def __init__(self, nodes: int) -> None:
        require("root", os.geteuid() == 0 and shutil.which("ip"), "namespaces need root and the command ip")
        self.delay_s, self.cut = 0.0, False
        self.apart: frozenset[int] = frozenset()
        self.loss, self._chance = 0.0, random.Random(1)
        self.sent = Counter[int]()
        self.only_port: dict[int, int] = {}
        self._names = [f"kvoffd-{os.getpid()}-{number}" for number in range(nodes)]
        self._waiting: deque[tuple[float, int, bytes]] = deque()
        self._closed = threading.Event()
        self._fds: list[int] = []
        try:
            for number in range(nodes):
                self._add(number)
        except subprocess.CalledProcessError as error:
            self.close()
            require("root", False, f"namespaces are not permitted here: {error.stderr}")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def inside(self, number: int) -> list[str]:
        """Return the command that runs what follows it as that node."""
        return ["ip", "netns", "exec", self._names[number]]

    def set_link(self, number: int, state: str) -> None:
        """Set the node's device ``up`` or ``down``."""
        _ip("-n", self._names[number], "link", "set", "tun0", state)

    def _add(self, number: int) -> None:
        name = self._names[number]
        _ip("netns", "add", name)
        thread = threading.Thread(target=self._open_tun, args=(name,))
        thread.start()
        thread.join()
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "tun0", "mtu", str(MTU))
        _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "tun0")
        self.set_link(number, "up")

    def _open_tun(self, name: str) -> None:
        """Open a device of a namespace; this thread, which ends then, is moved there."""
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        self._fds.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(self._fds[-1], TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))

    def _carry(self) -> None:
        while not self._closed.is_set():
            due = self._waiting[0][0] - time.monotonic() if self._waiting else 0.05
            for fd in select.select(self._fds, [], [], min(0.05, max(0.0, due)))[0]:
                self._take(fd)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, to, packet = self._waiting.popleft()
                try:
                    os.write(to, packet)
                except OSError:
                    continue  # its device is down

    def _take(self, fd: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, MTU)
            except OSError:
                return
            to = packet[19] - 1  # the last byte of an IPv4 destination
            if packet[0] >> 4 != 4 or self.cut or not 0 <= to < len(self._fds):
                continue
            sender = packet[15] - 1
            self.sent[sender] += 1
            if (sender in self.apart) is not (to in self.apart) or (self.loss and self._chance.random() < self.loss):
                continue
            ports = struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))
            ends = zip((sender, to), ports, strict=True)
            if all(port == self.only_port.get(node, port) for node, port in ends):
                self._waiting.append((time.monotonic() + self.delay_s, self._fds[to], packet))

    def close(self) -> None:
        self._closed.set()
        if hasattr(self, "_thread"):
            self._thread.join()
        for fd in self._fds:
            os.close(fd)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
