"""LoRA: eviction looks at the attention of the adapted model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.helpers import assert_pool_whole, engine, greedy
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

RANK, ALPHA, NUM_TOKENS = 4, 8, 100
PROMPTS = random_prompts(90, 300, 410)


def test_an_adapter_gives_the_tokens_of_its_merged_weights(tmp_path):
    from vllm.lora.request import LoRARequest

    model, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    save_adapter(save_llama(model), adapter)
    merge(model, adapter, merged)
    request = LoRARequest("adapter", 1, str(adapter))
    options = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": True}
    with h2o_engine(model, **options) as llm:
        adapted, again = (tokens_of(llm, lora_request=request) for _ in range(2))
        plain = tokens_of(llm)
        assert_pool_whole(llm)
    with h2o_engine(merged) as llm:
        assert adapted == tokens_of(llm)
    assert again == adapted, "a hit of the prefix cache changed the tokens"
    assert all(a != b for a, b in zip(adapted, plain, strict=True))


def h2o_engine(model, **options):
    return engine(
        model,
        kv_policy="h2o",
        h2o_budget=128,
        skip_tokenizer_init=True,
        max_model_len=1024,
        **options,
    )


def tokens_of(llm, **options):
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = greedy(NUM_TOKENS, detokenize=False)
    outputs = llm.generate(inputs, sampling, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def save_adapter(model, folder):
    """An adapter of random weights for the queries and values of every layer."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
            continue
        prefix = "base_model.model." + name.removesuffix(".weight")
        rows, columns = weight.shape
        a = torch.randn(RANK, columns, generator=generator) * 0.05
        b = torch.randn(rows, RANK, generator=generator) * 0.5
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge(model, adapter, folder):
    """The model with the adapter added to its weights."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        prefix = "base_model.model." + name.removesuffix(".weight")
        if (b := parts.get(f"{prefix}.lora_B.weight")) is not None:
            weights[name] += ALPHA / RANK * b @ parts[f"{prefix}.lora_A.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
