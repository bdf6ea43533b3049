"""Which chunk a position is in, and what of it scores."""

import pytest

from vllm_h2o.policy.chunks import chunk_at, chunk_tokens, first_scoring


@pytest.mark.parametrize(
    ("asked", "budget", "expected"),
    [(0, 64, 0), (256, 64, 256), (250, 64, 256), (1, 64, 128), (1, 40, 96)],
)
def test_a_chunk_is_whole_blocks_and_two_budgets(asked, budget, expected):
    assert chunk_tokens(asked, budget, block_size=32) == expected


@pytest.mark.parametrize(
    ("budget", "held", "expected"),
    [(256, 1.0, 512), (256, 1.6, 320), (256, 16 / 9, 288), (256, 2.0, 288)],
)
def test_a_chunk_is_two_budgets_of_memory_and_more_than_one(budget, held, expected):
    assert chunk_tokens(1, budget, 32, held) == expected


@pytest.mark.parametrize(
    ("position", "origin", "expected"),
    [
        (0, 0, (0, 64)),
        (63, 0, (0, 64)),
        (64, 0, (64, 128)),
        (149, 0, (128, 150)),
        (150, 0, (128, 150)),  # what comes later is in the last
        (999, 0, (128, 150)),
        (37, 37, (37, 101)),
        (100, 37, (37, 101)),
        (101, 37, (101, 150)),
        (149, 149, (149, 150)),
    ],
)
def test_chunks_follow_each_other_from_where_reading_begins(position, origin, expected):
    assert chunk_at(position, 64, 150, origin) == expected


def test_by_the_gate_all_of_a_later_chunks_queries_score():
    assert first_scoring(64, 100, gated=True) == 64
    assert first_scoring(64, 100, gated=False) == 100
    assert first_scoring(120, 100, gated=False) == 120
