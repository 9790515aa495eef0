"""Runs a command under what systemd makes of RestrictAddressFamilies= and MemoryDenyWriteExecute=. For x86-64.

python -m tests.kit.sandbox AF_UNIX,AF_INET kvoffd serve
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import struct
import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
LOAD, EQUALS, HAS_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOWED, REFUSED = 0x7FFF0000, 0x00050000
NUMBER, FIRST_ARGUMENT, THIRD_ARGUMENT = 0, 16, 32
MMAP, MPROTECT, SOCKET = 9, 10, 41
WRITE, EXECUTE = 2, 4
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def families(*files: str) -> str:
    """Return the address families that these files of ``deploy`` allow together."""
    text = "\n".join((DEPLOY / one).read_text() for one in files)
    return ",".join(" ".join(re.findall(r"^\s*RestrictAddressFamilies=(.+)$", text, re.M)).split())


def _filter(allowed: list[int]) -> bytes:
    steps = [(LOAD, 0, 0, NUMBER), (EQUALS, 0, len(allowed) + 2, SOCKET), (LOAD, 0, 0, FIRST_ARGUMENT)]
    steps += [(EQUALS, len(allowed) - n, 0, family) for n, family in enumerate(allowed)]
    steps += [(RETURN, 0, 0, REFUSED | errno.EAFNOSUPPORT), (LOAD, 0, 0, NUMBER)]
    steps += [(EQUALS, 0, 3, MPROTECT), (LOAD, 0, 0, THIRD_ARGUMENT), (HAS_BITS, 0, 1, EXECUTE)]
    steps += [(RETURN, 0, 0, REFUSED | errno.EPERM), (LOAD, 0, 0, NUMBER)]
    steps += [(EQUALS, 0, 4, MMAP), (LOAD, 0, 0, THIRD_ARGUMENT), (HAS_BITS, 0, 2, EXECUTE), (HAS_BITS, 0, 1, WRITE)]
    steps += [(RETURN, 0, 0, REFUSED | errno.EPERM), (RETURN, 0, 0, ALLOWED)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def main() -> None:
    code = _filter([getattr(socket, name) for name in sys.argv[1].split(",")])
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no filter is accepted")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
