"""Budgets by request: CAKE and D2O in an engine against their rules written down
densely."""

import pytest
import torch
from vllm.v1.request import Request

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    assert_equal_densely,
    assert_pool_whole,
    engine,
    greedy,
    prompts_of,
    scheduler,
)
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant, generate
from tests.reference.heads import CakeHead, D2OHead
from tests.reference.sizes import own_sizes

pytestmark = pytest.mark.engine

BLOCK, BUDGET_BLOCKS, LONGEST, NUM_TOKENS, WINDOW = 32, 8, 64, 12, 32
BUDGET = BLOCK * BUDGET_BLOCKS
COMMON = Sizes(BUDGET // 2, BUDGET // 2, BLOCK)


def blocks_of(heads, num_tokens):
    """`[layers][KV heads]` blocks in proportion to what heads wish, none more than a
    prompt beyond the budget has."""
    most = -(-num_tokens // BLOCK) if num_tokens > BUDGET else LONGEST
    shares = []
    for mine in zip(*heads, strict=True):  # all layers, of a KV head
        wish, fewest = (torch.tensor(x).double() for x in mine[0].shares(mine))
        low, high = 0.0, 1e9 / float(wish.max())
        for _ in range(200):
            middle = (low + high) / 2
            total = (wish * middle).clamp(max=most).maximum(fewest).sum()
            low, high = (
                (middle, high) if total < len(mine) * BUDGET_BLOCKS else (low, middle)
            )
        exact = (wish * low).clamp(max=most).maximum(fewest)
        blocks = (exact + 1e-6).floor()
        left = int(len(mine) * BUDGET_BLOCKS - blocks.sum())
        blocks[(exact - blocks).argsort(descending=True, stable=True)[:left]] += 1
        shares.append([int(n) for n in blocks])
    return [list(layer) for layer in zip(*shares, strict=True)]


def densely(model, prompt, variant, head_class):
    """With the sizes that a first reading of the prompt gives."""
    (read,) = generate(model, prompt, 1, [variant], COMMON, head_class=head_class)
    blocks = blocks_of(read.heads, len(prompt))
    assert len({n for layer in blocks for n in layer}) > 4
    own = [[own_sizes(n, BLOCK) for n in layer] for layer in blocks]
    return generate(
        model, prompt, NUM_TOKENS, [variant], COMMON, own, head_class=head_class
    )[0]


@pytest.mark.parametrize(
    ("policy", "variant", "head_class"),
    [
        pytest.param(
            "cake",
            Variant(WINDOW, 5, "sum", "token", decay=0.0, sinks=0),
            CakeHead,
            marks=pytest.mark.slow,
        ),
        ("d2o", Variant(None, 1, "sum", "token", sinks=4, merge=True), D2OHead),
    ],
    ids=["cake", "d2o"],
)
def test_engine_equals_reference(policy, variant, head_class):
    """In chunks, of prompts beyond the budget and of one that fills it later, side by
    side, each with its own split; the second time they hit the prefix cache."""
    model, prompts = DenseLlama(ensure_model()), prompts_of(700, 400, 250)
    expected = [densely(model, prompt, variant, head_class) for prompt in prompts]
    options = {"h2o_budget": BUDGET, "max_num_batched_tokens": 256}
    with engine(kv_policy=policy, enable_prefix_caching=True, **options) as llm:
        assert_equal_densely(llm, prompts, expected)
        assert_equal_densely(llm, prompts, expected)


def test_a_session_gives_its_split_back_when_its_next_turn_waits():
    """There is room for the split of one request, and another one comes between."""
    prompts = prompts_of(300, 40, 310)
    options = {"h2o_budget": 128, "max_num_seqs": 1}
    with engine(kv_policy="cake", **options) as llm:
        core = llm.llm_engine.engine_core.engine_core

        def add(name, prompt, resumable):
            parameters = greedy(4)
            parameters.update_from_generation_config({}, eos_token_id=2)
            core.scheduler.add_request(
                Request(name, prompt, parameters, None, resumable=resumable)
            )

        add("session", prompts[0], True)
        core.step()
        add("session", prompts[1], True)
        add("other", prompts[2], False)
        requests = dict(core.scheduler.requests)
        while not requests["other"].is_finished():
            core.step()
        assert requests["other"].num_output_tokens == 4
        scheduler(llm).finish_requests(
            "session", requests["session"].status.FINISHED_ABORTED
        )
        core.step()
        assert_pool_whole(llm)
