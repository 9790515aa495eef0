"""The KV event stream: folding it gives the index, gaps can be filled, vLLM's format is kept."""

from __future__ import annotations

from kvoffd_client import SharedMemory
from kvoffd_proto import events
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.router_daemon import replay
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, key, keys

PAGE = 16384


def jobs_of(daemon: DaemonProcess) -> str:
    return f"ipc://{daemon.directory}/jobs.sock"


def fold(messages: list[tuple[bytes, int, bytes]]) -> dict[bytes, set[tuple[int, bytes]]]:
    index: dict[bytes, set[tuple[int, bytes]]] = {}
    for topic, _, payload in messages:
        here = index.setdefault(topic, set())
        for event in events.decode_event_batch(payload).events:
            if isinstance(event, events.AllBlocksCleared):
                here.clear()
            elif isinstance(event, events.BlockStored):
                here |= {(event.group_idx, block) for block in event.block_hashes}
            else:
                here -= {(event.group_idx, block) for block in event.block_hashes}
    return index


def test_folding_the_stream_from_the_start_gives_the_index():
    with DaemonProcess("1MiB", leased_share="1") as daemon, SharedMemory(128 * PAGE, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
            worker.open_namespace()
            scheduler.open_namespace()
            registration = worker.register(memory)
            for job in range(32):  # twice what the pool holds
                numbers = range(job * 4, job * 4 + 4)
                assert worker.store(registration, job, keys(*numbers), ids(*numbers)).ok
            scheduler.ask(m.Invalidate, NAMESPACE, [m.GroupKeys(0, keys(126, 127))])
            states = scheduler.lookup(1, keys(*range(128))).states[0]
            index = {(0, key(number)) for number, state in enumerate(states) if state == 2}
            assert 0 < len(index) < 128
            messages = replay(jobs_of(daemon), 0)
            assert [sequence for _, sequence, _ in messages] == list(range(len(messages)))
            assert fold(messages)[events.kv_topic(NAMESPACE)] == index


def test_a_replay_begins_where_it_is_asked_to(daemon):
    with WireClient(daemon.directory) as worker, SharedMemory(8 * PAGE, "test") as memory:
        worker.open_namespace()
        registration = worker.register(memory)
        for job in range(3):
            worker.store(registration, job, keys(job), ids(job))
        assert [sequence for _, sequence, _ in replay(jobs_of(daemon), 2)] == [2, 3]
        assert replay(jobs_of(daemon), 99) == []


def test_the_oldest_messages_are_forgotten_beyond_the_buffer():
    with DaemonProcess(event_buffer_steps="2") as daemon, WireClient(daemon.directory) as worker:
        for number in range(5):
            worker.open_namespace(bytes([number]) * 32)
        assert [sequence for _, sequence, _ in replay(jobs_of(daemon), 0)] == [3, 4]


def test_a_new_namespace_is_announced_as_empty(daemon):
    with WireClient(daemon.directory) as worker:
        worker.open_namespace()
        ((topic, sequence, payload),) = replay(jobs_of(daemon), 0)
        assert (topic, sequence) == (events.kv_topic(NAMESPACE), 0)
        assert events.decode_event_batch(payload).events == [events.AllBlocksCleared()]
