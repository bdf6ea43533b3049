"""Prompts compared by what the gate expects, against the same written down densely."""

import pytest
import torch

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    answers,
    assert_equal_densely,
    engine,
    greedy,
    prompts_of,
    scheduler,
)
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant, generate
from tests.reference.heads import gated_heads
from tests.reference.sizes import sizes_of_heads

pytestmark = pytest.mark.engine

BLOCK, BUDGET, NUM_QUERIES, NUM_TOKENS, CHUNK = 32, 256, 64, 12, 512
COMMON = Sizes(BUDGET // 2, BUDGET // 2, BLOCK)
OPTIONS = {
    "kv_policy": "gate",
    "h2o_budget": BUDGET,
    "h2o_recent_ratio": 0.5,
    "h2o_head_budgets": "measure",
    "h2o_prefill_chunk": CHUNK,
    "h2o_keep": "end",
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
}


@pytest.mark.slow
def test_engine_equals_reference():
    """In steps, of prompts beyond the budget and of one that fills it later; cold, and
    with all the hits that stock takes. The first also in chunks, in the same batch; and
    another turn goes on from what one of them held."""
    model, prompts = DenseLlama(ensure_model()), prompts_of(700, 400, 250)
    variant = Variant(NUM_QUERIES, 1, "mean", "token")
    wishes = [{"prefill_chunk": 0}] * len(prompts)
    with engine(ensure_model(), **OPTIONS) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        own = [
            sizes_of_heads(profile, BUDGET, BLOCK, 2048, len(prompt), NUM_TOKENS)
            for prompt in prompts
        ]
        weights = torch.tensor(profile.gate_weights())
        chunks = [(i, None) for i in range(len(prompts))] + [(0, CHUNK)]
        expected = [
            generate(
                model, prompts[i], NUM_TOKENS, [variant], COMMON, own[i],
                head_class=gated_heads(model, weights), chunk=chunk,
            )[0]
            for i, chunk in chunks
        ]  # fmt: skip
        for _ in range(2):
            assert_equal_densely(llm, [*prompts, prompts[0]], expected, [*wishes, {}])
        # The next turn of the second goes on within a block.
        turn = prompts[1] + expected[1].tokens + prompts[2][:150]
        result = generate(
            model, turn, NUM_TOKENS, [variant], COMMON, own[1],
            head_class=gated_heads(model, weights), before=expected[1],
        )  # fmt: skip
        assert_equal_densely(llm, [turn], result, [wishes[0] | {"continue": True}])
        assert scheduler(llm).h2o_stats.continued_tokens == 400 + NUM_TOKENS - 1
        # Compressed once, in the step in which it ends, and asked.
        once = generate(
            model, prompts[1], 1, [variant], COMMON, own[1],
            head_class=gated_heads(model, weights),
        )  # fmt: skip
        answers(llm, prompts[1:2], greedy(1, extra_args={"h2o": {"keep": "end"}}))
        asked = prompts[1] + prompts[2][:50]
        result = generate(
            model, asked, NUM_TOKENS, [variant], COMMON, own[1],
            head_class=gated_heads(model, weights), before=once[0],
        )  # fmt: skip
        assert_equal_densely(llm, [asked], result, [wishes[0] | {"continue": True}])
        assert scheduler(llm).h2o_stats.continued_tokens == 2 * 400 + NUM_TOKENS - 1
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        whole = greedy(NUM_TOKENS, extra_args={"h2o": wishes[0]})
        outputs = llm.generate(inputs, whole, use_tqdm=False)
    hits = [output.num_cached_tokens for output in outputs]
    assert hits == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
