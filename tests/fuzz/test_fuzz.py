"""Every decoder under inputs that hypothesis makes up; `make fuzz` goes further."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffd_proto import codec
from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import DECODERS
from tests.kit.amount import TIMES

quick = settings(max_examples=30 * TIMES**2, suppress_health_check=list(HealthCheck))
changes = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=4)), max_size=4)


def changed(seed: bytes, pieces: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(seed)
    for at, piece in pieces:
        at %= len(data) + 1
        data[at : at + len(piece)] = piece
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_and_right_inputs_with_some_bytes_changed(name: str) -> None:
    @quick
    @given(st.binary(max_size=512) | st.builds(changed, st.sampled_from(seeds(name)), changes))
    def check(data: bytes) -> None:
        DECODERS[name](data)
        DECODERS[name](data[: len(data) // 2])

    check()


def test_seeds_are_inputs_of_their_decoder() -> None:
    for name, decoder in DECODERS.items():
        for seed in seeds(name):
            decoder(seed)
    assert len({type(codec.decode_request(seed)) for seed in seeds("request")}) > 10
