"""Prompts with images in vLLM's own scheduler: hits that end before, inside and behind an image, with EAGLE's drafts.

An encoder's output is kept until the model and the draft, which reads a token ahead, have passed the image. A hit skips
the encoder of the images before its end. ``GPUModelRunner._gather_mm_embeddings`` raises where one is missing, which
ends the engine; here it reads what the scheduler has had computed, so it raises here too.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.kit.models import make_draft
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import make_config

BLOCK_TOKENS = 32
IMAGE_TOKENS = 64
STARTS = {"on-a-block": (64, 160, 224), "inside-a-block": (40, 110, 180), "a-token-behind-a-block": (33, 97, 225)}
"""Where a prompt's images begin. Some are side by side."""
PROMPT_TOKENS = 10 * BLOCK_TOKENS + 5
STEP_TOKENS = 96
STEPS = 40


class ImageEngine(SchedulerHarness):
    """A scheduler whose steps read encoders' outputs as vLLM's model runner does.

    Attributes:
        outputs: what the encoder has computed, by image, until the scheduler has it freed.
        reads: how many images were read, by the model and the draft together.
    """

    def __init__(self, config: Any, kept_tokens: int) -> None:
        super().__init__(config, 60)
        self.scheduler.encoder_cache_manager = EncoderCacheManager(kept_tokens)
        self.scheduler.max_num_encoder_input_tokens = IMAGE_TOKENS
        self.outputs: dict[str, torch.Tensor] = {}
        self.reads = 0

    def work(self, output: Any, meta: Any) -> Collection[int]:
        for image in output.free_encoder_mm_hashes:
            self.outputs.pop(image, None)
        requests = self.scheduler.requests
        for name, inputs in output.scheduled_encoder_inputs.items():
            for one in inputs:
                self.outputs[requests[name].mm_features[one].identifier] = torch.zeros(IMAGE_TOKENS, 1)
        begun = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begun |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        states = {
            name: SimpleNamespace(num_computed_tokens=at, mm_features=requests[name].mm_features)
            for name, at in begun.items()
        }
        runner: Any = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=list(output.num_scheduled_tokens)),
            requests=states,
            _get_encoder_output_from_cache=self.outputs.get,
            is_multimodal_pruning_enabled=False,
        )
        for ahead in range(self.scheduler.num_prefill_lookahead + 1):
            read, _ = GPUModelRunner._gather_mm_embeddings(runner, output, ahead)
            self.reads += len(read)
        return super().work(output, meta)


def images(starts: Collection[int], name: str) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            MultiModalKwargsItem.dummy(), "image", f"{name}-{start}", PlaceholderRange(start, IMAGE_TOKENS)
        )
        for start in starts
    ]


@pytest.mark.parametrize("whole", [False, True], ids=["in-parts", "whole"])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "eagle"])
@pytest.mark.parametrize("place", STARTS)
def test_a_hit_that_ends_at_any_block_around_an_image_ends_no_engine(
    place: str, drafts: bool, whole: bool, model: Path, tmp_path: Path
) -> None:
    """While a request of other images runs, with space for one or two images; also where the load fails.

    With EAGLE and space for one image vLLM 0.32 never schedules the second of two images side by side, without a
    connector too: the first is kept until the draft has passed it, which reads the second. Nor does it where its own
    cache's hit ends at the last token of the first, if neither is encoded and a step encodes one; no load ends there.
    """
    draft = {"method": "eagle", "num_speculative_tokens": 3, "model": str(make_draft(tmp_path / "draft", eagle=True))}
    config = make_config(
        model,
        {"directory": str(tmp_path)},
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=4,
        disable_chunked_mm_input=whole,
        speculative_config=draft if drafts else None,
    )
    tokens, shown = list(range(PROMPT_TOKENS)), images(STARTS[place], "image")
    side_by_side = any(start + IMAGE_TOKENS in STARTS[place] for start in STARTS[place])
    for kept in (2,) if drafts and side_by_side else (1, 2):
        engine = ImageEngine(config, kept * IMAGE_TOKENS)
        try:
            for blocks in range(PROMPT_TOKENS // BLOCK_TOKENS + 1):
                # With EAGLE vLLM's own cache drops the last block.
                for source, found in (("own", max(blocks - drafts, 0)), ("loaded", blocks), ("failed", 0)):
                    name, same, end = f"{source}-{blocks}", blocks * BLOCK_TOKENS, found * BLOCK_TOKENS
                    if drafts and {end + 1, end + 1 - IMAGE_TOKENS} <= set(STARTS[place]):
                        if source == "own":
                            continue  # vLLM never schedules it
                        end -= BLOCK_TOKENS
                    assert engine.scheduler.reset_prefix_cache()
                    engine.there = set()
                    other = tokens[:same] + [1000 + each for each in tokens[same:]]
                    if source == "own":
                        engine.end([engine.add(f"first-{name}", other, mm_features=shown)], STEPS)
                    reads = engine.reads
                    asked = engine.add(name, tokens, mm_features=shown)
                    beside = engine.add(f"beside-{name}", other[::-1], mm_features=images((10, 130), "other"))
                    if source != "own":
                        engine.there = {bytes(one) for one in asked.block_hashes[:blocks]}
                        engine.failing = {name} if source == "failed" and blocks else set()
                    engine.end([asked, beside], STEPS)
                    assert engine.cached[name] == end, name
                    assert engine.reads > reads
        finally:
            engine.close()
