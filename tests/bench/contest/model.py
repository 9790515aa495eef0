"""The contest's model: a Llama with random weights, and a tokenizer of which every short word is one token.

``lmcache bench`` draws from 8,000 words of one token each, and chats need a template. The words are two or three
letters after a space, so that no text has to be learned and the tokenizer is the same on every machine.
"""

from __future__ import annotations

import json
import string
from itertools import islice, product
from pathlib import Path

from tests.kit.models import make_demo_llama, make_tiny_llama

WORDS = 9_000
SPECIAL = ("<pad>", "<s>", "</s>")
"""Ids 0, 1 and 2, as the models' configuration has them."""
SPACE = "\u0120"
"""The space of byte-level tokenizers."""
BYTES = 256
VOCABULARY = len(SPECIAL) + BYTES + len(string.ascii_lowercase) + WORDS
FIRST_TOKEN = len(SPECIAL)
TEMPLATE = "{% for one in messages %}{{ one.content }}\n{% endfor %}"


def make_model(path: Path, *, quick: bool = False) -> Path:
    """Write the model into the directory ``path``: the demo's Llama, or with ``quick`` the tests' tiny one."""
    made = (make_tiny_llama if quick else make_demo_llama)(path, vocabulary=VOCABULARY)
    _silence(made / "model.safetensors")
    _add_tokenizer(made)
    return made


def _silence(file: Path) -> None:
    """Have the model never choose the end or a byte: an answer has all of its tokens, and each of them is text."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(file)
    weights["lm_head.weight"][: len(SPECIAL) + BYTES] = 0.0
    save_file(weights, file, metadata={"format": "pt"})


def _add_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    longer = ("".join(each) for length in (2, 3) for each in product(letters, repeat=length))
    words = [*letters, *islice(longer, WORDS)]
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(SPACE + word for word in words)]
    assert len(names) == VOCABULARY
    merges = [(SPACE + word[:-1], word[-1]) for word in words]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=SPECIAL[0], chat_template=TEMPLATE
    ).save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["vocab_size"] == VOCABULARY
