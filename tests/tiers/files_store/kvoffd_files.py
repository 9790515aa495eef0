"""A shared store of another package: files in a directory that all nodes see, ``files:///DIRECTORY``.

It is the least that a store can be. It waits for the file system without a deadline, and cannot be interrupted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvoffd.tiers.shared.store import Credentials, GetRequest, Store, StoreError

NO_ROOM = (28, 122)
"""ENOSPC, EDQUOT."""


class Files(Store):
    ask_deadline_s = 0.1
    poll_s = 5.0
    most_window_keys = 1024
    keys_at_once = 1024
    blocks_at_once, bytes_at_once = 8, 8 << 20

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def _path(self, key: bytes) -> Path:
        return self._directory / key.decode().replace("/", "_")

    def connect(self) -> None:
        if not self._directory.is_dir():
            raise StoreError("unreachable", f"{self._directory} is no directory here; mount it.", final=True)

    def ping(self, deadline: float) -> None:
        self.connect()

    def ask(
        self, generation_key: bytes, keys: Sequence[bytes], deadline: float, *, prefix: bool
    ) -> tuple[int, list[bool]]:
        path = self._path(generation_key)
        return int(path.read_text()) if path.exists() else 0, [self._path(key).exists() for key in keys]

    def touch(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        there = []
        for key in keys:
            try:
                os.utime(self._path(key))
                there.append(True)
            except FileNotFoundError:
                there.append(False)
        return there

    def get(self, requests: Sequence[GetRequest], deadline: float) -> Iterator[bytes | None]:
        for request in requests:
            try:
                with self._path(request.key).open("rb") as file:
                    if os.fstat(file.fileno()).st_size != request.header_bytes + sum(map(len, request.views)):
                        yield b""
                        continue
                    header = file.read(request.header_bytes)
                    for view in request.views:
                        file.readinto(view)
                yield header
            except FileNotFoundError:
                yield None

    def put(self, objects: Sequence[tuple[bytes, Sequence[bytes | memoryview]]], deadline: float) -> list[bool]:
        return [self._put(self._path(key), parts) for key, parts in objects]

    def _put(self, path: Path, parts: Sequence[bytes | memoryview]) -> bool:
        new = path.with_suffix(f".{os.getpid()}-{id(self)}")
        try:
            with new.open("wb") as file:
                file.writelines(parts)
            new.rename(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            if error.errno in NO_ROOM:
                return False
            raise StoreError("disconnected", f"{path} cannot be written: {error}.") from error
        return True

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def raise_generation(self, generation_key: bytes, seen: int, generation: int, deadline: float) -> int:
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._path(generation_key)
            now = int(path.read_text()) if path.exists() else 0
            if now < generation:
                self._put(path, [b"%d" % generation])
            return max(now, generation)

    def close(self) -> None: ...

    def interrupt(self) -> None: ...


def open_files(url: str, credentials: Credentials) -> Callable[[], Store]:
    directory = unquote(urlsplit(url).path)
    return lambda: Files(directory)
