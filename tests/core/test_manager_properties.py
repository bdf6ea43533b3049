"""Random lives of requests; the pool adds up after every step."""

import random

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tests.core.helpers import BLOCK_SIZE, MAX_MODEL_LEN, Driver

# The longest request and its residents fit; three of them do not.
SMALL_POOL = 36


class Lives(RuleBasedStateMachine):
    """Admit, chunk, decode, preempt, abort and hit prefixes, in any order."""

    depths = st.just(1)
    beside = ""
    window: int | str = 20
    policy = "h2o"
    resident = "model"
    prefill_chunk = 0
    keep = "none"
    wishes = st.sampled_from(
        [{}, {"policy": "full"}, {"observation_window": 5}, {"policy": "h2o"}]
        + [{"observation_window": "all"}, {}]
        + [{"budget": 32}, {"budget": 17, "observation_window": 3}, {"budget": 9}]
        + [{"budget": "10%"}, {"budget": "25%"}, {"budget": "60%"}]
    )

    @initialize(
        budget=st.sampled_from([16, 32, 64, 96, "20%", "50%"]),
        chunk=st.sampled_from([17, 48, 200]),
        data=st.data(),
    )
    def start(self, budget, chunk, data):
        self.max_in_flight = data.draw(self.depths)
        self.driver = Driver(
            SMALL_POOL * (1 + bool(self.beside)),
            self.window,
            budget,
            chunk,
            self.beside,
            self.policy,
            resident=self.resident,
            prefill_chunk=self.prefill_chunk,
            keep=self.keep,
            depth=self.max_in_flight,
        )
        self.alive: list[str] = []
        self.refused: list[str] = []

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 200),
        tail=st.integers(0, 2),
        max_tokens=st.integers(1, 50),
        data=st.data(),
    )
    def add(self, family, length, tail, max_tokens, data):
        # Prompts of a family share their first blocks.
        prompt = [family * 1000 + i for i in range(length)] + [7 + tail] * tail
        wishes = data.draw(self.wishes)
        name = self.driver.add(prompt, max_tokens, **wishes)
        if self.driver.is_refused(wishes, len(prompt) + max_tokens):
            self.refused.append(name)
        else:
            self.alive.append(name)

    @rule()
    def schedule(self):
        assume(len(self.driver.in_flight) < self.max_in_flight)
        self.driver.schedule()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def process(self):
        self.driver.process()

    @rule(steps=st.integers(1, 30))
    def run(self, steps):
        for _ in range(steps):
            if len(self.driver.in_flight) < self.max_in_flight:
                self.driver.schedule()
            if len(self.driver.in_flight) == self.max_in_flight:
                self.driver.process()

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        name = self.alive.pop(which % len(self.alive))
        if name in self.driver.scheduler.requests:
            self.driver.abort(name)

    @rule()
    def preempt(self):
        self.driver.preempt_all()

    @invariant()
    def adds_up(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.assert_pool_whole()
            for name in self.refused:
                assert self.driver.finished[name] == FinishReason.ERROR


class AsyncLives(Lives):
    """Several steps in flight: two by async scheduling, more in a pipeline."""

    depths = st.integers(2, 5)


class HybridLives(Lives):
    """Beside a group of sliding-window layers."""

    beside = "window"


class StateLives(Lives):
    """Beside a group of layers with a state, which is kept where steps end."""

    beside = "align"


class AllQueriesLives(Lives):
    """Every prompt query scores: no prefix hit may be taken."""

    window = "all"


class GatedLives(Lives):
    """No prompt query scores, and every hit is taken."""

    policy = "gate"
    wishes = st.sampled_from([{}, {"policy": "full"}, {"budget": 32}, {"budget": "9%"}])


class QuantizedLives(Lives):
    """A resident block has three times as many slots as a dense one has tokens."""

    resident = "int8"


class ChunkedLives(AsyncLives):
    """Longer prompts are read in chunks."""

    prefill_chunk = 40
    wishes = st.sampled_from(
        [{}, {"policy": "full"}, {"observation_window": 5}, {"budget": 32}]
        + [{"prefill_chunk": 0}, {"prefill_chunk": 100}, {"budget": "10%"}]
    )


class ChunkedHybridLives(HybridLives):
    """The same, beside a group of sliding-window layers."""

    prefill_chunk = 64


class ChunkedStateLives(StateLives):
    """The same, beside layers with a state."""

    prefill_chunk = 64


class KeptLives(AsyncLives):
    """What requests hold at their ends is kept."""

    keep = "end"
    wishes = st.sampled_from(
        [{}, {"policy": "full"}, {"budget": 32}, {"keep": "none"}, {"continue": True}]
    )


@pytest.mark.parametrize(
    "machine",
    [
        Lives,
        AsyncLives,
        HybridLives,
        StateLives,
        AllQueriesLives,
        GatedLives,
        QuantizedLives,
        ChunkedLives,
        ChunkedHybridLives,
        ChunkedStateLives,
        KeptLives,
    ],
)
@pytest.mark.rule("R23")
def test_pool_adds_up(machine):
    case = machine.TestCase()
    # As many examples as the profile says: tests/conftest.py.
    case.settings = settings(
        stateful_step_count=30, suppress_health_check=list(HealthCheck)
    )
    case.runTest()


@pytest.mark.rule("R20")
def test_dense_blocks_are_gone_one_step_after_the_transition():
    driver = Driver(64, budget=64, chunk=200)
    name = driver.add(list(range(100, 230)), 20)
    driver.schedule()
    driver.process()
    driver.schedule()
    held = driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()
    assert held == 64 // BLOCK_SIZE
    assert driver.manager.is_resident(name)


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


def test_a_bad_wish_ends_its_request_alone():
    """Here it was not refused where requests are made, as if made elsewhere."""
    driver = Driver(64, budget=64, chunk=200)
    good = driver.add(list(range(100, 200)), 10)
    bad = driver.add(list(range(100, 200)), 10, policy="half")
    driver.drain()
    assert len(driver.outputs[good]) == 10 and bad not in driver.outputs
    assert driver.finished[bad] == FinishReason.ERROR
    driver.assert_pool_whole()


def test_a_bad_wish_alone_ends():
    driver = Driver(64)
    bad = driver.add(list(range(100, 200)), 10, windows=4)
    driver.drain()
    assert driver.finished == {bad: FinishReason.ERROR}
    driver.assert_pool_whole()


def test_a_bad_wish_ends_its_session():
    driver = Driver(64, budget=64, chunk=200)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.add(list(range(30)), 10)
    driver.schedule()
    driver.process()
    driver.add(list(range(300, 330)), 10, session="chat", policy="half")
    driver.drain()
    assert driver.finished["chat"] == FinishReason.ERROR
    driver.assert_pool_whole()


@pytest.mark.parametrize("prefill_chunk", [0, 64])
def test_a_session_that_outgrows_the_longest_request_ends_alone(prefill_chunk):
    """Stock adds up its turns without an end: blocks would have no column."""
    driver = Driver(64, budget=64, chunk=200, prefill_chunk=prefill_chunk)
    other = driver.add(list(range(30)), 220)
    for turn in range(4):
        driver.add([turn] * 60, 10, session="chat")
        for _ in range(40):
            driver.schedule()
            driver.process()
    assert driver.finished == {"chat": FinishReason.ERROR}
    driver.drain()
    assert len(driver.outputs[other]) == 220
    driver.assert_pool_whole()


@pytest.mark.parametrize("keep", ["none", "end"])
def test_a_session_ends_when_it_says_so(keep):
    """By vLLM's sentinel, a request of its id that expects no more."""
    driver = Driver(64, budget=64, chunk=200, keep=keep)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.drain()
    assert driver.scheduler.requests["chat"].resumable
    last = Request("chat", [1], SamplingParams(), None)
    driver.scheduler.add_request(last)
    assert "chat" not in driver.scheduler.requests
    driver.assert_pool_whole()


def test_a_bad_wish_ends_its_idle_session():
    driver = Driver(64, budget=64, chunk=200)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.drain()
    driver.add(list(range(300, 330)), 10, session="chat", policy="half")
    assert driver.scheduler.has_requests()
    driver.drain()
    assert driver.finished["chat"] == FinishReason.ERROR
    driver.assert_pool_whole()


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


@pytest.mark.parametrize("window", [16, "all"])
@pytest.mark.rule("R15")
def test_manager_takes_what_it_announces(window):
    driver = Driver(64, window, budget=64, chunk=32)
    manager = driver.manager
    announced = {}
    get_num, allocate = manager.get_num_blocks_to_allocate, manager.allocate_new_blocks

    def counting_get_num(request_id, *args, apply_admission_cap=False, **kwargs):
        count = get_num(
            request_id, *args, apply_admission_cap=apply_admission_cap, **kwargs
        )
        if not apply_admission_cap:
            announced[request_id] = count, driver.pool.get_num_free_blocks()
        return count

    checked = []

    def checking_allocate(request_id, *args):
        blocks = allocate(request_id, *args)
        count, free = announced.pop(request_id)
        assert free - driver.pool.get_num_free_blocks() == count
        checked.append(count)
        return blocks

    manager.get_num_blocks_to_allocate = counting_get_num
    manager.allocate_new_blocks = checking_allocate
    prompt = list(range(100, 260))
    for tail in range(3):
        driver.add(prompt + [tail] * 9, 80)
        driver.drain()
    assert max(checked) >= 1 + 64 // BLOCK_SIZE  # a transition step
    driver.assert_pool_whole()


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


@pytest.mark.parametrize(
    "wishes, fits",
    [
        ({}, True),
        ({"prefill_chunk": 0}, False),
        ({"prefill_chunk": 150}, False),
        ({"prefill_chunk": 100}, True),
        ({"policy": "full"}, False),
    ],
)
@pytest.mark.parametrize("beside", ["", "window"])
def test_a_prompt_that_is_larger_than_the_pool(wishes, fits, beside):
    """Is read in chunks; what asks for more room than there is ends alone."""
    driver = Driver(11 + 7 * bool(beside), budget=32, prefill_chunk=64, beside=beside)
    other = driver.add(list(range(100, 130)), 10)
    name = driver.add(list(range(300, 500)), 20, **wishes)
    driver.drain()
    assert len(driver.outputs[other]) == 10
    if fits:
        assert len(driver.outputs[name]) == 20
    else:
        assert driver.finished[name] == FinishReason.ERROR
    driver.assert_pool_whole()


def test_a_session_that_would_outgrow_the_pool_ends_at_once():
    """It would be read again with each turn, whole."""
    driver = Driver(11, budget=32, prefill_chunk=64)
    for wishes in ({"policy": "full"}, {"prefill_chunk": 0}):
        driver.add(list(range(100, 130)), 10, session="whole", **wishes)
        driver.drain()
        assert driver.finished["whole"] == FinishReason.ERROR
    driver.assert_pool_whole()


@pytest.mark.rule("R17")
def test_a_chunk_is_at_least_two_budgets():
    driver = Driver(64, budget=64, prefill_chunk=16, chunk=500)
    name = driver.add(list(range(100, 300)), 20, report=True)
    rows = []
    for _ in range(3):
        rows.append(driver.schedule().h2o_plan.rows[name])
        driver.process()
    assert [(row.chunk_start, row.chunk_end) for row in rows] == [
        (0, 128), (128, 200), (128, 200)
    ]  # fmt: skip
    assert [row.is_transition for row in rows] == [True, True, False]
    assert driver.scheduler.h2o_stats.tokens_evicted == 200 - 64 + 1
    driver.drain()
    assert driver.reports[name]["tokens_held"] == 64


def test_a_prompt_within_a_chunk_is_read_as_without_chunks():
    """Its steps, its blocks and its hits."""
    plans = []
    for prefill_chunk in (0, 128):
        driver = Driver(64, budget=64, prefill_chunk=prefill_chunk)
        mine = []
        for _ in range(2):
            driver.add(list(range(100, 228)), 20)
            for _ in range(20):
                rows = driver.schedule().h2o_plan.rows.values()
                mine.append([*rows])
                mine.append(sorted(x.block_id for x in driver.pool.blocks if x.ref_cnt))
                driver.process()
            driver.drain()
        plans.append(mine)
    assert plans[0] == plans[1]


def kept_turn(driver, prompt=100, generated=20, **wishes):
    """All tokens of a request that has ended in an engine that keeps."""
    name = driver.add(list(range(1, prompt + 1)), generated, **wishes)
    driver.drain()
    return list(driver.requests[name].all_token_ids)


@pytest.mark.rule("R18")
def test_the_next_turn_goes_on_from_what_the_last_has_held():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver) + [5] * 30
    name = driver.add(turn, 10, report=True, **{"continue": True})
    plan = driver.schedule().h2o_plan
    # The last token of the answer was never computed.
    row = plan.rows[name]
    assert (row.num_computed_tokens, row.chunk_start, row.chunk_end) == (
        119,
        119,
        150,
    )
    assert row.scored_from == 100 - 20 and row.first_query == 150 - 20
    assert row.is_transition and len(plan.copies) == 4
    held = driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()
    assert held == 3 + 4, "31 tokens from the 8th block on, and the budget"
    driver.drain()
    assert driver.reports[name]["tokens_continued"] == 119
    assert driver.scheduler.h2o_stats.continued_tokens == 119
    assert driver.scheduler.h2o_stats.kept_requests == 2
    driver.assert_pool_whole()


@pytest.mark.rule("R11")
def test_a_share_grows_while_the_next_turn_is_read():
    """At once, and where its chunk then ends: half of up to 128, 160 and 192 tokens."""
    driver = Driver(64, budget="50%", chunk=200, keep="end")
    turn = kept_turn(driver) + [5] * 60
    evicted = driver.scheduler.h2o_stats.tokens_evicted
    assert evicted == 119 - 64
    name = driver.add(turn, 10, report=True, **{"continue": True})
    first = driver.schedule().h2o_plan
    assert len(first.copies) == 4
    row, then = first.rows[name], driver.schedule().h2o_plan.rows[name]
    assert row.num_computed_tokens == row.chunk_start == 119 and row.chunk_end == 160
    assert (row.budget, row.grown_at, row.grown_from) == (80, 119, 64)
    assert (then.num_computed_tokens, then.chunk_end) == (160, 180)
    assert (then.budget, then.grown_at, then.grown_from) == (96, 160, 80)
    assert then.grown_before == 119 and row.is_transition and then.is_transition
    driver.drain()
    report = driver.reports[name]
    assert (report["tokens_continued"], report["tokens_held"]) == (119, 96)
    gone = driver.scheduler.h2o_stats.tokens_evicted - evicted
    assert gone == report["tokens_evicted"] - (119 - 64)
    driver.assert_pool_whole()


@pytest.mark.parametrize("wishes", [{"keep": "none"}, {"policy": "full"}])
def test_what_does_not_ask_for_it_is_not_kept(wishes):
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver, **wishes)
    driver.add(turn + [5] * 30, 10, **{"continue": True})
    assert not driver.schedule().h2o_plan.copies


def test_what_does_not_ask_for_it_does_not_go_on():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver)
    for asked, more in (({}, 5), ({"continue": True}, 6)):
        driver.add(turn + [more] * 30, 10, **asked)
        assert bool(driver.schedule().h2o_plan.copies) == bool(asked)
        driver.drain()


@pytest.mark.parametrize("wishes", [{"budget": 32}, {"budget": 64}])
def test_what_had_another_budget_is_not_gone_on_from(wishes):
    """Nor what had as many slots, but as its own number: they may lie otherwise."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver)
    driver.add(turn + [5] * 30, 10, **{"continue": True} | wishes)
    assert not driver.schedule().h2o_plan.copies


@pytest.mark.parametrize("is_full", [False, True])
def test_a_prefix_hit_of_more_tokens_comes_first(is_full):
    """It is exact."""
    driver = Driver(64, budget=64, chunk=200, keep="end", policy="gate")
    kept_turn(driver, 100, 1, keep="end")
    longer = list(range(1, 101)) + [7] * 90
    if is_full:
        driver.add(longer, 2, policy="full")
        driver.drain()
    driver.add(longer, 20, **{"continue": True})
    plan = driver.schedule().h2o_plan
    assert bool(plan.copies) != is_full
    assert plan.num_computed_tokens.tolist() == [176 if is_full else 100]


def test_a_stranger_does_not_go_on_from_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    prompt = list(range(1, 101))
    name = driver.add(prompt, 20, salt="mine")
    driver.drain()
    turn = list(driver.requests[name].all_token_ids) + [5] * 30
    for salt, goes_on in (("mine", True), ("other", False), (None, False)):
        driver.add(turn, 10, salt=salt, **{"continue": True})
        assert bool(driver.schedule().h2o_plan.copies) == goes_on
        driver.drain()


def test_what_is_kept_is_given_away_before_anything_waits():
    """The oldest first; what is left of it is nobody's."""
    driver = Driver(26, budget=64, chunk=200, keep="end")
    first, second = kept_turn(driver, 100), kept_turn(driver, 99)
    name = driver.add(list(range(3000, 3200)), 20)
    driver.schedule()
    assert driver.manager.req_to_blocks[name]
    driver.drain()
    assert driver.scheduler.h2o_stats.preemptions == 0
    for turn, goes_on in ((second, True), (first, False)):
        driver.add(turn + [5], 2, **{"continue": True})
        assert bool(driver.schedule().h2o_plan.copies) == goes_on
        driver.drain()
    driver.assert_pool_whole()


def test_the_cache_is_reset_with_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver) + [5]
    assert driver.scheduler.reset_prefix_cache()
    driver.add(turn, 2, **{"continue": True})
    assert not driver.schedule().h2o_plan.copies


def test_a_prompt_of_which_one_token_is_asked_is_kept():
    """Compress once, ask many."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver, 100, 1, keep="end")
    for question in (5, 6):
        driver.add(turn[:100] + [question] * 9, 4, **{"continue": True})
    plan = driver.schedule().h2o_plan
    assert plan.num_computed_tokens.tolist() == [100, 100] and len(plan.copies) == 8
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 32},
        {"budget": "20%"},
        {"budget": "50%", "num_blocks": 64},
        {"budget": 64, "policy": "gate", "beside": ""},
        {"budget": 32, "prefill_chunk": 40, "chunk": 17},
        {"budget": 64, "resident": "int8"},
        {"budget": 32, "keep": "prompt"},
        {"budget": "50%", "keep": "prompt", "num_blocks": 64},
    ],
)
def test_conversations_in_any_order(options):
    """Turns, other turns of the same, strangers, aborts and preemptions, two steps in
    flight, in a pool that holds a few conversations."""
    draw = random.Random(6)
    driver = Driver(**{"num_blocks": SMALL_POOL, "chunk": 48, "keep": "end"} | options)
    told, gone_on = [list(range(1, 60))], 0
    for _ in range(800):
        if draw.random() < 0.25:
            turn = draw.choice(told[-6:])
            asked = {"continue": True} if draw.random() < 0.8 else {}
            more = [draw.randrange(9)] * draw.choice([1, 5, 20, 60])
            tokens = (turn + more)[: MAX_MODEL_LEN - 20]
            driver.add(tokens, draw.choice([1, 4, 20]), **asked)
        if len(driver.in_flight) < 2:
            plan = driver.schedule().h2o_plan
            gone_on += len(plan.copies) > 0
        for _ in range(draw.randrange(2) + len(driver.in_flight) // 2):
            if driver.in_flight:
                driver.process()
        if draw.random() < 0.02 and driver.running():
            driver.abort(driver.running()[0].request_id)
        if draw.random() < 0.005:
            driver.preempt_all()
        ended = [list(driver.requests[name].all_token_ids) for name in driver.finished]
        told = [list(range(1, 60)), *ended]
    driver.drain()
    driver.assert_pool_whole()
    assert gone_on > 2


def test_the_same_once_more_takes_the_place_of_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end", policy="gate")
    for _ in range(5):
        name = driver.add(list(range(1, 101)), 1, keep="end")
        driver.drain()
    (entries,) = driver.scheduler._continuing._snapshots._entries.values()
    assert len(entries) == 1 and entries[0].is_whole
    driver.add([*driver.requests[name].all_token_ids, 5], 2, **{"continue": True})
    assert driver.schedule().h2o_plan.copies


@pytest.mark.rule("R18")
def test_what_is_held_at_the_end_of_a_prompt_is_kept_while_it_answers():
    """For a turn that has another answer than was given: a copy, in free blocks."""
    driver = Driver(64, budget=64, chunk=200, keep="prompt", policy="gate")
    first = driver.add(list(range(1, 101)), 20)
    driver.schedule()
    plan = driver.schedule().h2o_plan
    assert plan.rows[first].num_computed_tokens == 100 and len(plan.copies) == 4
    assert driver.scheduler.h2o_stats.kept_requests == 1
    asks = {"continue": True, "report": True}
    said = [driver.add([*range(1, 101), 7, n], 5, **asks) for n in (5, 6)]
    driver.drain()
    assert [driver.reports[name]["tokens_continued"] for name in said] == [100, 100]
    assert driver.scheduler.h2o_stats.kept_requests == 3
    # Ended with its first token, it needs no copy.
    third = driver.add([*range(1, 101), 7, 8], 1, keep="prompt", **asks)
    while not driver.schedule().h2o_plan.rows.get(third):
        driver.process()
    driver.drain()
    assert driver.scheduler.h2o_stats.kept_requests == 4
    driver.add([*range(1, 101), 7, 8, 9], 1, **asks)
    row = driver.schedule().h2o_plan.row(0)
    assert row.num_computed_tokens == 102
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize("same", [True, False])
def test_prompts_that_are_kept_in_one_step_have_blocks_of_their_own(same):
    """There are free ones for one of both; two samples of a prompt need one copy."""
    driver = Driver(30, budget=64, chunk=400, keep="prompt", policy="gate")
    first = list(range(1, 101))
    second = first if same else [9, *first[1:]]
    for prompt in (first, second):
        driver.add(prompt, 20, salt=None if same else str(prompt[0]))
    driver.schedule()
    free = driver.pool.get_num_free_blocks()
    assert same or 4 <= free < 8
    plan = driver.schedule().h2o_plan
    assert len(plan.copies) == 4 and driver.scheduler.h2o_stats.kept_requests == 1
    assert driver.pool.get_num_free_blocks() == free
    driver.drain()
    driver.assert_pool_whole()


def test_no_copy_is_made_where_no_blocks_are_free():
    driver = Driver(15, budget=64, chunk=200, keep="prompt", policy="gate")
    driver.add(list(range(1, 101)), 20)
    driver.schedule()
    assert driver.pool.get_num_free_blocks() == 14 - 7 - 4, "3 of 4 are"
    assert not driver.schedule().h2o_plan.copies
    driver.drain()
    assert driver.scheduler.h2o_stats.kept_requests == 0
    driver.assert_pool_whole()


@pytest.mark.parametrize("case", ["goes on", "stops", "asks for logits"])
def test_turns_of_a_session_go_on(case):
    """From the end of its prompt where a turn stops by a token, behind which a step has
    run: what the session holds is then that token's too, which it drops. But for one
    that asks for all logits."""
    stops, reads = case == "stops", case == "asks for logits"
    driver = Driver(64, budget=64, chunk=200, keep="end")
    driver.scheduler.scheduler_config.async_scheduling = True
    asks = {"continue": True}
    driver.add(list(range(1, 101)), 20, session="chat", **asks)
    request = driver.requests["chat"]
    if stops:
        request.sampling_params.stop_token_ids = [1019]  # the last that it may have
        request.max_tokens = 30
    while not driver.scheduler.num_waiting_for_streaming_input:
        while len(driver.in_flight) < 2:
            driver.schedule()
        driver.process()
    assert request.num_tokens == 120
    assert sum(len(step.num_scheduled_tokens) for step in driver.in_flight) == stops
    while driver.in_flight:
        driver.process()
    driver.add([5] * 30, 10, session="chat", **asks)
    if case == "asks for logits":
        request.sampling_params.prompt_logprobs = 1
    plan = driver.schedule().h2o_plan
    row = plan.rows["chat"]
    assert row.chunk_end == 119 + 30
    computed = {"goes on": 119, "stops": 100, "asks for logits": 96}
    assert row.num_computed_tokens == computed[case], "or hits of its prompt"
    assert len(plan.copies) == (0 if reads else 4)
    assert plan.kept == ([] if stops else ["chat"]) and plan.restarted == ["chat"]
    driver.process()
    driver.abort("chat")
    driver.assert_pool_whole()
