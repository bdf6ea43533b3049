"""Engines that share a front end: each compresses the requests that it gets."""

import asyncio

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.helpers import greedy
from tests.engine.tiny_models import random_prompts, save_trinity

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = random_prompts(200, 230, 180)


def test_two_engines_answer_as_one(tmp_path, monkeypatch):
    """With experts, for which the idle one runs steps without requests."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = save_trinity(tmp_path / "model")
    one, compressed = asyncio.run(answers(model, 1))
    assert compressed == len(PROMPTS)
    two, compressed = asyncio.run(answers(model, 2))
    assert two == one
    assert 0 < compressed < len(PROMPTS), "the other engine has the others"


async def answers(model, num_engines):
    """Tokens, and how many requests the first engine has compressed."""
    args = AsyncEngineArgs(
        str(model),
        skip_tokenizer_init=True,
        kv_policy="h2o",
        h2o_budget=96,
        h2o_head_budgets="uniform",
        h2o_resident_dtype="model",
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        data_parallel_size=num_engines,
        num_gpu_blocks_override=64,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        found = [answer(engine, *each) for each in enumerate(PROMPTS)]
        tokens = await asyncio.gather(*found)
        counters = await engine.collective_rpc("h2o_stats")
    finally:
        engine.shutdown()
    return tokens, counters[0]["transitions"]


async def answer(engine, name, prompt):
    """Greedy tokens."""
    tokens, given = [], {"prompt_token_ids": prompt}
    async for output in engine.generate(given, greedy(16), request_id=str(name)):
        tokens = list(output.outputs[0].token_ids)
    return tokens
