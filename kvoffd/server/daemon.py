"""The daemon's life cycle: lock the directory, open the pool, serve, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack

import uvloop

from kvoffd.cache.cache import Cache
from kvoffd.cache.policies import make_policy
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.observe.logging import log_what_python_prints
from kvoffd.server.engine_memory import open_gpus
from kvoffd.server.events import EventLog
from kvoffd.server.http import HttpServer
from kvoffd.server.lifeline import LifelineServer
from kvoffd.server.page import PageFacts, page_facts
from kvoffd.server.persistence import MAX_STATE_BYTES, STATE_FILE, PolicyFile, State, open_state_file
from kvoffd.server.pool_opening import StartProgress, log_pages, open_pool, restore
from kvoffd.server.service import Service
from kvoffd.server.sockets import Sockets
from kvoffd.server.tier_supervisor import OpenStores, TierSupervisor, make_tiering, shared_stores
from kvoffd.system.directory import DaemonDirectory
from kvoffd.system.limits import check_loop_calls, raise_descriptor_limit
from kvoffd.system.mappings import PageFaulter
from kvoffd.system.native import native
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.system.systemd import Notifier, take_stored_fds
from kvoffd.transfer.engine import HostEngine, new_work
from kvoffd_proto.admin import HealthLevel, HealthProblem, HealthReply
from kvoffd_proto.cuda import descriptor_limits
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

TICK_S = 0.25
# The scrubber pauses for this multiple of a step's duration. A low thread priority would be worse: the thread might be
# descheduled while it holds the GIL.
SCRUB_REST = 3.0
ABANDON_S = 1.0
"""Time for jobs to end that are stopped at the shutdown's deadline."""
LINGER_MS = 500
"""Time to send the last replies and events."""
SLOW_CALLS = 2
"""Threads for long calls: one maps pages, one computes checksums."""
ENGINE_CLOSE_S = 2.0
DISKS_CLOSE_S = 5.0
GPUS_CLOSE_S = 5.0
"""Times for copies, tiers and drivers to end; one that hangs is abandoned."""
EXIT_STUCK = 70  # EX_SOFTWARE of sysexits.h
EXIT_GPU_LOST = 75  # EX_TEMPFAIL: only a new process can use CUDA again
# Copy threads and the loop exchange the GIL thousands of times a second; with CPython's default of 5 ms a lookup could
# wait that long for a copy thread.
SWITCH_INTERVAL_S = 0.0001


def run(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then return 0. Raises KvoffdError if it cannot start."""
    log_what_python_prints()
    daemon: Daemon | None = None
    try:
        _prepare()
        daemon = Daemon(config)
        uvloop.run(daemon.serve())
    except (OSError, MemoryError) as error:
        if daemon is not None and daemon.served:
            raise
        logger.debug("The daemon cannot start.", exc_info=True)
        raise KvoffdError(
            f"The daemon cannot start: a system call failed ({str(error) or 'out of memory'}); see the limits (ulimit "
            "-a) and the container's seccomp filter."
        ) from error
    if daemon.gpu_lost or daemon.copy_stuck:
        logging.shutdown()
        # Skips the driver's exit handlers, which may hang.
        os._exit(EXIT_GPU_LOST if daemon.gpu_lost else 0)
    return 0


def _prepare() -> None:
    """Set up the process. Raises KvoffdError, OSError."""
    native()  # an error must come before the pool is touched, which may take minutes
    os.umask(0o007)
    raise_descriptor_limit()
    check_loop_calls()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class Daemon:
    """One daemon; ``serve`` runs it from start to end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._notifier = Notifier(os.environ)
        self._stored_fds = take_stored_fds(os.environ)
        self._directory = DaemonDirectory(config.directory)
        self._progress = StartProgress(config.pool_bytes, self._notifier, self._directory.tell_starting)
        self._stop = asyncio.Event()
        self._signals = [signal.SIGTERM, signal.SIGINT]
        self._signalled = False
        self.copy_stuck = False
        """Whether a thread hangs at the end that may still use the pool or an engine's memory: they stay mapped."""
        self.gpu_lost = False
        """Whether the daemon stops because its context on a GPU is lost."""
        self.served = False
        """Whether the sockets were opened, even if they are closed again."""
        self._socket_warnings = RareWarnings(logger)
        self._tick_failures, self._scrub_failures = (RareWarnings(logger, logging.ERROR) for _ in range(2))
        self._page_mapper: asyncio.Future[None] | None = None
        self._scrubbing: asyncio.Task[None] | None = None
        self._serving = False
        """Whether the sockets are open."""
        self._shared_stores: OpenStores = ()

    async def serve(self) -> None:
        """Start, serve until a signal, stop. Raises KvoffdError if it cannot start."""
        loop = asyncio.get_running_loop()
        # Without a number of threads asyncio asks for the process's CPUs, which a seccomp filter may refuse.
        loop.set_default_executor(ThreadPoolExecutor(SLOW_CALLS, "kvoffd-slow"))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup(1)
            self._signals.append(signal.SIGHUP)
        for number in self._signals:
            loop.add_signal_handler(number, self._on_signal, number)
        # Read before the pool is touched, which may take minutes.
        self._shared_stores = shared_stores(self._config)
        self._directory.acquire()
        async with AsyncExitStack() as ends:  # the last is called first
            ends.callback(self._release_directory)
            ends.callback(self._notifier.close)
            if (http := self._start_http()) is not None:
                ends.callback(http.close)
            self._state = State(open_state_file(self._config, STATE_FILE, MAX_STATE_BYTES))
            ends.callback(self._close_state)
            self._state.file.claim()
            self._state.restore()
            self._pool = await asyncio.to_thread(
                open_pool,
                self._config,
                self._notifier,
                self._stored_fds,
                self._stop.is_set,
                self._progress,
                was_killed=self._directory.was_killed,
            )
            ends.push_async_callback(self._close_pool)
            if not self._stop.is_set():
                await self._serve_pool()
        logger.info("Stopped.")

    def _release_directory(self) -> None:
        self._directory.release(served=self.served, keep_lock=self.copy_stuck)

    def _close_state(self) -> None:
        """Close the state file of a daemon that never served; otherwise it was closed among its parts' ends."""
        if not self.served:
            self._state.file.close()

    def _on_signal(self, number: int) -> None:
        """Begin to stop; at the second signal, exit at once: running jobs fail, and the pool is as after a kill."""
        if not self._signalled:
            self._signalled = True
            self._stop.set()
            return
        logger.warning("A second signal came: the daemon exits at once, and running jobs fail.")
        self._directory.release(served=self.served, keep_lock=True)
        logging.shutdown()
        os._exit(128 + number)

    def _start_http(self) -> HttpServer | None:
        """Start HTTP before the pool is touched, which may take minutes: for probes, and to fail early."""
        if not self._config.http_address:
            return None
        http = HttpServer(self._config.http_address, self._config.http_hosts, self, asyncio.get_running_loop())
        http.start()
        return http

    def health(self) -> HealthReply:
        """Return the health for HTTP. Called in the loop's thread."""
        if self._serving:
            return self._service.health.reply()
        stopping = self._stop.is_set()
        sentence = f"The daemon is {'stopping' if stopping else self._progress.text}."
        return HealthReply(0, HealthLevel.DOWN, [HealthProblem("stopping" if stopping else "starting", sentence)])

    def stats(self) -> DaemonStats | None:
        """Return the statistics for HTTP; None while the daemon starts or stops. Called in the loop's thread."""
        if not self._serving:
            return None
        with self._service.loop_watch:
            return self._service.statistics.read()

    def page_facts(self) -> PageFacts | None:
        """Return what the page shows; None while the daemon starts or stops. Called in the loop's thread."""
        if not self._serving:
            return None
        with self._service.loop_watch:
            return page_facts(self._service)

    def unreachable(self) -> str:
        """Return a sentence why no engine can connect; empty if they can. For HTTP, in any thread."""
        return self._directory.lost_sockets() if self._serving else ""

    async def _serve_pool(self) -> None:
        """Build the parts over the pool, serve until a signal, and end them.

        At the end running jobs finish, signals are handled without the loop, the totals are saved and the parts end.
        """
        async with AsyncExitStack() as ends:  # the last is called first
            self._build_service(ends)
            # Modules and parts live as long as the daemon. Without this a full collection, one per few thousand
            # promotions, would block the loop for 40 ms.
            gc.freeze()
            ends.callback(self._service.save_totals)
            ends.callback(self._leave_loop)
            await self._startup()
            ends.push_async_callback(self._finish_jobs)
            await self._main_loop()

    def _build_service(self, ends: AsyncExitStack) -> None:
        """Create the parts, over the pool, without opening sockets. Each part's end is added to ``ends``.

        They end in this order, last added first: tiers, policy file, state file, copies on the host, copies on GPUs,
        posted calls (the ends of these copies), lifelines (which end the sessions), mappings, GPUs, sockets.
        """
        config, pool, copy_work = self._config, self._pool, new_work()
        sockets = self._sockets = Sockets(config, self._directory)
        ends.callback(sockets.close, LINGER_MS)
        gpus = open_gpus(config, pool, copy_work)
        # Otherwise the driver unpins the pool at the exit.
        ends.callback(self._end_use, gpus.close, GPUS_CLOSE_S)
        page_faulter = PageFaulter()
        ends.callback(page_faulter.close)
        # Their place in the order of the ends: they end here, but need the service, so they are made last.
        lifelines_end = ends.enter_context(ExitStack())
        ends.callback(sockets.finish_posted)
        ends.callback(self._end_use, gpus.stop, ENGINE_CLOSE_S)
        host_engine = HostEngine(copy_work, threads_per_direction=config.copy_threads)
        ends.callback(self._end_use, host_engine.close, ENGINE_CLOSE_S)
        ends.callback(self._state.file.close)  # after the tiers' end and the last totals: nothing saves later
        events = EventLog()
        cache = Cache(
            pool.slots,
            pool.table,
            make_policy(config.eviction_policy, pool.pool_bytes, pool.table.geometry.slots),
            events,
            time.monotonic,
            partial_timeout_s=config.limits.partial_timeout_s,
            lease_ttl_s=config.limits.lease_ttl_s,
            leased_share=config.limits.leased_share,
            max_leased_keys=config.limits.max_leased_keys,
            max_leases=config.limits.max_leases,
        )
        self._policy_file = PolicyFile(cache.policy, config)
        restore(cache, pool, self._policy_file, self._state, config.limits.max_namespaces)
        # Only now: closing it saves the policy's state, and an earlier daemon's must have been restored before.
        ends.callback(self._policy_file.close)
        # A post sends the replies that waited for the save.
        self._state.file.on_saved = lambda: sockets.post(lambda: None)
        tiering = None
        if config.disk or config.shared or config.peers:
            tiering = make_tiering(config, cache, events, time.monotonic, self._engines_busy, self._state)
        tier_supervisor = TierSupervisor(config, tiering, cache, pool, time.monotonic, sockets.post, self._state)
        ends.callback(self._end_use, tier_supervisor.close, DISKS_CLOSE_S)
        self._service = Service(
            config,
            cache,
            events,
            host_engine,
            gpus,
            copy_work,
            pool,
            _ProcessHost(sockets, page_faulter),
            self._state,
            tier_supervisor,
            max_attached=descriptor_limits()[0] // 2,  # the rest is for connections
        )
        self._lifelines = LifelineServer(self._service, self._directory, sockets, page_faulter)
        lifelines_end.callback(self._lifelines.close)

    def _engines_busy(self) -> bool:
        return self._service.jobs.engines_busy

    async def _startup(self) -> None:
        """Open the sockets, report that the daemon serves, and start slow work. Raises KvoffdError."""
        config = self._config
        try:
            self._sockets.open(self._service)
            self._lifelines.open()
        except OSError as error:
            raise KvoffdError(f"The sockets in {config.directory} cannot be opened: {error}.") from error
        self.served = self._serving = True
        self._directory.started()
        self._notifier.ready(f"Serving {config.directory} with a pool of {format_size(config.pool_bytes)}.")
        page = f", and a page at http://{config.http_address}/" if config.http_address else ""
        logger.info("Serving %s%s.", config.directory, page)
        self._service.tier_supervisor.start(self._shared_stores)
        if self._pool.resident:
            self._page_mapper = asyncio.get_running_loop().run_in_executor(None, self._map_pages)

    def _map_pages(self) -> None:
        """Map the pages of a reused pool, and log what they cost. Copies map what is left if it fails."""
        running = self._service.jobs.running  # the loop changes it; whether it is empty may be asked in this thread
        try:
            self._pool.map_pages(self._stop.is_set, lambda: bool(running))
            if not self._stop.is_set():
                log_pages(self._pool, self._config.pool_file)
        except Exception:  # nobody waits for the result before the stop, which must still close the pool
            logger.exception("Mapping the pool's pages failed inside the daemon; copies map the rest.")

    async def _main_loop(self) -> None:
        """Tick until a signal. systemd's watchdog is notified only after a turn of the message loop."""
        service = self._service
        service.loop_watch.start(asyncio.get_running_loop())
        try:
            while not self._stop.is_set():
                self._tick()
                if service.mapper.copy_hangs:
                    _exit_stuck()
                problem = service.health.sockets_problem = self._directory.lost_sockets()
                if problem:
                    self._socket_warnings.warn("%s", problem)
                if (lost := service.mapper.gpus.lost) is not None:
                    self._lose_gpu(lost)
                if service.scrubber.has_work and (self._scrubbing is None or self._scrubbing.done()):
                    self._scrubbing = asyncio.create_task(self._scrub())
                if self._sockets.serve():
                    self._notifier.watchdog()
                try:
                    await asyncio.wait_for(self._stop.wait(), TICK_S)
                except TimeoutError:
                    pass
        finally:
            self._stop.set()
            service.loop_watch.stop()
            if self._scrubbing is not None:
                await self._scrubbing  # ends after its step, which reads the pool

    def _tick(self) -> None:
        """Do periodic work. A failure in it is a bug, and no reason to stop serving."""
        ticks = self._service.tick, self._lifelines.tick, self._policy_file.tick
        with self._service.loop_watch:
            for tick in ticks:
                try:
                    tick()
                except Exception:
                    text = "Periodic work failed inside the daemon; it is retried. This is logged once a minute."
                    self._tick_failures.warn(text, exc_info=True)

    def _lose_gpu(self, why: str) -> None:
        """Stop as at SIGTERM, but end with EXIT_GPU_LOST."""
        logger.critical(
            "The daemon's context on a GPU is lost, and only a new process can use CUDA again: %s The daemon exits "
            "after its running jobs; engines reconnect by themselves when it is started again. The driver's log "
            "(dmesg, Xid) may say what happened.",
            why,
        )
        self.gpu_lost = True
        self._stop.set()

    async def _scrub(self) -> None:
        """Run the scrubber's steps, with pauses, until it has no work. After a failure a tick tries again."""
        try:
            while not self._stop.is_set() and self._service.scrubber.has_work:
                started = time.monotonic()
                await self._scrub_step()
                await asyncio.sleep((time.monotonic() - started) * SCRUB_REST)
        except Exception:
            text = "Comparing checksums failed inside the daemon; it is retried. This is logged once a minute."
            self._scrub_failures.warn(text, exc_info=True)

    async def _scrub_step(self) -> None:
        """Read some slots in a thread, and act on their checksums."""
        scrubber = self._service.scrubber
        if checks := scrubber.next_step():
            slots = [(check.offset, check.length) for check in checks]
            try:
                checksums = await asyncio.to_thread(self._pool.digests, slots)
            except RuntimeError:  # no thread can be started; a step is short enough for this one
                checksums = self._pool.digests(slots)
            scrubber.finish_step(checks, checksums)
            self._sockets.wake()

    async def _finish_jobs(self) -> None:
        """Refuse new work, let running jobs finish within the deadline, fail the others, publish all results."""
        self._service.sessions.stopping = True
        self._notifier.stopping("Stopping: running jobs may finish.")
        jobs = self._service.jobs
        deadline = time.monotonic() + self._config.shutdown_deadline_s
        if jobs.unfinished:
            logger.info("Stopping: %d jobs may finish within %.1f s.", jobs.unfinished, deadline - time.monotonic())
        await _until(lambda: not jobs.unfinished, deadline)
        if jobs.unfinished:
            logger.warning("Stopping: %d jobs did not finish in time; they fail.", jobs.unfinished)
            jobs.abandon(jobs.running)
            await _until(lambda: not jobs.unfinished, time.monotonic() + ABANDON_S)
        self._sockets.flush()

    def _leave_loop(self) -> None:
        """Answer nothing more over HTTP, and handle signals without the loop: the ends of the parts follow and block
        it."""
        self._serving = False
        loop = asyncio.get_running_loop()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # one that comes in between must not end the process
        for number in self._signals:  # the loop, which does not run while something closes, would not see them
            loop.remove_signal_handler(number)
            signal.signal(number, lambda which, frame: self._on_signal(which))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def _end_use(self, close: Callable[[float], bool], timeout_s: float) -> None:
        """End what uses the pool. If that does not end, or raises, the pool stays mapped until the process exits."""
        has_ended = False
        try:
            has_ended = close(timeout_s)
        finally:
            self.copy_stuck = self.copy_stuck or not has_ended

    async def _close_pool(self) -> None:
        """Unmap the pool, unless something that hangs may still use it."""
        self._stop.set()
        if self._page_mapper is not None:
            await self._page_mapper
        if self.copy_stuck:
            logger.warning("A copy, a tier or a GPU does not end; the pool stays mapped until the process exits.")
        else:
            self._pool.close()


class _ProcessHost:
    """The ``Host`` of a real daemon."""

    def __init__(self, sockets: Sockets, page_faulter: PageFaulter) -> None:
        self.now = time.monotonic
        self.post = sockets.post
        self.map_memfd = page_faulter.map_memfd
        self.unmap = page_faulter.close_segments
        self.random = secrets.token_bytes


async def _until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait for ``condition``, which other callbacks of the loop make true, until ``deadline`` at most."""
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event at the deadline
        await asyncio.sleep(0.01)


def _exit_stuck() -> None:
    """Exit at once: EOF on the lifelines fails the jobs that no thread will finish, and unblocks engines."""
    logger.critical(
        "A copy in host memory hangs, and engines wait for it. The daemon exits; engines reconnect by themselves when "
        "it is started again. The kernel's log (dmesg) may say what hangs."
    )
    logging.shutdown()
    os._exit(EXIT_STUCK)
