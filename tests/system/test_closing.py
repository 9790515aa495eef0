"""Which descriptors of clients are taken."""

from __future__ import annotations

import os

import pytest

from kvoffd.errors import UnsafeSegment
from kvoffd.system.closing import check_descriptor


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
