"""One engine shape from cold to warm, and models of many architectures to make shapes of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .daemon import DaemonProcess
from .engine import Completion, EngineProcess, cached, prompt, tokens, wait_connected, wait_stored
from .models import make_tiny_llama
from .wire import Books, books

PROMPTS: Sequence[Any] = [prompt(1, 900), prompt(2, 333)]
IMAGE_PIXELS, IMAGE_TOKEN, IMAGE_NAME = 112, 1023, "<unused764>"
# Workers of tensor parallelism spin on a small machine, and another process may get no CPU for half a minute.
PATIENCE_S = 100.0


@dataclass(frozen=True)
class Shape:
    """What is special about an engine.

    Attributes:
        make: writes its model into a directory.
        settings: of vLLM's ``LLM``, and of ``EngineProcess``.
        extra: options of the connector.
        environ: variables of the engine's processes.
        request: arguments of the command ``generate`` beside the prompts.
        prompts: token ids, or whatever the command ``generate`` takes.
        cached: the tokens that each prompt shall find; None for as many as vLLM's own prefix cache gives.
        workers: how many processes register memory.
        varies: a prompt that vLLM has in its own prefix cache may get other tokens than a cold one, since its kernels
            compute the rest in another order.
    """

    make: Callable[[Path], Path] = make_tiny_llama
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Any] = field(default_factory=lambda: PROMPTS)
    cached: Sequence[int] | None = None
    workers: int = 1
    varies: bool = False


def check_shape(shape: Shape, model: Path, daemon: DaemonProcess, *, restart: bool = True) -> Books:
    """Nothing changes an answer, and every full block comes back; in a new process too, if it is to ``restart``.

    Returns what the daemon says afterwards.
    """
    options = {"lookup_deadline_ms": 1000 * PATIENCE_S, **shape.extra}
    environ = dict(shape.environ)
    with EngineProcess(
        model, daemon.directory, patient=True, extra_config=options, environ=environ, **shape.settings
    ) as engine:

        def ask() -> list[Completion]:
            """One prompt after the other: in a batch, what else is in it may change a kernel's rounding."""
            return [engine.generate([each], **shape.request)[0] for each in shape.prompts]

        wait_connected(daemon.directory, shape.workers, PATIENCE_S)
        cold, own = ask(), ask()
        wait_stored(daemon.directory)
        engine.forget()
        loaded = [ask()]
        if restart:
            engine.kill()
            engine.start()
            wait_connected(daemon.directory, shape.workers, PATIENCE_S)
            loaded.append(ask())
        after = books(daemon.directory)
    assert cached(cold) == [0] * len(cold), cached(cold)
    expected = list(shape.cached or cached(own))
    assert all(expected)
    assert shape.varies or tokens(own) == tokens(cold), "vLLM's own prefix cache"
    for answers in loaded:
        assert cached(answers) == expected, (cached(answers), expected)
        assert tokens(answers) == tokens(own)
        assert {answer.finish for answer in answers} == {"length"}
    assert len({tuple(answer.tokens) for answer in cold}) == len(cold), "prompts should differ in their answers"
    assert after.load.bytes > 0
    assert (after.load.failed_jobs, after.store.failed_jobs, after.leases, len(after.namespaces)) == (0, 0, 0, 1)
    return after


def make_transformers_model(path: Path, config_class: str, **settings: Any) -> Path:
    """Write a model of a class of ``transformers`` with random weights into ``path``; its sizes are in ``settings``.

    As in ``models``, each matrix is scaled by its fan-in, so that tokens depend on far KV bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        config = getattr(transformers, config_class)(**{**COMMON, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_weights(model)
        model.save_pretrained(path)
    return path


def _draw_weights(model: Any) -> None:
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                is_table = "embed" in name and "proj" not in name
                parameter.normal_(0, 1.0 if is_table else 1.6 / parameter.shape[-1] ** 0.5)


def make_tiny_llava(path: Path) -> Path:
    """Write a LLaVA, a Llama that sees images of 112 by 112 pixels as 64 tokens each, into the directory ``path``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from safetensors.torch import save_file

        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**COMMON),
            vision_config=transformers.CLIPVisionConfig(**vision, image_size=IMAGE_PIXELS, patch_size=14),
            image_token_index=IMAGE_TOKEN,
            architectures=["LlavaForConditionalGeneration"],
        )
        model = transformers.LlavaForConditionalGeneration(config)
        _draw_weights(model)
        add_tokenizer(path, special=[IMAGE_NAME])
        config.save_pretrained(path)
        # vLLM knows the names of before transformers 5.
        names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in model.state_dict()}
        save_file({names[name]: tensor for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    side = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    processor = {
        "processor_class": "LlavaProcessor",
        "image_processor": {"image_processor_type": "CLIPImageProcessor", "size": side, "crop_size": side},
        "image_token": IMAGE_NAME,
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
    }
    (path / "processor_config.json").write_text(json.dumps(processor))
    return path


def with_images(seeds: Sequence[int]) -> dict[str, Any]:
    """A prompt that begins with images, each made of its seed; the text is always the same, 300 tokens."""
    from PIL import Image

    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    images = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)) for seed in seeds]
    return {
        "prompt_token_ids": [IMAGE_TOKEN] * len(seeds) + prompt(3, 300),
        "multi_modal_data": {"image": images},
    }


def add_tokenizer(path: Path, special: Sequence[str] = ()) -> Path:
    """Write a tokenizer of bytes, filled up to 1,024 tokens, into the directory ``path``.

    ``special``: names of tokens that are found as they are in a text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        names += [f"<unused{number}>" for number in range(COMMON["vocab_size"] - len(names))]
        tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            additional_special_tokens=list(special),
        ).save_pretrained(path)
    return path


def make_tiny_gemma3(path: Path) -> Path:
    """Write a Gemma 3 of 5 layers with a sliding window of 256 tokens and 1 of full attention into ``path``.

    vLLM makes two or more KV cache groups of it: the hybrid case.
    """
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return make_transformers_model(
        path, "Gemma3TextConfig", num_hidden_layers=6, layer_types=layers, sliding_window=256, query_pre_attn_scalar=32
    )


def make_tiny_qwen3_next(path: Path, experts_per_token: int = 2) -> Path:
    """Write a small Qwen3-Next, linear attention with full attention in between, into ``path``. It has four experts."""
    return make_transformers_model(
        path,
        "Qwen3NextConfig",
        num_experts=4,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_key_value_heads=4,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )


def make_tiny_glm_with_mtp(path: Path) -> Path:
    """Write a GLM 4.5 of four layers and one that predicts the token after the next (MTP) into the directory ``path``.

    That layer is over the next token's embedding and some of the model's hidden state. All layers add little to the
    embeddings, so that some of its drafts are right.
    """
    layers = COMMON["num_hidden_layers"]
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts = {"first_k_dense_replace": layers - 1, **sizes}  # vLLM wants some on either side
    make_transformers_model(path, "Glm4MoeConfig", num_hidden_layers=layers + 1, **experts)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from safetensors.numpy import load_file, save_file

        weights, ones = load_file(path / "model.safetensors"), np.ones(COMMON["hidden_size"], np.float32)
        little = {name: each / 10 for name, each in weights.items() if "o_proj" in name or "down_proj" in name}
        added = {
            "enorm": ones,
            "hnorm": ones,
            "eh_proj": np.hstack([np.diag(ones), np.diag(ones) / 10]),
            "embed_tokens": weights["model.embed_tokens.weight"],
            "shared_head.norm": ones,
            "shared_head.head": weights["lm_head.weight"],
        }
        weights |= little | {f"model.layers.{layers}.{name}.weight": each for name, each in added.items()}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_tiny_deepseek(path: Path) -> Path:
    """Write a DeepSeek V2 of four layers (multi-head latent attention) into the directory ``path``."""
    return make_transformers_model(path, "DeepseekV2Config", **MLA)


# vLLM's kernels have the sizes of DeepSeek compiled in: 512 for the latent vector, 64 for its rope.
MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
