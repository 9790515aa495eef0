"""What the daemon says it needs is the sum of the bounds that hold where memory is taken."""

from __future__ import annotations

from kvoffd.config import CONNECTIONS_BYTES, FRAMES_AT_A_TIME, OUTPUT_BYTES, Config
from kvoffd.server import connections, publisher, transport
from kvoffd.server.descriptors import most_connections


def test_the_sum_has_every_bound_of_the_sockets() -> None:
    config = Config()
    assert FRAMES_AT_A_TIME == connections.MAX_LONG_FRAMES + 2
    assert OUTPUT_BYTES == transport.MAX_ALL_UNSENT_BYTES + transport.MAX_UNSENT_BYTES + publisher.MAX_KEPT_BYTES
    subscriptions = connections.MAX_SUBSCRIPTIONS * connections.MAX_TOPIC_BYTES
    assert 2 * (connections.RECEIVE_BYTES + connections.RECEIVE_EVENTS_BYTES) + subscriptions <= CONNECTIONS_BYTES
    assert config.clients_bytes - config.namespaces_bytes - config.sessions_bytes == (
        FRAMES_AT_A_TIME * config.max_frame_bytes
        + most_connections(config.max_sessions) * CONNECTIONS_BYTES
        + OUTPUT_BYTES
    )
