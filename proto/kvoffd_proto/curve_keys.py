"""Keys of administration over TCP, which is encrypted and authenticated by CURVE (ZeroMQ RFC 26).

A key is 32 bytes, written as 40 characters of Z85 (ZeroMQ RFC 32). A secret file holds one key; a file of public keys
holds one on a line, and behind it a name where there is one. Lines that begin with "#" are comments, in both.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

KEY_CHARACTERS = 40

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES = 1 << 20


class CurveKeyError(Exception):
    """A key or a file of keys cannot be used. The text is a sentence that says what to do."""


def is_key(text: str) -> bool:
    """Whether ``text`` is a key as Z85 writes it."""
    return _KEY.fullmatch(text) is not None


def read_secret_key(path: Path) -> str:
    """Return the secret key in ``path``. Raises CurveKeyError, also for a file that everybody may read."""
    lines = _lines(path, secret=True)
    if len(lines) != 1 or not is_key(lines[0]):
        raise CurveKeyError(f"{path} holds no secret key; make a pair of files with `kvoffd-cli keygen FILE`.")
    return lines[0]


def read_public_keys(path: Path) -> dict[str, str]:
    """Return the administrators' names by public key. Raises CurveKeyError."""
    found: dict[str, str] = {}
    for line in _lines(path, secret=False):
        key, _, name = line.partition(" ")
        if not is_key(key):
            raise CurveKeyError(
                f"{path}: a line begins with {key[:50]!r}, which is no public key; one has {KEY_CHARACTERS} "
                "characters, as `kvoffd-cli keygen` writes them."
            )
        found[key] = name.strip()
    return found


def _lines(path: Path, *, secret: bool) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise CurveKeyError(f"{path} is no file of keys.")
            if secret and status.st_mode & stat.S_IROTH:
                why = "must hold a secret key, no public one, and everybody may read it"
                raise CurveKeyError(f"{path} {why}; `chmod 600 {path}`.")
            text = file.read().decode()
    except OSError as error:
        raise CurveKeyError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CurveKeyError(f"{path} is no file of keys.") from error
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
