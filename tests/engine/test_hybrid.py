"""A hybrid model: only its full-attention layers are compressed."""

import pytest

import vllm_h2o
from tests.engine.helpers import assert_pool_whole, check, engine, greedy, scheduler
from tests.engine.tiny_models import random_prompts, save_hybrid

pytestmark = pytest.mark.engine

LENGTHS = (50, 200, 333, 700)
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_hybrid(tmp_path_factory.mktemp("gemma3"))


def run(llm):
    inputs = [{"prompt_token_ids": p} for p in random_prompts(*LENGTHS)]
    outputs = llm.generate(inputs, greedy(100, detokenize=False), use_tqdm=False)
    assert_pool_whole(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_only_full_attention_layers_are_compressed(model):
    with engine(model, kv_policy="h2o", h2o_budget=128, **OPTIONS) as llm:
        layers = llm.collective_rpc("probe_h2o_layers")[0]
        assert [int(name.split(".")[2]) for name in layers] == [2, 5]
        managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
        assert sorted({type(m).__name__ for m in managers}) == [
            "H2OManager",
            "SlidingWindowManager",
        ]
        llm.collective_rpc("probe_watch")
        cold = run(llm)
        survivors = llm.collective_rpc("probe_survivors")[0]
        for per_layer in survivors.values():
            for heads in per_layer:
                assert all(len(set(head)) == len(head) == 128 for head in heads)
        stats = vllm_h2o.stats(llm)
        assert stats["transitions"] == len(LENGTHS)
        assert stats["tokens_evicted"] == sum(n + 99 - 128 for n in LENGTHS)
        check(llm)
        assert run(llm) == cold, "a warm prefix cache changed the tokens"


def test_budget_that_never_binds_gives_stock_tokens(model):
    probe = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
    with engine(model, **probe, **OPTIONS) as llm:
        expected = run(llm)
    with engine(model, kv_policy="h2o", h2o_budget=1024, **OPTIONS) as llm:
        assert run(llm) == expected
