"""Engines that run one after the other in one process do not feel each other."""

import pytest

import vllm_h2o
from tests.engine.helpers import engine, generate
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

LACK = "on startup|on kv cache allocation"
OPTIONS = {"skip_tokenizer_init": True}
STOCK = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}


def test_stock_and_h2o_in_turns(tmp_path):
    model = save_llama(tmp_path)
    prompts = random_prompts(40, 200)
    parts, stock_tokens, h2o_tokens = [], [], []
    for _ in range(2):
        with engine(model, **OPTIONS, **STOCK) as llm:
            parts.append(llm.collective_rpc("probe_parts")[0])
            stock_tokens.append(generate(llm, prompts, 20))
        with engine(model, **OPTIONS, kv_policy="h2o", h2o_budget=64) as llm:
            assert len(llm.collective_rpc("probe_h2o_layers")[0]) == 4
            h2o_tokens.append(generate(llm, prompts, 20))
            stats = vllm_h2o.stats(llm)
            assert stats["transitions"] == 1
            # No step has been scheduled since the last request ended.
            assert stats["blocks_in_use"] == 0 < stats["peak_blocks_in_use"]
    for part in parts:
        assert part["backends"] == [
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
        ]
        assert part["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert stock_tokens[0] == stock_tokens[1]
    assert h2o_tokens[0] == h2o_tokens[1] != stock_tokens[0]


def test_stock_after_h2o_that_did_not_start(tmp_path, monkeypatch):
    """It fails before its layers are made, with vLLM 0.33 before its cache is."""
    model = save_llama(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=LACK):
        patch.delenv("VLLM_CPU_KVCACHE_SPACE")
        too_much = {"gpu_memory_utilization": 1.0, "kv_policy": "h2o"}
        with engine(model, **OPTIONS, **too_much, h2o_budget=64):
            pass
    with engine(model, **OPTIONS, **STOCK) as llm:
        assert len(generate(llm, random_prompts(40), 4)[0]) == 4
