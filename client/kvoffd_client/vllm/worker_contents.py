"""The weights and the LoRA adapters in a worker's memory, with which its KV blocks are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd_client.vllm.adapters import LiveAdapters
from kvoffd_client.vllm.live_weights import LiveWeights, has_experts_elsewhere

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class WorkerContents:
    """The weights and adapters of one worker, and the digest that the scheduler knows.

    Attributes:
        weights: the models; a stand-in without any before ``find_models``.
        adapters: the adapters; a stand-in without any before ``find_models``.
        digest: digest of the weights; None while unknown.
        generation: the scheduler's number of the digest; see ``ConnectorMetadata``.
    """

    def __init__(self) -> None:
        self.weights = LiveWeights(list)
        self.adapters = LiveAdapters(None, None, self.weights.mark_changed)
        self.digest: str | None = None
        self.generation = 0

    @property
    def changed(self) -> bool:
        """Whether the weights or an adapter may have changed since the digest was taken: ``weights`` records both."""
        return self.weights.changed

    def find_models(self, vllm_config: VllmConfig) -> None:
        """Find the models and adapters of the calling worker, and take the first digest."""
        self.weights = LiveWeights.of_caller(experts_elsewhere=has_experts_elsewhere(vllm_config))
        self.digest = self.weights.digest()
        manager = getattr(self.weights.runner, "lora_manager", None)
        self.adapters = LiveAdapters(manager, vllm_config.lora_config, self.weights.mark_changed)

    def renew_digest(self, generation: int | None) -> None:
        """Take a new digest if the scheduler asks for one of a later generation."""
        if generation is not None and generation > self.generation:
            self.generation = generation
            self.digest = self.weights.digest()
            self.adapters.forget_absent()

    def are_of(self, generation: int | None) -> bool:
        """Return whether the digest is of this generation, and nothing has changed since."""
        return generation == self.generation and not self.changed
