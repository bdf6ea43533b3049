"""Which prefix hits are taken, and what is published."""

import pytest

from tests.core.helpers import Driver


@pytest.mark.parametrize(
    "prompt, generated, first_query",
    [(30, 34, 64), (30, 35, 10), (64, 1, 64), (64, 2, 44), (99, 1, 99), (10, 60, 0)],
)
@pytest.mark.rule("R4")
def test_no_query_scores_where_nothing_will_compete(prompt, generated, first_query):
    """Nor where the first token is the last: nothing is decoded."""
    driver = Driver(64, window=20, budget=64, chunk=200)
    name = driver.add(list(range(100, 100 + prompt)), generated)
    assert driver.schedule().h2o_plan.rows[name].first_query == first_query
    driver.drain()
    assert len(driver.outputs[name]) == generated
    driver.assert_pool_whole()


@pytest.mark.parametrize(
    "window, expected", [(1, 160), (16, 144), (17, 144), (18, 128), ("all", 0)]
)
@pytest.mark.rule("R22")
def test_prefix_hits_leave_the_window(window, expected):
    driver = Driver(64, window, chunk=200)
    prompt = list(range(100, 261))
    driver.add(prompt, 2)
    driver.drain()
    name = driver.add(prompt, 2)
    row = driver.schedule().h2o_plan.rows[name]
    assert row.num_computed_tokens == expected


@pytest.mark.parametrize(
    "window, expected", [(1, 160), (16, 144), (17, 144), (18, 128), ("all", 0)]
)
def test_hits_beside_a_state_are_those_without(window, expected):
    """A state is kept where a step ends: one does where the window may begin."""
    driver = Driver(64, window, chunk=200, beside="align")
    for computed in (0, expected, expected):
        name = driver.add(list(range(100, 261)), 40)
        row = driver.schedule().h2o_plan.rows[name]
        assert row.num_computed_tokens == computed
        driver.drain()
    assert driver.scheduler.h2o_stats.transitions == 3
    driver.assert_pool_whole()


@pytest.mark.parametrize("beside", ["", "align"])
@pytest.mark.parametrize("prompt, expected", [(161, 160), (160, 144)])
def test_prefix_hits_are_stocks_where_no_query_scores(prompt, expected, beside):
    """All but the last token, which gives the first of the answer; of a state too."""
    driver = Driver(64, chunk=200, policy="gate", beside=beside)
    tokens = list(range(100, 100 + prompt))
    for computed in (0, expected, expected):
        name = driver.add(tokens, 40)
        row = driver.schedule().h2o_plan.rows[name]
        assert row.num_computed_tokens == computed
        driver.drain()
    assert driver.scheduler.h2o_stats.transitions == 3
    driver.assert_pool_whole()


@pytest.mark.parametrize("window", [20, "all"])
def test_prefix_hits_are_stocks_where_nothing_will_compete(window):
    driver = Driver(64, window, budget=64, chunk=200)
    prompt = list(range(100, 140))
    driver.add(prompt, 24)
    driver.drain()
    name = driver.add(prompt, 24)
    assert driver.schedule().h2o_plan.rows[name].num_computed_tokens == 32


def test_a_request_within_the_budget_shares_and_publishes_as_stocks_do():
    driver = Driver(64, budget=64, chunk=200)
    prompt = list(range(100, 132))
    first = driver.add(prompt, 32)
    driver.drain()
    tokens = driver.outputs[first]
    # The next turn: all of it hits but for the last token of the answer, which was
    # never computed, and the block that it belongs to.
    turn = prompt + tokens[:16]
    names = [driver.add(turn + [7], 8), driver.add(turn + [8], 8)]
    plan = driver.schedule().h2o_plan
    assert [plan.rows[name].num_computed_tokens for name in names] == [48, 48]
    blocks = [driver.manager.req_to_blocks[name] for name in names]
    assert blocks[0][:3] == blocks[1][:3] and blocks[0][3] != blocks[1][3]
    held = driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()
    assert held == 3 + 2
    driver.drain()
    assert driver.scheduler.h2o_stats.transitions == 0
    driver.assert_pool_whole()


@pytest.mark.rule("R4")
def test_a_full_request_shares_and_publishes_as_stocks_do():
    """Beyond the budget too, beside one that is compressed."""
    driver = Driver(64, budget=64, chunk=200)
    prompt = list(range(100, 200))
    full = driver.add(prompt, 60, policy="full")
    driver.add(prompt[:80] + [7] * 20, 60)
    driver.drain()
    assert driver.scheduler.h2o_stats.transitions == 1
    turn = prompt + driver.outputs[full]
    name = driver.add(turn + [7], 8, policy="full")
    # All of the answer but for its last token, which was never computed.
    assert driver.schedule().h2o_plan.rows[name].num_computed_tokens == 144
    driver.drain()
    driver.assert_pool_whole()


def test_a_preempted_full_request_stays_full():
    driver = Driver(64, budget=64, chunk=200)
    name = driver.add(list(range(100, 200)), 40, policy="full")
    for _ in range(20):
        driver.schedule()
        driver.process()
    driver.preempt_all()
    row = driver.schedule().h2o_plan.rows[name]
    assert row.stays_dense and row.chunk_end == 140
    driver.drain()
    assert len(driver.outputs[name]) == 40
    assert driver.scheduler.h2o_stats.transitions == 0
    driver.assert_pool_whole()


@pytest.mark.parametrize("window, expected", [(1, 160), (18, 128), ("all", 0)])
def test_prefix_hits_leave_a_requests_own_window(window, expected):
    driver = Driver(64, 17, chunk=200)
    prompt = list(range(100, 261))
    for computed in (0, expected):
        name = driver.add(prompt, 2, observation_window=window)
        row = driver.schedule().h2o_plan.rows[name]
        assert row.num_computed_tokens == computed
        driver.drain()
    name = driver.add(prompt, 2)
    assert driver.schedule().h2o_plan.rows[name].num_computed_tokens == 144


def test_a_preempted_request_within_the_budget_stays_whole():
    driver = Driver(64, budget=64, chunk=200)
    name = driver.add(list(range(100, 130)), 34)
    for _ in range(20):
        driver.schedule()
        driver.process()
    driver.preempt_all()
    row = driver.schedule().h2o_plan.rows[name]
    assert row.chunk_end == 50 and row.stays_dense
    driver.drain()


@pytest.mark.rule("R21")
def test_nothing_past_the_prompt_is_published():
    driver = Driver(64, chunk=200)
    name = driver.add(list(range(100, 131)), 40)
    driver.schedule()
    # Its last dense block is still held, one token short of full.
    request = driver.scheduler.requests[name]
    request.append_output_token_ids([5])
    driver.manager.cache_blocks(request, 32, replay_boundaries=())
    first, last = driver.manager.req_to_blocks[name][:2]
    assert first.block_hash is not None
    assert last.block_hash is None
