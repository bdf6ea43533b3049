"""Budgets that follow the request: an engine against the rules written down densely."""

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    SMOLLM2_HEADS,
    assert_equal_densely,
    assert_pool_whole,
    engine,
    prompts_of,
    scheduler,
)
from tests.reference.dense_h2o import DenseLlama, Head, Variant, generate
from tests.reference.heads import GrowingHead, gated_heads
from tests.reference.sizes import own_sizes
from vllm_h2o.attention.cpu_backend import H2OCPUBackend
from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.profile import HeadProfile, gate_in_json

pytestmark = pytest.mark.engine

PAGE = 32


def ladder_of(block):
    """2 blocks up to 3 times as many tokens, 3 up to 4, 4 up to 5, 5 up to 7."""
    return Ladder.of_share(0.7, 2 * block, 5, block, 7 * block)


def options_of(block):
    return {
        "kv_policy": "h2o",
        "block_size": block,
        "h2o_budget": "70%",
        "h2o_min_budget": 2 * block,
        "h2o_recent_ratio": 0.5,
        "max_model_len": 7 * block,
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
        "h2o_keep": "end",
    }


def with_gate(profile):
    """The profile with a gate that says something else of each head."""
    weights = torch.randn(30, 3, 2 * 64 + 4, generator=torch.Generator().manual_seed(1))
    weights *= 0.02
    weights[..., -1] += 1.0
    return replace(profile, gate=gate_in_json(weights, 0.5))


def expected(prompt, num_tokens, variant, ladder, sizes_of, weights=None):
    """Of a request that climbs; `sizes_of(blocks)` are those of the heads, and the
    weights those of their gates."""
    step = ladder.enters(len(prompt), len(prompt) + num_tokens)
    grows_at = {ladder.lengths[i - 1]: i for i in range(step + 1, len(ladder.budgets))}
    heads = itertools.product(range(30), range(3))
    model, cls = DenseLlama(ensure_model()), GrowingHead
    if weights is not None:
        cls = gated_heads(model, weights, GrowingHead)

    def head_class(*args):
        return cls(growth(grows_at, ladder, sizes_of, *next(heads)), *args)

    return generate(
        model, prompt, num_tokens, [variant],
        common_of(ladder, step), sizes_of(ladder.budgets[step]), head_class=head_class,
    )[0]  # fmt: skip


def growth(grows_at, ladder, sizes_of, layer, head):
    """Sizes of a head by the tokens at which its request comes to a step."""
    return {
        tokens: (common_of(ladder, i), sizes_of(ladder.budgets[i])[layer][head])
        for tokens, i in grows_at.items()
    }


def common_of(ladder, step):
    return own_sizes(ladder.budgets[step] * ladder.block_size // PAGE, PAGE)


def expected_next(before, turn, num_tokens, rules, grows_at, ends):
    """Of a turn that goes on, and grows at these tokens; its chunks have these ends."""
    held, (variant, ladder, sizes_of, _) = before.keys[0].shape[2] - 1, rules
    for layer, heads in enumerate(before.heads):
        for number, head in enumerate(heads):
            before_it = {at: of for at, of in head.growth.items() if at < held}
            new = growth(grows_at, ladder, sizes_of, layer, number)
            head.growth = before_it | new
    return generate(
        DenseLlama(ensure_model()), turn, num_tokens, [variant], common_of(ladder, 0),
        chunk=ends, before=before,
    )[0]  # fmt: skip


def short_prompts():
    """The first is compressed to 3 blocks, the second fills two while it generates. The
    third asks for 3, and fills these."""
    return prompts_of(102, 62, 70)


def long_prompts():
    """The same, for blocks that are twice as large."""
    first, _, second = prompts_of(204, 1, 124)
    return [first, second, first[:140]]


@pytest.mark.parametrize(
    ("by", "block", "prompts_of_block", "num_tokens"),
    [
        pytest.param(
            "head", 32, short_prompts, 70, id="by head", marks=pytest.mark.slow
        ),
        pytest.param("gate", 32, short_prompts, 70, id="by head and the gate"),
        pytest.param("", 32, short_prompts, 70, id="uniform", marks=pytest.mark.slow),
        pytest.param(
            "head", 64, long_prompts, 140, id="in pages", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.rule("R10")
def test_a_request_that_grows_equals_its_dense_reference(
    monkeypatch, tmp_path, by, block, prompts_of_block, num_tokens
):
    """Beside one that does not; in chunks, and the second time with prefix hits."""
    monkeypatch.setattr(H2OCPUBackend, "most_page_slots", PAGE)
    profile = HeadProfile.load(SMOLLM2_HEADS)
    heads = "auto" if by else "uniform"
    how = {"h2o_observation_window": 64, "h2o_head_budgets": heads}
    variant, weights = Variant(64, 15, "mean", "token"), None
    if by == "gate":
        profile = with_gate(profile)
        profile.save(file := tmp_path / "heads.json")
        how = {"kv_policy": "gate", "h2o_head_budgets": str(file)}
        variant = replace(variant, pooling=1)
        weights = torch.tensor(HeadProfile.load(file).gate_weights())
    ladder, of_block = ladder_of(block), block // PAGE
    config = H2OConfig(recent_ratio=0.5, budget="70%", min_budget=2 * block)
    budgets = HeadBudgets(profile, config, ladder, PAGE)

    def sizes_of(blocks, climbs=True):
        split = [[blocks * of_block] * 3] * 30
        if by:
            split = budgets.split(blocks, climbs)
        return [[own_sizes(n, PAGE) for n in layer] for layer in split]

    prompts, rules = prompts_of_block(), (variant, ladder, sizes_of, weights)
    results = [expected(prompt, num_tokens, *rules) for prompt in prompts[:2]]
    for prompt in prompts[:2]:
        ends = [n for n in ladder.lengths if len(prompt) < n < len(prompt) + num_tokens]
        assert len(ends) >= 2, "it grows twice"
    model = DenseLlama(ensure_model())
    results += generate(
        model, prompts[2], num_tokens, [variant],
        own_sizes(3 * of_block, PAGE), sizes_of(3, climbs=False),
        head_class=Head if weights is None else gated_heads(model, weights),
    )  # fmt: skip
    wishes = [{}, {}, {"budget": 3 * block}]
    with engine(**(options_of(block) | how)) as llm:
        for _ in range(2):
            assert_equal_densely(llm, prompts, results, wishes)
        _assert_goes_on(llm, prompts, results, rules)
        assert_pool_whole(llm)


def _assert_goes_on(llm, prompts, results, rules):
    """The next turns of requests that have grown go on with the budgets of these.

    One whose heads are not full grows where its budget ends, one whose heads are full
    when it begins, and one has the largest budget.
    """
    block = rules[1].block_size
    more = prompts_of(8 * block)[0][7 * block :]
    cut = block * 2 // 3
    short = expected(prompts[0], cut, *rules)
    assert_equal_densely(llm, prompts[:1], [short])
    held = len(prompts[0]) + cut - 1
    three, four, five, _ = rules[1].lengths
    assert three < held < four and four < len(prompts[1]) + 70 * block // 32 < five
    cases = [
        (prompts[1], results[1], 40, {five: 3}, [five]),
        (prompts[0], results[0], 25, {}, []),
        (prompts[0], short, 27, {held: 2, five: 3}, []),
    ]
    for prompt, before, length, grows_at, ends in cases:
        turn = prompt + before.tokens + more[: length * block // 32]
        result = expected_next(before, turn, cut, rules, grows_at, [*ends, len(turn)])
        gone_on = scheduler(llm).h2o_stats.continued_tokens
        assert_equal_densely(llm, [turn], [result], [{"continue": True}])
        gone_on = scheduler(llm).h2o_stats.continued_tokens - gone_on
        assert gone_on == len(prompt) + len(before.tokens) - 1
