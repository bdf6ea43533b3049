"""Beside stock vLLM: the same tokens where the budget never binds, and inert."""

import pytest

import vllm_h2o
from tests.engine.helpers import (
    assert_pool_whole,
    engine,
    generate,
    prompts_of,
    scheduler,
)

pytestmark = pytest.mark.engine

LENGTHS = (7, 64, 190, 333, 480, 900)
# Small chunks: prompts, transitions and decodes share most steps.
OPTIONS = {"max_num_batched_tokens": 256, "max_model_len": 1024}


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(*LENGTHS)


@pytest.fixture(scope="module")
def stock(prompts):
    """What stock vLLM is and says."""
    with engine(
        worker_extension_cls="tests.engine.inert_probe.InertProbe", **OPTIONS
    ) as llm:
        with pytest.raises(ValueError, match="H2O is off"):
            vllm_h2o.stats(llm)
        return {
            "scheduler": type(scheduler(llm)).__module__,
            "parts": llm.collective_rpc("probe_parts")[0],
            "additional_config": llm.llm_engine.vllm_config.additional_config,
            "tokens": generate(llm, prompts, 96),
        }


def test_without_options_vllm_is_untouched(stock):
    assert stock["scheduler"] == "vllm.v1.core.sched.scheduler"
    assert stock["additional_config"] == {}
    assert stock["parts"] == {
        "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
        "backends": ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"],
        "specs": ["vllm.v1.kv_cache_interface.FullAttentionSpec"],
        "modules": [],
    }


def test_budget_that_never_binds_gives_stock_tokens(stock, prompts):
    with engine(enable_h2o=True, h2o_budget=1024, **OPTIONS) as llm:
        together = generate(llm, prompts, 96)
        alone = [generate(llm, [prompt], 96)[0] for prompt in prompts[::3]]
        assert_pool_whole(llm)
        stats = vllm_h2o.stats(llm)
    assert together == stock["tokens"]
    assert alone == stock["tokens"][::3]
    assert stats["transitions"] == len(prompts) + len(alone)
    assert stats["tokens_evicted"] == 0
