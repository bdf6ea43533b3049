"""Random-weight models, saved to a folder; no tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2 import ensure_model
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile, gate_in_json

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


ROTATES_ALL_HEADS = {"custom_ops": ["-rotary_embedding"]}
"""vLLM's `compilation_config` for LFM2 on CPU: its kernel takes queries that come by
head (`[n, heads, head_size]`) for those of one head, and rotates other tokens'."""
_OF_WIDTH = {name: value for name, value in _COMMON.items() if name != "head_dim"}
"""For models whose heads share out the width."""


def save_llama(folder: Path, **options: Any) -> Path:
    """A llama with 4 KV heads, which two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(_COMMON | {"num_hidden_layers": 4} | options))
    return _save(LlamaForCausalLM, config, folder)


def save_heads(folder: Path, num_kv_heads: int = 4, gated: bool = True) -> None:
    """Beside a model of four layers: falls that differ by layer and head.

    Of four heads both ranks of two have rich and poor ones. A gate has random weights.
    """
    curves = [
        [[s, s / 9, s / 90] for s in torch.logspace(-3, 0, 4).roll(i).tolist()]
        for i in range(4)
    ]
    curves = [layer[:num_kv_heads] for layer in curves]
    weights = torch.randn(4, 4, 2 * 32 + 4, generator=torch.Generator().manual_seed(0))
    gate = gate_in_json(0.1 * weights[:, :num_kv_heads], 0.5) if gated else None
    profile = HeadProfile([64, 128, 512], curves, context_tokens=512, gate=gate)
    profile.save(folder / FILE_NAME)


def save_phi3(folder: Path) -> Path:
    """A Phi-3, whose window is longer than its context, as that of Phi-3.5."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        **_OF_WIDTH | {"hidden_size": 256, "num_hidden_layers": 2, "pad_token_id": 0},
        sliding_window=262144,
    )
    return _save(Phi3ForCausalLM, config, folder)


def save_reading_llama(folder: Path, num_hidden_layers: int = 2) -> Path:
    """A llama of few layers that reads text, with SmolLM2's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ensure_model() / name, folder)
    vocab_size = json.loads((ensure_model() / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": num_hidden_layers}
    return save_llama(folder, **sizes)


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


def save_trinity(folder: Path) -> Path:
    """A Trinity: a gate multiplies what heads put out, and their sum is normalized."""
    from transformers import AfmoeConfig, AfmoeForCausalLM

    config = AfmoeConfig(
        num_hidden_layers=4,
        num_dense_layers=4,
        n_group=1,
        topk_group=1,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **_COMMON | {"tie_word_embeddings": False},
    )
    return _save(AfmoeForCausalLM, config, folder)


def _with_sinks(model_cls: Any) -> Any:
    """A class whose sinks, which transformers starts with zeros, are not alike."""

    def make(config: Any) -> Any:
        model = model_cls(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, 2.0, 2.0)
        return model

    return make


def save_granite_swa(folder: Path, **options: Any) -> Path:
    """A GraniteSWA, all of whose layers see everything: its softmax has sinks."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    settings = _OF_WIDTH | {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = options.pop("num_hidden_layers", 4)
    config = GraniteSWAConfig(
        **settings | options,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        attention_multiplier=32**-0.5,
    )
    return _save(_with_sinks(GraniteSWAForCausalLM), config, folder)


def save_gpt_oss(folder: Path) -> Path:
    """A gpt-oss: windowed and full layers in turn, all with sinks; experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_COMMON | {"tie_word_embeddings": False},
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return _save(_with_sinks(GptOssForCausalLM), config, folder)


_BESIDE_STATES = {
    **_OF_WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
}


def save_qwen3_next(folder: Path) -> Path:
    """A Qwen3-Next: gated delta nets beside attention, and experts; for bfloat16."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_BESIDE_STATES,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _save(Qwen3NextForCausalLM, config, folder)


def save_granite4(folder: Path) -> Path:
    """A Granite 4: layers of Mamba2 beside attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_BESIDE_STATES,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        shared_intermediate_size=256,
        num_local_experts=0,
        attention_multiplier=32**-0.5,
    )
    return _save(GraniteMoeHybridForCausalLM, config, folder)


def save_nemotron_h(folder: Path) -> Path:
    """A Nemotron-H: layers of Mamba2, of attention, and one that is neither."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_BESIDE_STATES | {"num_hidden_layers": 5},
        head_dim=32,
        layers_block_type=["mamba", "attention", "mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
    )
    return _save(NemotronHForCausalLM, config, folder)


def save_lfm2(folder: Path, **options: Any) -> Path:
    """An LFM2: layers of short convolution, of which only a state stays, before full
    attention, twice."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_OF_WIDTH | {"num_attention_heads": 4, "num_key_value_heads": 2},
        layer_types=["conv", "conv", "full_attention"] * 2,
        num_hidden_layers=6,
        block_auto_adjust_ff_dim=False,
        # Of no other model here: in a process vLLM keeps what rotates, by this and by
        # sizes, with the kernel that the first to ask for it had.
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        **options,
    )
    _save(Lfm2ForCausalLM, config, folder)
    # vLLM reads what transformers' class leaves out.
    path = folder / "config.json"
    width = {"conv_dim": config.hidden_size, "block_dim": config.hidden_size}
    path.write_text(json.dumps(json.loads(path.read_text()) | width))
    return folder


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
