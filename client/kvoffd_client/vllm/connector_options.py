"""What a user may write into ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvoffd_client.session import ClientOptions
from kvoffd_client.vllm.log import logger
from kvoffd_proto.sockets import default_directory

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import KVTransferConfig

# Keys of vLLM's own that reach the offloading connector (0.32 and 0.33); they pass through.
VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
    }
)

# Options of vLLM's own offloading that cannot be followed, and why.
REFUSED = {
    "canonical_layout": "it keeps each tensor parallel rank's shards as they are (engines of one size share them)",
    "sync_load_budget_bytes": "a load that fails inside a step cannot be recomputed",
}

BEST_EFFORT = "best_effort"
WAIT = "wait"
LIMIT = "limit"
DISK_WAIT_MODES = (BEST_EFFORT, WAIT, LIMIT)


@dataclass(frozen=True)
class ConnectorOptions:
    """The connector's own options, checked.

    Attributes:
        directory: where the daemon's sockets are; empty means $KVOFFD_DIRECTORY, else /run/kvoffd.
        salt: goes into the namespace's fingerprint; engines with different salts share nothing.
        lookup_deadline_ms: a lookup that has no answer by then is a miss. With ``do_no_harm`` it is one earlier: as
            soon as computing the prompt would have been done, or after 20 ms while the engine's rate is not known, and
            earlier still after late answers (``lookup_allowance``).
        lookup_refresh_ms: an answer with misses that is older than this when the request is scheduled is asked for
            again.
        disk_wait: what a request does whose blocks come up from disk: "best_effort" takes those that are ready and
            computes the others, "wait" waits until the daemon gives up what does not come (its ``disk_deadline``),
            "limit" waits for ``disk_wait_ms`` or as long as the engine would compute them, which it learns, and not at
            all where the daemon expects it to take longer.
        disk_wait_ms: the most that "limit" may cost a request. In a second a local SSD brings some gigabytes, tens of
            thousands of tokens of a model of 8 billion parameters: more than most GPUs compute in that time.
        store_fence_timeout_s: how long vLLM may wait for a running store before its blocks are reused; then the
            store is abandoned, in a way that the daemon never commits it.
        store_threshold: a block is stored once it was computed in so many requests of this engine, as with vLLM's own
            offloading; below 2 at the first.
        max_tracker_size: blocks whose requests are counted for that, the latest ones.
        do_no_harm: skip loads that take longer than computing would, and pause stores that vLLM waits for (``harm``);
            wait for a lookup no longer than computing would take.
        respect_load_failure_policy: leave ``kv_load_failure_policy`` as the engine has it, even where it says that
            a request whose load failed must fail.
        strict_version: refuse a vLLM release that this kvoffd was not tested with; else such an engine starts with a
            warning.
    """

    directory: str = ""
    salt: str = ""
    lookup_deadline_ms: float = 200.0
    lookup_refresh_ms: float = 1000.0
    disk_wait: str = LIMIT
    disk_wait_ms: float = 1000.0
    store_fence_timeout_s: float = 2.0
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    do_no_harm: bool = True
    respect_load_failure_policy: bool = False
    strict_version: bool = False

    @property
    def client_options(self) -> ClientOptions:
        """Options of the scheduler's client, which must not give up a lookup before the lookup's deadline."""
        deadline_s = self.lookup_deadline_ms / 1000
        return ClientOptions(
            request_timeout_s=max(deadline_s, ClientOptions.request_timeout_s),
            unresponsive_after_s=max(deadline_s, ClientOptions.unresponsive_after_s),
        )

    @property
    def socket_directory(self) -> str:
        return self.directory or str(default_directory())


OWN_KEYS = tuple(item.name for item in fields(ConnectorOptions))


def parse_options(extra_config: Mapping[str, object]) -> tuple[ConnectorOptions, list[str]]:
    """Return the options and the keys that neither kvoffd nor vLLM's offloading connector knows.

    Raises:
        ValueError: a key that is nearly one of ours, a value of the wrong type or range, or a vLLM option that
            cannot work with a daemon. The sentence names the key.
    """
    unknown = []
    for key in extra_config:
        if key in OWN_KEYS or key in VLLM_KEYS:
            continue
        if key in REFUSED:
            if extra_config[key]:
                raise ValueError(
                    f"kv_connector_extra_config: {key} cannot be used with KvoffdConnector, since {REFUSED[key]}; "
                    "leave it out."
                )
            continue
        near = difflib.get_close_matches(key, OWN_KEYS, n=1, cutoff=0.75)
        if near or key.startswith("kvoffd"):
            wanted = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(OWN_KEYS)}."
            raise ValueError(f"kv_connector_extra_config: {key!r} is no option of KvoffdConnector; {wanted}")
        unknown.append(key)
    values = {key: _checked(key, extra_config[key]) for key in OWN_KEYS if key in extra_config}
    return ConnectorOptions(**values), unknown  # type: ignore[arg-type]


def _checked(key: str, value: object) -> str | float | bool:
    default = getattr(ConnectorOptions, key)
    if key == "disk_wait":
        fits, wanted = value in DISK_WAIT_MODES, " or ".join(DISK_WAIT_MODES)
    elif isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, str):
        fits, wanted = isinstance(value, str), "a string"
    elif isinstance(default, int):
        least = 1 if default else 0
        fits, wanted = type(value) is int and least <= value < 10**9, f"a whole number from {least} on"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits, wanted = number and 0 < value < 3_600_000, "a positive number"  # type: ignore[operator]
    if not fits:
        raise ValueError(f"kv_connector_extra_config: {key!r} must be {wanted}; it is {value!r}.")
    return type(default)(value)


def choose_load_failure_policy(transfer_configs: Sequence[KVTransferConfig], options: ConnectorOptions) -> None:
    """Recompute failed loads, unless the user insists on the engine's policy. The scheduler reads it after this.

    ``transfer_configs`` are the connector's own and those of its parents; the scheduler reads the last.
    """
    policy = transfer_configs[-1].kv_load_failure_policy
    if options.respect_load_failure_policy:
        if policy != "recompute":
            logger.warning(
                "kvoffd: kv_load_failure_policy is %r: requests whose blocks could not be loaded, as when the daemon "
                "dies, will end with an error.",
                policy,
            )
        return
    for transfer_config in transfer_configs:
        transfer_config.kv_load_failure_policy = "recompute"
    if policy != "recompute":
        logger.info(
            "kvoffd: kv_load_failure_policy was %r and is now 'recompute': a failed load costs time, not the request. "
            'Set "respect_load_failure_policy": true in kv_connector_extra_config to keep the engine\'s.',
            policy,
        )
