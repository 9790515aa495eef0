"""Runs a program under a seccomp filter: ``python refused_calls.py ERRNO CALL PROGRAM ARGUMENT...``"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {
        "epoll_create1": 291,
        "eventfd2": 290,
        "io_setup": 206,
        "io_submit": 209,
        "madvise": 28,
        "pipe2": 293,
        "prlimit64": 302,
        "rt_sigaction": 13,
        "sched_getaffinity": 204,
        "socketpair": 53,
    },
    "aarch64": {
        "epoll_create1": 20,
        "eventfd2": 19,
        "io_setup": 0,
        "io_submit": 2,
        "madvise": 233,
        "pipe2": 59,
        "prlimit64": 261,
        "rt_sigaction": 134,
        "sched_getaffinity": 123,
        "socketpair": 199,
    },
}[platform.machine()]
_LOAD_NUMBER, _SKIP_UNLESS, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # linux/seccomp.h
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refusing(code: int, call: str) -> list[str]:
    """A command that runs what follows it under a filter that refuses one system call."""
    return [sys.executable, __file__, str(code), call]


def refuse(code: int, call: str) -> None:
    """From here on this process and what it runs get the errno ``code`` from a system call."""
    steps = [
        (_LOAD_NUMBER, 0, 0, 0),
        (_SKIP_UNLESS, 0, 1, NUMBERS[call]),
        (_RETURN, 0, 0, _ERRNO | code),
        (_RETURN, 0, 0, _ALLOW),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "the filter is refused")


if __name__ == "__main__":
    refuse(int(sys.argv[1]), sys.argv[2])
    os.execv(sys.argv[3], sys.argv[3:])
