"""Random-weight models, saved to a folder; no tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2 import ensure_model

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    # Large weights: attention is not uniform, tokens do not repeat at once.
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def save_llama(folder: Path, **options: Any) -> Path:
    """A llama with 4 KV heads, which two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(_COMMON | {"num_hidden_layers": 4} | options))
    return _save(LlamaForCausalLM, config, folder)


def save_phi3(folder: Path) -> Path:
    """A Phi-3, whose window is longer than its context, as that of Phi-3.5."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"}
        | {"hidden_size": 256, "num_hidden_layers": 2, "pad_token_id": 0},
        sliding_window=262144,
    )
    return _save(Phi3ForCausalLM, config, folder)


def save_reading_llama(folder: Path) -> Path:
    """A llama of two layers that reads text, with SmolLM2's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_model() / name, folder)
    vocab_size = json.loads((ensure_model() / "config.json").read_text())["vocab_size"]
    return save_llama(folder, vocab_size=vocab_size, num_hidden_layers=2)


def save_hybrid(folder: Path, windowed: int = 2, full: int = 1) -> Path:
    """A Gemma 3: so many sliding-window layers, so many full-attention ones, twice."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=2 * (windowed + full),
        sliding_window=64,
        layer_types=(["sliding_attention"] * windowed + ["full_attention"] * full) * 2,
        query_pre_attn_scalar=32,
        **_COMMON,
    )
    return _save(Gemma3ForCausalLM, config, folder)


def _save(model_cls: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model_cls(config).float().save_pretrained(folder)
    return folder


def random_prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()
        for n in lengths
    ]
