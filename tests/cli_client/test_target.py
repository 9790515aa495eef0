"""Which namespace a name means."""

from __future__ import annotations

import pytest

from kvoffd_client import UnknownNamespace
from kvoffd_client.admin_client import one_namespace
from kvoffd_proto.admin import NamespaceInfo


def info(fingerprint: str, label: str) -> NamespaceInfo:
    return NamespaceInfo(
        namespace=bytes.fromhex(fingerprint.ljust(64, "0")),
        label=label,
        world_size=1,
        key_bytes=32,
        groups=[],
        shard_bytes=[],
        ready_blocks=0,
        ready_bytes=0,
        writing_blocks=0,
        sessions=0,
        description="{}",
    )


OPEN = [info("ab12cd34", "tiny"), info("ab12ffff", "twin"), info("00112233", "twin"), info("77770000", "ab12cd34")]


@pytest.mark.parametrize(("wanted", "index"), [("tiny", 0), ("ab12c", 3), ("AB12F", 1), ("0011", 2), ("7777", 3)])
def test_a_label_or_a_prefix_finds_one(wanted: str, index: int) -> None:
    among = OPEN if wanted != "ab12c" else [info("00", "x"), info("00", "x"), info("11", "y"), info("ab12cd34", "z")]
    assert one_namespace(among, wanted) is among[index]


@pytest.mark.parametrize("wanted", ["twin", "ab12", "ab12cd34"])
def test_several_are_refused_with_their_fingerprints(wanted: str) -> None:
    with pytest.raises(UnknownNamespace, match=r"could be any of .*ab12"):
        one_namespace(OPEN, wanted)


@pytest.mark.parametrize("wanted", ["", "ab1", "nobody", "ffff"])
def test_none_or_too_few_digits_are_refused(wanted: str) -> None:
    with pytest.raises(UnknownNamespace, match="kvoffd-cli namespaces"):
        one_namespace(OPEN, wanted)
