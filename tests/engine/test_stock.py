"""Beside stock vLLM: the same tokens where the budget never binds, and inert."""

import pytest

import vllm_h2o
from tests.engine.helpers import (
    answers,
    assert_pool_whole,
    engine,
    generate,
    greedy,
    prompts_of,
    scheduler,
)

pytestmark = pytest.mark.engine

LENGTHS = (7, 64, 333, 700)
NUM_TOKENS = 32
# Small chunks: prompts, transitions and decodes share most steps.
OPTIONS = {"max_num_batched_tokens": 256, "max_model_len": 1024}


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(*LENGTHS)


@pytest.fixture(scope="module")
def stock(prompts):
    """What stock vLLM is and says."""
    with engine(
        worker_extension_cls="tests.engine.inert_probe.InertProbe",
        distributed_executor_backend="mp",  # nothing of ours is imported there
        **OPTIONS,
    ) as llm:
        with pytest.raises(ValueError, match="H2O is off"):
            vllm_h2o.stats(llm)
        return {
            "scheduler": type(scheduler(llm)).__module__,
            "parts": llm.collective_rpc("probe_parts")[0],
            "additional_config": llm.llm_engine.vllm_config.additional_config,
            "tokens": generate(llm, prompts, NUM_TOKENS),
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


@pytest.mark.rule("R1")
def test_budget_that_never_binds_gives_stock_tokens(stock, prompts):
    """Where a request can not outgrow it, and where it could but ends before; the pages
    of blocks of 128 differ between the two."""
    options = OPTIONS | {"max_model_len": 2048, "block_size": 128}
    could, can_not = until(stock["tokens"]), [greedy(NUM_TOKENS)] * len(prompts)
    mixed = [*could[:3], *can_not[3:]]
    expected = [cut(tokens) for tokens in stock["tokens"]]
    with engine(enable_h2o=True, h2o_budget=1024, **options) as llm:
        assert answers(llm, prompts, mixed) == expected[:3] + stock["tokens"][3:]
        assert vllm_h2o.stats(llm)["transitions"] == 3
        assert answers(llm, prompts, could) == expected
        for i in (0, 3):
            (alone,) = answers(llm, prompts[i : i + 1], can_not[:1])
            assert alone == stock["tokens"][i]
        assert_pool_whole(llm)
        stats = vllm_h2o.stats(llm)
    assert stats["transitions"] == 3 + len(prompts)
    assert stats["tokens_evicted"] == 0


def until(tokens):
    """Sampling parameters that end each answer where `cut` does."""
    return [greedy(1100, stop_token_ids=[answer[-1]]) for answer in tokens]


def cut(answer):
    """An answer up to where its last token first appears."""
    return answer[: answer.index(answer[-1]) + 1]
