"""Which daemon a command is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvoffd_client.admin_client import Administration
from kvoffd_client.cli.failure import CliError
from kvoffd_proto.sockets import CurveKeyError, is_key, read_public_keys, read_secret_key


@dataclass(frozen=True)
class Remote:
    """One on another machine."""

    address: str
    server_key: str
    secret_key: str


Where: TypeAlias = Path | Remote
"""A daemon of this machine by its directory, or another."""


def remote(address: str, server_key: str | None, key_file: Path | None) -> Remote:
    """Put together what the command line says of a daemon on another machine. Raises CliError."""
    if server_key is None or key_file is None:
        raise CliError("--address needs --server-key, the daemon's public key, and --key, the file of your secret key.")
    try:
        if not is_key(server_key) or Path(server_key).is_file():
            keys = list(read_public_keys(Path(server_key)))
            if len(keys) != 1:
                raise CliError(f"--server-key: {server_key} holds {len(keys)} keys; the daemon has one.")
            server_key = keys[0]
        return Remote(address.removeprefix("tcp://"), server_key, read_secret_key(key_file))
    except CurveKeyError as error:
        raise CliError(str(error)) from error


def open_admin(where: Where) -> Administration:
    """A client of that daemon."""
    if isinstance(where, Path):
        from kvoffd_client.admin_client import AdminClient

        return AdminClient(where)
    from kvoffd_client.admin_client import RemoteAdminClient

    try:
        return RemoteAdminClient(where.address, where.server_key, where.secret_key)
    except ValueError as error:
        raise CliError(str(error)) from error
