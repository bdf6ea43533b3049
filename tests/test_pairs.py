"""Which combinations are run always."""

import itertools

import pytest

from tests.pairs import in_pairs


def test_all_pairs_meet_in_what_is_not_slow():
    mark = pytest.mark.check
    factors = [1, 2, 3], "abcd", [True, pytest.param(False, marks=mark)]
    names, params = in_pairs("number, letter, truth", *factors).args
    assert names == "number, letter, truth"
    plain = [1, 2, 3], "abcd", [True, False]
    assert [param.values for param in params] == [*itertools.product(*plain)]
    slow = [param for param in params if pytest.mark.slow in param.marks]
    assert len(slow) == 12, "as many as a pair of the longest factors leaves out"
    kept = [param.values for param in params if param not in slow]
    for (i, ours), (j, theirs) in itertools.combinations(enumerate(plain), 2):
        met = {(values[i], values[j]) for values in kept}
        assert met == {*itertools.product(ours, theirs)}
    for param in params:
        assert (mark in param.marks) == (param.values[2] is False)
