"""What ways lose on texts: budgets by the others, errors between two of the grid."""

import numpy as np
import pytest

from vllm_h2o.calibration.trying import trials_of
from vllm_h2o.policy.profile import HeadProfile, allocate
from vllm_h2o.policy.trials import SHARES, WAYS, Way

GRID, LENGTH, BLOCK = [16, 64, 256, 800], 1024, 32
RULES = ("attention", "gate")


def curves(seed, texts=3, layers=4, heads=2):
    """Falling errors of texts, some heads of which lose far more."""
    random = np.random.default_rng(seed)
    size = np.exp(3 * random.standard_normal((1, layers, heads, 1)))
    falls = random.uniform(0.2, 0.9, (texts, layers, heads, len(GRID))).cumprod(axis=3)
    return size * falls


def test_losses_are_those_of_the_budgets_that_others_give():
    past, by_rule = curves(0), {rule: curves(n) for n, rule in enumerate(RULES, 1)}
    found = trials_of(GRID, LENGTH, past, by_rule).errors
    assert {*found} == {way.name for way in WAYS}
    share = SHARES.index(0.2)
    blocks = round(0.2 * LENGTH / BLOCK)
    for text in range(3):
        others = [past[i] for i in range(3) if i != text]
        mean = (others[0] + others[1]) / 2
        profile = HeadProfile(GRID, mean.tolist(), "", LENGTH)
        profile = profile.stretched(LENGTH, blocks * BLOCK)
        own = allocate(profile, BLOCK, blocks, LENGTH // BLOCK, 1)
        assert len({n for layer in own for n in layer}) > 2
        for rule, by_head in ((rule, way) for rule in RULES for way in (True, False)):
            lost = 0.0
            for layer in range(4):
                for head in range(2):
                    tokens = BLOCK * (own[layer][head] if by_head else blocks)
                    logs = np.log(by_rule[rule][text, layer, head])
                    error = np.exp(np.interp(np.log(tokens), np.log(GRID), logs))
                    lost += error if tokens < LENGTH else 0.0
            mine = found[Way(rule, by_head).name][share][text]
            assert mine == pytest.approx(lost, rel=1e-3)


def test_without_a_gate_heads_are_tried_alone():
    found = trials_of(GRID, LENGTH, curves(0), {"attention": curves(1)}).errors
    assert {*found} == {way.name for way in WAYS if way.rule == "attention"}
