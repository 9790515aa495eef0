"""``kvoffd-cli keygen``: a pair of keys for administration over TCP."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.screen import emit

SECRET_MODE = 0o600
PUBLIC_MODE = 0o644


def run_keygen(path: Path) -> int:
    """Write a secret key to ``path`` and its public half to ``path``.pub. Raises CliError where a file is there."""
    public_path = path.with_name(f"{path.name}.pub")
    for taken in (path, public_path):
        if taken.exists():
            raise CliError(f"{taken} is there already; name another file, or remove it.")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    _write(path, f"# A secret key of kvoffd. What may be given away is {public_path.name}.\n{secret}\n", SECRET_MODE)
    _write(public_path, f"{public} {path.stem}\n", PUBLIC_MODE)
    emit(f"{path} holds the secret key, {public_path} the public one: {public}")
    return 0


def _write(path: Path, text: str, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w") as file:
        file.write(text)
