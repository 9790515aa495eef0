"""The library's face: all that is public, and nothing imported before it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvoffd
import kvoffd_client
from kvoffd_client import admin_client

HEAVY = {"msgspec", "numpy", "zmq"}


def _modules_after(statement: str) -> set[str]:
    program = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_every_public_name_is_there_and_is_documented() -> None:
    named = {name for names in kvoffd_client._HOMES.values() for name in names.split()}
    assert named | {"__version__"} == set(kvoffd_client.__all__) == set(dir(kvoffd_client))
    assert all(getattr(kvoffd_client, name).__doc__ for name in named)
    assert kvoffd_client.AdminClient is admin_client.AdminClient
    assert kvoffd_client.__version__ == kvoffd.__version__
    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        _ = kvoffd_client.Client


def test_the_package_costs_nothing_before_a_name_is_used() -> None:
    assert not HEAVY & _modules_after("import kvoffd_client")
    assert "numpy" not in _modules_after("from kvoffd_client import AdminClient")
