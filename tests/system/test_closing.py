"""Which descriptors of clients are taken."""

from __future__ import annotations

import os
import threading

import pytest

from kvoffd.errors import UnsafeSegment
from kvoffd.system.closing import WAITING_CLOSES, Closer, check_descriptor
from tests.kit.waiting import wait_until


@pytest.mark.parametrize("name", ["/dev/nvidiactl", "/dmabuf:", "anon_inode:[dmabuf]"])
def test_a_file_that_only_has_the_name_of_a_drivers_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file system of the client's own may have such files, and would be asked when they are closed."""
    with open(__file__, "rb") as file:
        monkeypatch.setattr(os, "readlink", lambda _: name)
        with pytest.raises(UnsafeSegment):
            check_descriptor(file.fileno())


def test_a_device_file_of_the_driver_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "rb") as device:
        monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
        check_descriptor(device.fileno())


def test_where_no_more_threads_can_be_had_one_closes_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closer = Closer()
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(4 * WAITING_CLOSES)]
    for fd in fds:
        closer.close(fd)
    wait_until(lambda: not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds))
    closer.stop()
