"""What budget a request has, and what its answer reports."""

import pytest

from tests.core.helpers import BLOCK_SIZE, Driver


def test_a_budget_that_is_a_share_follows_its_request():
    """Half of up to 64, 96, 128 and 160 tokens, in blocks of 16."""
    driver = Driver(64, budget="50%", chunk=200)
    name = driver.add(list(range(100, 140)), 100, report=True)
    grown = {}
    for _ in range(100):
        row = driver.schedule().h2o_plan.rows[name]
        grown[row.budget] = row.grown_at
        driver.process()
    assert grown == {32: 0, 48: 64, 64: 96, 80: 128}
    # Of the 64 tokens that it held when it last grew and the 11 since, nothing is lost.
    assert driver.reports[name] == {
        "policy": "h2o",
        "budget": 80,
        "tokens_held": 64 + 139 - 128,
        "tokens_evicted": 128 - 64,
    }
    assert driver.scheduler.h2o_stats.tokens_evicted == 128 - 64
    driver.assert_pool_whole()


@pytest.mark.rule("R14")
def test_a_budget_of_its_own_leaves_the_rest_to_others():
    """In blocks, to the end, also after a preemption; counted as evicted."""
    driver = Driver(64, budget=96, chunk=200)
    small = driver.add(list(range(100, 200)), 40, budget=20)
    plain = driver.add(list(range(300, 400)), 40)
    for _ in range(20):
        driver.schedule()
        driver.process()
    held = driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()
    assert held == (32 + 96) // BLOCK_SIZE
    evicted = [100 + 19 - budget for budget in (32, 96)]
    assert driver.scheduler.h2o_stats.tokens_evicted == sum(evicted)
    driver.preempt_all()
    rows = driver.schedule().h2o_plan.rows
    assert [rows[name].budget for name in (small, plain)] == [32, 96]
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize(
    "prompt, tokens, asked, policy, budget, held",
    [
        (100, 40, {}, "h2o", 96, 96),
        (100, 40, {"budget": 32}, "h2o", 32, 32),
        (20, 40, {"budget": "25%"}, "h2o", 16, 16),
        (40, 40, {}, "h2o", 96, 79),  # fits
        (100, 1, {}, "h2o", 96, 100),  # ends before anything is evicted
        (100, 40, {"policy": "full"}, "full", None, 139),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_what_a_request_got_is_reported(
    prompt, tokens, asked, policy, budget, held, steps
):
    """Only where it asks for that; the same with steps in flight."""
    driver = Driver(64, budget=96, chunk=200)
    name = driver.add(list(range(100, 100 + prompt)), tokens, report=True, **asked)
    driver.add(list(range(100, 100 + prompt)), tokens, **asked)
    while driver.scheduler.has_unfinished_requests():
        while len(driver.in_flight) < steps:
            driver.schedule()
        driver.process()
    everything = prompt + tokens - 1
    assert driver.reports == {
        name: {
            "policy": policy,
            "budget": budget,
            "tokens_held": held,
            "tokens_evicted": everything - held,
        }
    }


def test_a_share_of_a_session_is_of_what_it_has_by_now():
    """And cut to the engine's budget, when nobody can be told any more."""
    driver = Driver(64, budget=64, chunk=200)
    for turn, budget in enumerate((32, 48, 64)):
        tokens = list(range(100 * turn, 100 * turn + 60))
        driver.add(tokens, 20, session="chat", budget="30%")
        row = driver.schedule().h2o_plan.rows["chat"]
        assert row.budget == budget
        driver.drain()
    driver.abort("chat")
    driver.assert_pool_whole()


@pytest.mark.parametrize("wishes", [{}, {"budget": 32}, {"policy": "full"}])
def test_refused_drafts_are_not_counted_as_evicted(wishes):
    driver = Driver(64, budget=64, drafts=4)
    name = driver.add(list(range(100, 200)), 60, report=True, **wishes)
    driver.drain()
    assert driver.refused > 10 and driver.accepted > 10
    held = {"full": 159}.get(wishes.get("policy"), wishes.get("budget", 64))
    assert driver.reports[name]["tokens_evicted"] == 159 - held
    assert driver.scheduler.h2o_stats.tokens_evicted == 159 - held


def test_drafts_end_where_the_budget_grows():
    """Steps begin where heads part and where the budget grows; the last token that is
    asked for is not computed."""
    driver = Driver(64, budget="25%", drafts=4)
    driver.add(list(range(100, 130)), 150)
    starts = set()
    while driver.scheduler.has_unfinished_requests():
        (row,) = driver.schedule().h2o_plan.rows.values()
        starts.add(row.num_computed_tokens)
        driver.process()
    served = {n for n in driver.ladder.lengths if 32 < n < 179}
    assert served and {32, *served} <= starts
    assert driver.accepted > 20
