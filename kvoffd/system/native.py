"""The compiled part of kvoffd: one library, which ``hatch_build.py`` builds from C when kvoffd is installed."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvoffd.errors import KvoffdError

LIBRARY = Path(__file__).parents[1] / "libkvoffd.so"


class NotCompiled(KvoffdError):
    """The library is missing or cannot be loaded. The message says what to do."""


class Native:
    """The library's functions, which the C files of ``cache``, ``cache/learned``, ``pool`` and ``transfer`` describe.

    Raises:
        NotCompiled: there is no such library at ``path``.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        count, address, text = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
        try:
            without_gil, with_gil = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
            self.host_copy = without_gil.kvoffd_host_copy
            self.gpu_copy = without_gil.kvoffd_gpu_copy
            self.gpu_wait = without_gil.kvoffd_gpu_wait
            self.scan_prepare = without_gil.kvoffd_scan_prepare
            self.scan = without_gil.kvoffd_scan
            self.group_slots = without_gil.kvoffd_group_slots
            # These take microseconds, less than to get the GIL back from whoever else wants it.
            self.copied = with_gil.kvoffd_copied
            self.index_new = with_gil.kvoffd_index_new
            self.index_free = with_gil.kvoffd_index_free
            self.index_nbytes = with_gil.kvoffd_index_nbytes
            self.index_find = with_gil.kvoffd_index_find
            self.index_add = with_gil.kvoffd_index_add
            self.index_set = with_gil.kvoffd_index_set
            self.index_remove = with_gil.kvoffd_index_remove
            self.note_reasons = with_gil.kvoffd_note_reasons
            self.count_reasons = with_gil.kvoffd_count_reasons
            self.curve_new = with_gil.kvoffd_curve_new
            self.curve_free = with_gil.kvoffd_curve_free
            self.curve_asked = with_gil.kvoffd_curve_asked
            self.learned_new = with_gil.kvoffd_learned_new
            self.learned_free = with_gil.kvoffd_learned_free
            self.learned_note = with_gil.kvoffd_learned_note
            self.learned_pass = with_gil.kvoffd_learned_pass
            self.learned_learn = with_gil.kvoffd_learned_learn
            self.learned_insert = with_gil.kvoffd_learned_insert
            self.learned_remove = with_gil.kvoffd_learned_remove
            self.learned_candidates = with_gil.kvoffd_learned_candidates
            self.learned_offers = with_gil.kvoffd_learned_offers
            self.learned_declined = with_gil.kvoffd_learned_declined
            self.learned_classes = with_gil.kvoffd_learned_classes
            self.learned_key = with_gil.kvoffd_learned_key
            self.learned_begin_record = with_gil.kvoffd_learned_begin_record
            self.learned_record = with_gil.kvoffd_learned_record
            self.learned_counts_bytes = with_gil.kvoffd_learned_counts_bytes
            self.learned_counts = with_gil.kvoffd_learned_counts
            self.learned_go_on = with_gil.kvoffd_learned_go_on
        except (OSError, AttributeError) as error:
            raise NotCompiled(
                f"The daemon's compiled part cannot be loaded ({error}); install kvoffd again where there is a C "
                "compiler."
            ) from error
        self.host_copy.argtypes, self.host_copy.restype = (address, address, count), None
        self.gpu_copy.argtypes, self.gpu_copy.restype = (address, address), None
        self.gpu_wait.argtypes, self.gpu_wait.restype = (address, address), None
        self.scan_prepare.argtypes, self.scan_prepare.restype = (address,), None
        self.group_slots.argtypes, self.group_slots.restype = (address,), None
        self.scan.argtypes, self.scan.restype = (address, address, count, count), None
        self.copied.argtypes, self.copied.restype = (address,), count
        state = ctypes.c_uint8
        self.index_new.argtypes, self.index_new.restype = (count, text), address
        self.index_free.argtypes, self.index_free.restype = (address,), None
        self.index_nbytes.argtypes, self.index_nbytes.restype = (address,), count
        self.index_find.argtypes, self.index_find.restype = (address, text, count, address, address), None
        self.index_add.argtypes, self.index_add.restype = (address, text, count, state, address), count
        self.index_set.argtypes, self.index_set.restype = (address, text, count, state), count
        self.index_remove.argtypes, self.index_remove.restype = (address, text, count, address), count
        self.note_reasons.argtypes, self.note_reasons.restype = (address, address, count, text, count, count), None
        self.count_reasons.argtypes = (address, address, count, text, count, text, address)
        self.count_reasons.restype = None
        real = ctypes.c_double
        keys = (count, text, count, count)  # whose, end to end, how many, bytes of each
        self.curve_new.argtypes, self.curve_new.restype = (address, text), address
        self.curve_free.argtypes, self.curve_free.restype = (address,), None
        self.curve_asked.argtypes = (address, address, count, text, count, count, count, real, count)
        self.curve_asked.restype = None
        self.learned_new.argtypes, self.learned_new.restype = (count, text), address
        self.learned_free.argtypes, self.learned_free.restype = (address,), None
        self.learned_note.argtypes, self.learned_note.restype = (address, *keys, count, count), count
        self.learned_pass.argtypes, self.learned_pass.restype = (address, count, count), count
        self.learned_learn.argtypes, self.learned_learn.restype = (address, real), None
        self.learned_insert.argtypes, self.learned_insert.restype = (address, *keys, count, address, count), count
        self.learned_remove.argtypes, self.learned_remove.restype = (address, *keys, address), count
        self.learned_candidates.argtypes, self.learned_candidates.restype = (address, real, address, count), count
        self.learned_offers.argtypes = (address, *keys, count, address, count, address)
        self.learned_offers.restype = count
        self.learned_declined.argtypes, self.learned_declined.restype = (address, *keys), None
        self.learned_classes.argtypes, self.learned_classes.restype = (address, text), None
        self.learned_key.argtypes, self.learned_key.restype = (address, count, text, count, text), count
        self.learned_begin_record.argtypes, self.learned_begin_record.restype = (address,), None
        self.learned_record.argtypes, self.learned_record.restype = (address, text, count), count
        self.learned_counts_bytes.argtypes, self.learned_counts_bytes.restype = (), count
        self.learned_counts.argtypes, self.learned_counts.restype = (address, text), None
        self.learned_go_on.argtypes, self.learned_go_on.restype = (address, text, count), count


native = functools.cache(Native)
