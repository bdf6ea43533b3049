"""Engines that run one after the other in one process do not feel each other."""

import pytest

import vllm_h2o
from tests.engine.helpers import engine, generate
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

OPTIONS = {"distributed_executor_backend": "uni", "skip_tokenizer_init": True}
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
            assert vllm_h2o.stats(llm)["transitions"] == 1
    for part in parts:
        assert part["backends"] == [
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
        ]
        assert part["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert stock_tokens[0] == stock_tokens[1]
    assert h2o_tokens[0] == h2o_tokens[1] != stock_tokens[0]
