"""Which budget serves how many tokens."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_h2o.policy.ladder import Ladder, length_class, lengths_of

LONG = Ladder.of_share(0.2, 256, 820, 32, 131072)


def test_a_server_of_131072_tokens():
    """The budget of 700 tokens is not 26214 slots but 256, of 10000 a fifth or so."""
    assert 35 < len(LONG.budgets) < 45
    assert LONG.budgets[:3] == (8, 9, 10) and LONG.lengths[:2] == (1280, 1440)
    assert (LONG.budgets[-1], LONG.lengths[-1]) == (820, 131072)
    assert LONG.budgets[LONG.enters(700, 131072)] == 8
    ten_thousand = LONG.enters(10000, 10000)
    assert 2000 <= 32 * LONG.budgets[ten_thousand] <= 1.125 * 2000 + 32


def test_a_request_begins_with_what_its_end_needs_if_that_is_near():
    assert LONG.serves(LONG.enters(2048, 2560)) >= 2560
    # If not, with what a quarter more than its prompt does.
    assert LONG.enters(2048, 131072) == LONG.enters(2048, 2560)
    assert LONG.enters(2048, 2049) < LONG.enters(2048, 2560)
    assert LONG.enters(131072, 131072) == len(LONG.budgets) - 1
    # A session may have come to have more than the longest request.
    assert LONG.enters(140000, 131072) == len(LONG.budgets) - 1


def test_a_smaller_share_of_a_requests_own_has_later_steps():
    own = [LONG.serves(step, 0.1) for step in range(len(LONG.budgets))]
    assert own[0] == 2 * LONG.lengths[0] and own[-1] == LONG.lengths[-1]
    assert LONG.enters(10000, 10000, 0.1) < LONG.enters(10000, 10000)


def test_a_budget_that_is_on_no_ladder_grows_from_none():
    ladder = Ladder(16, (2, 4, 8), (64, 128, 256), 0.5)
    assert [ladder.up_to(n) for n in (4, 5)] == [(2, 4), (5,)]


def test_a_number_is_the_budget_of_all():
    ladder = Ladder.of_number(16, 32, 8192)
    assert ladder.enters(1, 2) == ladder.enters(8192, 8192) == 0
    assert ladder.serves(0) == ladder.serves(0, 0.1) == 8192


@given(
    st.integers(1, 1000),
    st.sampled_from([16, 32, 128]),
    st.integers(300, 200000),
    st.integers(1, 4096),
    st.floats(0.0, 1.0),
)
@example(750, 16, 300, 64, 0.0)  # the last budget is far from the one before
def test_classes(promille, block_size, longest, least, prompt):
    share = promille / 1000
    most = math.ceil(math.ceil(share * longest) / block_size)
    ladder = Ladder.of_share(share, least, max(most, 2), block_size, longest)
    budgets, lengths = ladder.budgets, ladder.lengths
    assert budgets[-1] == max(most, 2) and lengths[-1] == longest
    for step, budget in enumerate(budgets[1:], 1):
        assert budgets[step - 1] < budget <= lengths[step - 1] / block_size
        # A head gains no more than what the request reads in between, on average less.
        gained = budget - budgets[step - 1]
        assert lengths[step - 1] + gained * block_size <= lengths[step]
    for budget, length in zip(budgets[:-1], lengths[:-1], strict=True):
        slots = budget * block_size
        # Filled before it grows, whole blocks, and no less than the share but for the
        # shares that leave no block to evict.
        assert slots < length and not length % block_size
        assert slots >= share * length - 1e-6 or length == slots + block_size
        assert slots >= min(least, budgets[-1] * block_size)
    num_tokens = max(int(prompt * longest), 1)
    for most in (num_tokens, longest):
        step = ladder.enters(num_tokens, most)
        assert ladder.serves(step) >= num_tokens
        assert not step or budgets[step] * block_size < num_tokens


@pytest.mark.parametrize("block_size", [16, 32])
def test_no_step_is_longer_than_an_eighth_or_a_block(block_size):
    ladder = Ladder.of_share(0.1, 256, 820, block_size, 262144)
    for before, budget in zip(ladder.budgets, ladder.budgets[1:], strict=False):
        assert budget <= max(before * 9 / 8, before + 1)


@pytest.mark.parametrize("budget, longest", [(64, 8192), (192, 1000), (512, 700)])
def test_a_number_is_split_for_a_class_of_lengths(budget, longest):
    lengths = lengths_of(budget, longest)
    assert lengths[0] == longest and lengths[-1] >= min(2 * budget, longest)
    assert len(lengths) == 1 + int(2 * math.log2(max(longest / (2 * budget), 1)))
    for n in (1, budget, longest // 2, longest):
        for most in (n, longest):
            mine = lengths[length_class(budget, longest, n, most)]
            # Of what reads n tokens and may go on for long, a quarter more is expected.
            aim = min(most, int(1.25 * n))
            assert mine >= min(aim, longest)
            assert mine <= max(2**0.5 * aim + 1, lengths[-1])


@pytest.mark.parametrize("budget, longest", [(64, 8192), (192, 1000)])
def test_a_class_of_lengths_ends_with_its_length(budget, longest):
    for mine, length in enumerate(lengths_of(budget, longest)):
        assert length_class(budget, longest, length, length) == mine
        if mine:
            assert length_class(budget, longest, length + 1, length + 1) == mine - 1


def test_a_class_of_a_share_ends_with_its_length():
    for step, length in enumerate(LONG.lengths[:-1]):
        assert LONG.enters(length, length) == step
        assert LONG.enters(length + 1, length + 1) == step + 1
