"""Budgets that follow the request: an engine against the rules written down densely."""

import itertools

import pytest

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    SMOLLM2_HEADS,
    assert_equal_densely,
    assert_pool_whole,
    engine,
    prompts_of,
)
from tests.engine.test_reference import own_sizes
from tests.reference.dense_h2o import DenseLlama, Head, Sizes, Variant, generate
from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.profile import HeadProfile

pytestmark = pytest.mark.engine

BLOCK, LONGEST, NUM_TOKENS = 32, 224, 70
# 2 blocks up to 96 tokens, 3 up to 128, 4 up to 160, 5 up to 224.
LADDER = Ladder.of_share(0.7, 64, 5, BLOCK, LONGEST)
# The first is compressed to 3 blocks, the second fills two while it generates. The
# third asks for 3, and fills these.
LENGTHS, WISHES = (102, 62, 70), [{}, {}, {"budget": 96}]
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_budget": "70%",
    "h2o_min_budget": 64,
    "h2o_recent_ratio": 0.5,
    "h2o_observation_window": 64,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
}


class GrowingHead(Head):
    """Has other sizes from the tokens on at which its request grows.

    Until then heads may have parted; after that there is no budget common to all.
    """

    def __init__(self, growth, variant, common, sizes, capacity):
        super().__init__(variant, common, sizes, capacity)
        self.growth = growth

    def make_room(self, position):
        """What a larger budget has room for needs none."""
        if position in self.growth:
            self.common, self.sizes = Sizes(0, 0, BLOCK), self.growth[position]
        grown = position >= min(self.growth)
        if not grown or self.kept.sum() == self.sizes.budget:
            super().make_room(position)


def expected(prompt, variant, sizes_of):
    """Of a request that climbs; `sizes_of(blocks)` are those of the heads."""
    step = LADDER.enters(len(prompt), len(prompt) + NUM_TOKENS)
    common = own_sizes(LADDER.budgets[step], BLOCK)
    splits = [sizes_of(blocks) for blocks in LADDER.budgets]
    heads = itertools.product(range(30), range(3))

    def head_class(*args):
        layer, head = next(heads)
        growth = {
            LADDER.lengths[i - 1]: splits[i][layer][head]
            for i in range(step + 1, len(splits))
        }
        return GrowingHead(growth, *args)

    result = generate(
        DenseLlama(ensure_model()), prompt, NUM_TOKENS, [variant], common,
        splits[step], head_class=head_class,
    )[0]  # fmt: skip
    end = len(prompt) + NUM_TOKENS - 1
    assert sum(length < end for length in LADDER.lengths[step:]) >= 2, "it grows twice"
    return result


@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "uniform"])
def test_a_request_that_grows_equals_its_dense_reference(by_head):
    """Beside one that does not; in chunks, and the second time with prefix hits."""
    profile = HeadProfile.load(SMOLLM2_HEADS)
    config = H2OConfig(recent_ratio=0.5, budget="70%", min_budget=64)
    budgets = HeadBudgets(profile, config, LADDER, BLOCK)

    def sizes_of(blocks, climbs=True):
        split = budgets.split(blocks, climbs) if by_head else [[blocks] * 3] * 30
        return [[own_sizes(n, BLOCK) for n in layer] for layer in split]

    prompts, variant = prompts_of(*LENGTHS), Variant(64, 15, "mean", "token", sinks=0)
    results = [expected(prompt, variant, sizes_of) for prompt in prompts[:2]]
    results += generate(
        DenseLlama(ensure_model()), prompts[2], NUM_TOKENS, [variant],
        own_sizes(3, BLOCK), sizes_of(3, climbs=False),
    )  # fmt: skip
    heads = "auto" if by_head else "uniform"
    with engine(**OPTIONS, h2o_head_budgets=heads) as llm:
        for _ in range(2):
            assert_equal_densely(llm, prompts, results, WISHES)
        assert_pool_whole(llm)
