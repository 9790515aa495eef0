"""The C part of kvoffd: one library, which ``hatch_build.py`` compiles when kvoffd is installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvoffd.errors import KvoffdError

LIBRARY = Path(__file__).parents[1] / "libkvoffd.so"
VERSION = 14
"""Version of the functions and structures that C and Python share. Raise it with ``kvoffd_version`` (cache/blocks.c)
when one changes: an old library would read wrong memory."""


if TYPE_CHECKING:  # typeshed's ctypes.Structure has every attribute
    Structure = object
else:
    Structure = ctypes.Structure


class NotCompiled(KvoffdError):
    """The library is missing or cannot be loaded. The message says what to do."""


class SlotIndex(ctypes.Structure):
    """``struct slot_index`` of slot_index.h."""

    _fields_ = (
        ("segments", ctypes.c_void_p),
        ("bits", ctypes.c_uint64),
        ("shift", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64 * 2),
    )


class Native:
    """The library's functions; their comments are in the C files. Raises NotCompiled if ``path`` is unusable."""

    def __init__(self, path: Path = LIBRARY) -> None:
        address, text, real = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double
        number = address  # ctypes takes twice as long to pass a c_uint64
        keys = (number, text, number, number)  # group, the keys end to end, their number, bytes of each
        count = ctypes.c_uint64
        try:
            libraries = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
            found = ctypes.c_uint32.in_dll(libraries[0], "kvoffd_version").value
            if found != VERSION:
                raise OSError(f"it has version {found} instead of {VERSION}")
            without_gil, with_gil = (partial(_function, library) for library in libraries)
            columns, some = (address, address, address, number), (address, number)
            self.host_copy = without_gil("host_copy", count, *columns, *columns, address)
            self.digests = without_gil("digests", None, *columns)
            self.gpu_copy = without_gil("gpu_copy", None, address, address)
            self.plan_blocks = without_gil(
                "plan_blocks", None, address, number, number, number, text, number, text, number, text, address
            )
            self.receive = without_gil("receive", ctypes.c_int64, *(number,) * 3, *(number,) * 2, *columns)
            self.reader_work = without_gil("reader_work", ctypes.c_int, address)
            self.disk_enter = without_gil("disk_enter", count, address, *some, address)
            self.recover_records = without_gil("recover_records", None, address, address, number, number)
            self.recover_blocks = without_gil("recover_blocks", None, address)
            # The others keep the GIL: they take microseconds, less than getting it back from another thread.
            self.blocks_open = with_gil("blocks_open", ctypes.c_int, address, text)
            self.blocks_close = with_gil("blocks_close", None, address)
            self.blocks_find = with_gil("blocks_find", None, address, *keys)
            self.blocks_lookup = with_gil("blocks_lookup", None, address, *keys, number)
            self.blocks_take = with_gil("blocks_take", count, address, address, text, text, number)
            self.blocks_begin_writes = with_gil("blocks_begin_writes", None, address, address, *some, number)
            self.blocks_begin_load = with_gil(
                "blocks_begin_load", ctypes.c_int, address, address, *keys, number, number
            )
            self.blocks_publish = with_gil(
                "blocks_publish", ctypes.c_uint32, address, address, *some, address, number, address
            )
            self.blocks_set_checksum = with_gil("blocks_set_checksum", None, address, number, number)
            self.blocks_append = with_gil("blocks_append", None, address, text, *some)
            self.blocks_oldest = with_gil("blocks_oldest", count, address, text, number, number, number)
            self.blocks_drop = with_gil("blocks_drop", count, address, text, *some, number)
            self.blocks_replace = with_gil("blocks_replace", count, address, text, *some, text, number)
            self.blocks_common_group = with_gil("blocks_common_group", ctypes.c_uint32, address, *some, number)
            of_space = address, address, text, number, *some, number, number
            self.blocks_choose_victims = with_gil("blocks_choose_victims", count, *of_space)
            self.blocks_release = with_gil("blocks_release", None, address, *some)
            self.blocks_pin = with_gil("blocks_pin", None, address, *some)
            self.blocks_unpin = with_gil("blocks_unpin", count, address, *some)
            self.blocks_keys = with_gil("blocks_keys", None, address, *some, number)
            self.blocks_plan = with_gil("blocks_plan", count, address, *keys, number, address)
            self.slots_take = with_gil("slots_take", count, address, number, number, number, address, number)
            self.slots_free = with_gil("slots_free", ctypes.c_int, address, *some)
            self.reader_open = with_gil("reader_open", address, number, number)
            self.reader_stop = with_gil("reader_stop", None, address)
            self.reader_close = with_gil("reader_close", None, address)
            self.reader_add = with_gil("reader_add", None, address, address)
            self.reader_ended = with_gil("reader_ended", count, address, *some)
            self.disk_open = with_gil("disk_open", ctypes.c_int, address, text)
            self.disk_close = with_gil("disk_close", None, address)
            self.disk_find = with_gil("disk_find", None, address, *keys, address)
            self.disk_remove = with_gil("disk_remove", None, address, *some)
            of_answers = address, number, text, number, text, number, number, address, address
            self.answers_find = with_gil("answers_find", None, *of_answers)
            self.answers_note = with_gil("answers_note", None, *of_answers)
            self.blocks_record_misses = with_gil("blocks_record_misses", None, address, *keys, number)
            self.blocks_reasons = with_gil("blocks_reasons", None, address, *keys)
            self.queues_new = with_gil("queues_new", address, number, number, text)
            self.queues_free = with_gil("queues_free", None, address)
            self.queues_insert = with_gil("queues_insert", count, address, *keys, text)
            self.queues_use = with_gil("queues_use", None, address, *some)
            self.queues_remove = with_gil("queues_remove", None, address, *some, number)
            self.queues_candidates = with_gil("queues_candidates", count, address, real, *some)
            self.curve_new = with_gil("curve_new", address, address, text)
            self.curve_free = with_gil("curve_free", None, address)
            self.curve_asked = with_gil("curve_asked", None, address, address, *keys, number, number, number, number)
            self.learned_new = with_gil("learned_new", address, number, text)
            self.learned_free = with_gil("learned_free", None, address)
            self.learned_record = with_gil("learned_record", None, address, *keys, number, number, number)
            self.learned_insert = with_gil("learned_insert", count, address, *keys, number, text)
            self.learned_remove = with_gil("learned_remove", count, address, *keys)
            self.learned_forget = with_gil("learned_forget", count, address, *keys)
            self.learned_candidates = with_gil("learned_candidates", count, address, real, address, number)
            self.learned_admit = with_gil("learned_admit", count, address, *keys, number, text, number, address)
            self.learned_rejected = with_gil("learned_rejected", None, address, *keys)
            self.learned_chances = with_gil("learned_chances", None, address, *keys, number, address)
            self.learned_resume = with_gil("learned_resume", None, address)
        except (OSError, AttributeError, ValueError) as error:
            raise NotCompiled(
                f"The daemon's compiled part cannot be loaded ({error}); install kvoffd again on a machine with a C "
                "compiler (in its source tree: run make venv)."
            ) from error


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    function = getattr(library, f"kvoffd_{name}")
    function.argtypes, function.restype = arguments, result
    return cast("Callable[..., Any]", function)


native = cache(Native)
