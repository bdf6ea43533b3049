"""Families of models by their published shapes, and what H2O does with them.

    python -m tests.models.families [NAME ..]

Prints the rows of the table in docs/models.md, as `python -m vllm_h2o.check`
finds them; configs have no quantization and no scaling of positions.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from vllm_h2o.check import plan_of

_FULL, _WINDOW = "full_attention", "sliding_attention"
_ATTENDS = {"LFM2 1.2B": (2, 5, 8, 10, 12, 14), "Granite 4.0 H-Small": (5, 15, 25, 35)}


def _kinds(name: str, count: int, other: str, full: str = _FULL) -> list[str]:
    return [full if i in _ATTENDS[name] else other for i in range(count)]


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "Qwen3 8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Qwen3 30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Gemma 3 12B": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 1024, "layer_types": ([_WINDOW] * 5 + [_FULL]) * 8,
        "vocab_size": 262208, "max_position_embeddings": 131072,
    },
    "gpt-oss 20B": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": [_WINDOW, _FULL] * 12,
        "num_local_experts": 32, "num_experts_per_tok": 4,
        "vocab_size": 201088, "max_position_embeddings": 131072,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8,
        "sliding_window": 262144, "pad_token_id": 0,
        "vocab_size": 200064, "max_position_embeddings": 131072,
    },
    "LFM2 1.2B": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2",
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
        "conv_dim": 2048, "block_dim": 2048, "conv_L_cache": 3,
        "layer_types": _kinds("LFM2 1.2B", 16, "conv"),
        "vocab_size": 65536, "max_position_embeddings": 128000,
    },
    "Qwen3-Next 80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "layer_types": (["linear_attention"] * 3 + [_FULL]) * 12,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936, "max_position_embeddings": 262144,
    },
    "Granite 4.0 H-Small": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": _kinds("Granite 4.0 H-Small", 40, "mamba", "attention"),
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4,
        "num_local_experts": 72, "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536,
        "vocab_size": 100352, "max_position_embeddings": 131072,
    },
    "Mistral 7B v0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "vocab_size": 32000, "max_position_embeddings": 32768,
    },
    "BLOOM 7B1": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom",
        "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880,
        "seq_length": 2048,
    },
    "DeepSeek V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "hidden_size": 7168, "num_hidden_layers": 61, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "num_attention_heads": 128, "n_routed_experts": 256,
        "vocab_size": 129280, "max_position_embeddings": 163840,
    },
}  # fmt: skip


def row_of(name: str) -> str:
    """The row of a family in the table."""
    with tempfile.TemporaryDirectory(prefix="vllm_h2o_tests_") as folder:
        config = json.dumps(FAMILIES[name])
        (Path(folder) / "config.json").write_text(config)
        engine_args = EngineArgs(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
            kv_policy="h2o",
        )  # fmt: skip
        try:
            plan = plan_of(engine_args)
        except ValueError as error:
            said = str(error).partition(": ")[0].replace(folder, name)
            return f"| {name} | {said} | | | |"
    stock, ours = (round(x / 2**20) for x in (plan.stock_bytes, plan.resident_bytes))
    compressed, others = plan.kinds()
    return f"| {name} | {compressed} | {others} | {stock:,} | {ours:,} |"


def main(names: list[str]) -> None:
    """Command line."""
    logging.disable(logging.WARNING)
    for name in names or FAMILIES:
        print(row_of(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
