"""Blocks are shared out in proportion, whole and within bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy.sharing import share_out


@pytest.mark.parametrize(
    ("preferences", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [6, 6, 6, 6]),
        ([1.0, 2.0, 3.0, 6.0], [2, 4, 6, 12]),
        ([0.0, 0.0, 1.0, 1.0], [1, 1, 11, 11]),
        ([0.0, 0.0, 0.0, 1.0], [3, 3, 2, 16]),
        ([0.0, 0.0, 0.0, 0.0], [6, 6, 6, 6]),
        ([math.nan, 1.0, 1.0, math.inf], [1, 11, 11, 1]),
        ([1.0, 1.0, 1.0, 2.0], [5, 5, 5, 9]),
    ],
)
def test_shares(preferences, expected):
    assert share_out(preferences, 24, [1] * 4, 16) == expected


def test_some_get_more_at_least():
    assert share_out([1.0, 1.0, 4.0, 6.0], 24, [6, 1, 1, 1], 16) == [6, 2, 6, 10]
    assert share_out([0.0, 0.0, 1.0], 12, [4, 4, 4], 16) == [4, 4, 4]


@given(
    st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(0, 40),
    st.floats(0.0, 1.0),
)
def test_everybody_gets_his_own_least(wishes, more, full):
    preferences, fewest = zip(*wishes, strict=True)
    most = max(fewest) + more
    total = sum(fewest) + round(full * (len(fewest) * most - sum(fewest)))
    blocks = share_out(preferences, total, fewest, most)
    assert sum(blocks) == total
    assert all(low <= n <= most for low, n in zip(fewest, blocks, strict=True))


@given(
    st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 40),
    st.floats(0.0, 1.0),
)
def test_all_is_shared_out_within_bounds_and_who_wishes_more_gets_no_less(
    preferences, fewest, more, full
):
    count, most = len(preferences), fewest + more
    total = count * fewest + round(full * count * more)
    blocks = share_out(preferences, total, [fewest] * count, most)
    assert sum(blocks) == total
    assert all(fewest <= n <= most for n in blocks)
    # But for the fraction of a block that goes to the largest remainder.
    for wish, mine in zip(preferences, blocks, strict=True):
        for other, theirs in zip(preferences, blocks, strict=True):
            assert wish <= other or mine >= theirs - 1
