"""Tiny models under the names that vLLM's tests ask for, as a hub's cache has them."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.smollm2 import ensure_model
from tests.engine.tiny_models import save_llama

VOCABULARY = 50304
"""More than SmolLM2's tokenizer has; tests name tokens of OPT's."""
NAMES = {
    2048: ("distilbert/distilgpt2", "facebook/opt-125m", "facebook/opt-350m"),
    8192: (
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen/Qwen3-0.6B",
        "hmellor/tiny-random-LlamaForCausalLM",
        "meta-llama/Llama-3.2-1B-Instruct",
    ),
}
"""By the longest request that their tests expect."""


def make_hub(home: Path) -> None:
    """Fill `HF_HOME`, once."""
    for length, names in NAMES.items():
        model = home / f"llama-{length}"
        if not model.exists():
            save_llama(
                model,
                num_hidden_layers=2,
                vocab_size=VOCABULARY,
                max_position_embeddings=length,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=2,
            )
            for part in ("tokenizer", "tokenizer_config", "generation_config"):
                shutil.copy(ensure_model() / f"{part}.json", model)
            shutil.copy(ensure_model() / "chat_template.jinja", model)
        for name in names:
            folder = home / "hub" / f"models--{name.replace('/', '--')}"
            revision = "0" * 40
            snapshot = folder / "snapshots" / revision
            if not snapshot.exists():
                snapshot.parent.mkdir(parents=True)
                snapshot.symlink_to(model)
                (folder / "refs").mkdir()
                (folder / "refs" / "main").write_text(revision)
