"""Many jobs and lookups while the daemon drops, ends sessions and restarts."""

from __future__ import annotations

import random
import time
from collections import Counter

from kvoffd_client import SchedulerClient, WorkerClient
from kvoffd_client.jobs import GroupTransfer
from kvoffd_proto import messages as m
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import wait_until

TRANSFER = [GroupTransfer(0, bytes(32), bytes(4))]
KEYS = [m.GroupKeys(0, bytes(64))]


def misbehave(fake: FakeDaemon, rng: random.Random) -> None:
    try:
        match rng.randrange(6):
            case 0:
                fake.restart()
            case 1:
                fake.end_session(m.Role.WORKER)
            case 2:
                fake.send_raw(m.Role.SCHEDULER, b"\xc1")
            case 3:
                fake.drop_publications = not fake.drop_publications
            case 4:
                fake.answers[m.Submit] = lambda *_: None  # lost inside the daemon
            case _:
                fake.answers.clear()
    except LookupError:
        pass  # it is away just now


def test_every_job_gets_exactly_one_result_and_every_lookup_is_answered(
    fake: FakeDaemon, scheduler: SchedulerClient, worker: WorkerClient
) -> None:
    rng = random.Random(20)
    results: Counter[int] = Counter()
    futures = []
    job_id = 0
    ends_at = time.monotonic() + 2.0
    while time.monotonic() < ends_at:
        for _ in range(rng.randrange(30)):
            job_id += 1
            if rng.random() < 0.5:
                worker.store(job_id, TRANSFER)
            else:
                worker.load(job_id, 2**32, TRANSFER)
            futures.append(scheduler.lookup(KEYS))
            scheduler.release(futures[-1].lease_id)
        if rng.random() < 0.3:
            worker.fence(range(job_id - 5, job_id), 0.01)
        if rng.random() < 0.3:
            misbehave(fake, rng)
        results.update(result.job_id for result in worker.wait_results(0.005))
    fake.answers.clear()
    wait_until(lambda: worker.unfinished == 0)
    results.update(result.job_id for result in worker.take_results())
    assert results == Counter(range(1, job_id + 1))
    wait_until(lambda: all(future.done for future in futures))
    assert job_id > 500
    wait_until(lambda: scheduler.ready and worker.ready)
    last = scheduler.lookup(KEYS)
    assert last.wait(5)
    assert not last.failed
