"""The way with the least regret is taken, at the nearest budget."""

import json
import math

import pytest

from vllm_h2o.policy.profile import HeadProfile
from vllm_h2o.policy.trials import SHARES, WAYS, Trials, Way

GATE, ATTENTION = Way("gate", True), Way("attention", True)


def trials(gate, attention):
    """Of three texts; at the largest budget they change places."""
    tables = [gate] * 4 + [attention], [attention] * 4 + [gate]
    names = GATE.name, ATTENTION.name
    return Trials(dict(zip(names, tables, strict=True)))


def test_what_is_best_on_most_texts_and_does_harm_on_one_is_not_used():
    found = trials([1.0, 2.0, 6.0], [1.2, 2.5, 3.0]).regrets([GATE, ATTENTION], 0.2)
    assert [*found] == [ATTENTION, GATE]
    assert found == pytest.approx({ATTENTION: 1.25, GATE: 2.0})


def test_the_nearest_budget_counts():
    both = trials([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    for share, first in (
        (0.001, GATE),
        (0.4, GATE),
        (0.45, ATTENTION),
        (1.0, ATTENTION),
    ):
        assert next(iter(both.regrets([GATE, ATTENTION], share))) == first


def test_only_what_was_tried_and_is_allowed_is_compared():
    both = trials([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert both.regrets(WAYS, 0.1).keys() == {GATE, ATTENTION}
    assert both.regrets([ATTENTION, Way("attention", False)], 0.1) == {ATTENTION: 1.0}
    assert both.regrets([Way("gate", False)], 0.1) == {}
    nothing = trials([0.0] * 3, [0.0] * 3)
    assert nothing.regrets([GATE, ATTENTION], 0.1)[GATE] == 0.0


ROW = [[1.0, 2.0]] * len(SHARES)


@pytest.mark.parametrize(
    "lost",
    [
        {},
        {"by luck": ROW},
        {GATE.name: ROW[:2]},
        {GATE.name: [[]] * len(SHARES)},
        {GATE.name: ROW, ATTENTION.name: [[1.0]] * len(SHARES)},
        {GATE.name: [*ROW[1:], [1.0, math.nan]]},
        {GATE.name: [*ROW[1:], [1.0, -1.0]]},
        {GATE.name: [*ROW[1:], [1.0, "2"]]},
    ],
)
def test_a_profile_with_damaged_trials_is_none(lost):
    curves = [[[0.5, 0.1]]]
    with pytest.raises(ValueError, match="trials"):
        HeadProfile([64, 128], curves, trials={"errors": lost})


def test_trials_of_roots_are_refused():
    """Which versions before added up; a profile's file may be of one."""
    with pytest.raises(ValueError, match="measure it again"):
        HeadProfile([64, 128], [[[0.5, 0.1]]], trials={"lost": {GATE.name: ROW}})


def test_trials_are_kept_with_a_profile():
    profile = HeadProfile(
        [64, 128], [[[0.5, 0.1]]], trials={"errors": {GATE.name: ROW}}
    )
    assert HeadProfile.of_json(json.loads(profile.as_json())) == profile
    assert profile.stretched(4096, 1024).trials == profile.trials
