"""A request's life by counts alone."""

import sys

import pytest

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Climb, Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.life import Blocks, Life, RowPlan, Terms
from vllm_h2o.policy.request import RequestOptions

SIZE, BUDGET, LONGEST = 16, 64, 256
NUMBER = Climb(Ladder.of_number(BUDGET // SIZE, SIZE, LONGEST))
HALF = Climb(Ladder.of_share(0.5, 32, LONGEST // 2 // SIZE, SIZE, LONGEST))
"""Serves 64, 96, 128, .. tokens with 32, 48, 64, .. slots."""


def life_of(
    num_tokens, most, climb=NUMBER, chunk=0, unit="token", gated=False, **wishes
):
    config = H2OConfig(
        budget=BUDGET,
        observation_window=20,
        eviction_unit=unit,
        prompt_score="gate" if gated else "attention",
        prefill_chunk=chunk,
        keep="end" if unit == "token" else "none",
        resident_dtype="model",
    )
    most_blocks = climb.ladder.budgets[-1]
    terms = Terms(config, SIZE, SlotLayout.of_blocks(config, SIZE, most_blocks))
    return Life.begin(terms, num_tokens, most, climb, RequestOptions(**wishes))


@pytest.mark.parametrize(
    "num_tokens, most, wishes, first_query",
    [
        (30, 64, {}, None),  # fits
        (30, 65, {}, 10),
        (64, 65, {}, None),  # ends with its first token
        (64, 65, {"keep": "end"}, 44),  # which is to be kept
        (64, 66, {}, 44),
        (99, 150, {"observation_window": 5}, 94),
        (99, 150, {"policy": "full"}, None),
        (10, 70, {}, 0),
    ],
)
@pytest.mark.rule("R4")
def test_queries_score_where_something_will_compete(
    num_tokens, most, wishes, first_query
):
    life = life_of(num_tokens, most, **wishes)
    assert life.stays_dense == (first_query is None)
    if first_query is None:
        assert life.must_run == life.first_query == max(BUDGET, life.prefill_end)
        assert life.tokens_to_publish(most) == life.tokens_held(most) == most
        assert life.needs(num_tokens) == (-(-num_tokens // SIZE), 0)
        assert life.prefill_end == (most if life.options.is_full else num_tokens)
    else:
        assert life.must_run == life.first_query == first_query
        assert life.tokens_to_publish(most) == num_tokens
        assert life.resumes_at() == first_query // SIZE * SIZE


def test_by_the_gate_no_query_has_to_run():
    life = life_of(99, 150, gated=True)
    assert not life.stays_dense
    assert (life.must_run, life.resumes_at()) == (99, 0)


@pytest.mark.rule("R15")
def test_blocks_of_a_prompt_then_of_slots():
    """A prompt of 100 in blocks of 16, then its budget of 64 slots for good."""
    life = life_of(100, 150)
    assert [life.needs(n) for n in (1, 16, 99)] == [(1, 0), (1, 0), (7, 0)]
    assert life.needs(100) == life.needs(150) == Blocks(7, 4)
    assert life.serves(Blocks(2, 0)) == 32
    # The prompt's last token needs slots too.
    assert life.serves(Blocks(7, 0)) == 99
    assert life.serves(Blocks(7, 3)) == 48
    assert life.serves(Blocks(7, 4)) == sys.maxsize
    assert [life.tokens_held(n) for n in (50, 99, 100, 150)] == [50, 99, 64, 64]


def test_of_whole_blocks_the_one_that_is_written_holds_its_new_tokens_only():
    life = life_of(100, 150, unit="block")
    assert [life.tokens_held(n) for n in (99, 100, 112, 113)] == [99, 52, 64, 49]


def test_what_is_served_is_what_is_needed():
    for num_tokens, climb in ((30, NUMBER), (100, NUMBER), (40, HALF), (70, HALF)):
        life = life_of(num_tokens, 250, climb)
        for count in range(1, 250):
            life.grow(count)
            held = life.needs(count)
            assert life.serves(held) >= count
            assert life.needs(min(life.serves(held), 250)) == held


def test_a_share_grows_with_its_request():
    life, found = life_of(40, 140, HALF), {}
    for count in range(40, 141):
        life.grow(count)
        found[life.budget] = life.row.grown_at, life.row.grown_from
    assert found == {32: (0, 0), 48: (64, 32), 64: (96, 48), 80: (128, 64)}
    # Of 64 slots that were filled and the 12 tokens since, nothing is lost.
    assert life.tokens_held(140) == 64 + 12
    with pytest.raises(AssertionError, match="where a step begins"):
        life.grow(250)


@pytest.mark.rule("R17")
def test_a_prompt_in_chunks_is_a_row_for_each():
    """Of 128 tokens: twice the budget, though 16 were asked for."""
    life = life_of(200, 220, chunk=16)
    assert (life.must_run, life.resumes_at(), life.tokens_to_publish(200)) == (0, 0, 0)
    assert [life.step_end(n) for n in (0, 127, 128, 200)] == [
        128,
        128,
        200,
        sys.maxsize,
    ]
    assert life.needs(128) == life.needs(200) == (8, 4)
    rows = [life.next_row(n) for n in (0, 100, 128, 200, 201)]
    assert [row.chunk_start for row in rows] == [0, 0, 128, 128, 0]
    assert [row.chunk_end for row in rows] == [128, 128, 200, 200, 200]
    assert [row.first_query for row in rows] == [108, 108, 180, 180, 180]
    assert [row.scored_from for row in rows] == [0, 0, 108, 108, 0]
    assert not life.reads_on and life.all_scored_from() == 180
    assert [life.tokens_held(n) for n in (128, 150, 200)] == [64, 64 + 22, 64]


def test_a_request_goes_on_from_a_snapshot():
    before = life_of(100, 150)
    assert [before.can_be_kept(n) for n in (99, 100)] == [False, True]
    assert not life_of(30, 150).can_be_kept(BUDGET)
    life = life_of(150, 170)
    life.go_on(119, before.climb, before.all_scored_from())
    # Its dense blocks are those from the 8th on, which has the 120th token.
    assert (life.first_column, life.dense_blocks) == (7, 3)
    assert life.needs(120) == (3, 4)
    assert life.next_row(119) == RowPlan(
        0, 0, 150, 130, BUDGET, chunk_start=119, scored_from=80
    )
    assert life.step_end(119) == 150 and life.start == 119
    assert life.tokens_held(130) == BUDGET + 11
