"""Random lives of requests; the pool adds up after every step."""

from pathlib import Path

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
from vllm.v1.engine import FinishReason

from tests.core.helpers import BLOCK_SIZE, MAX_MODEL_LEN, SMALL_POOL, Driver


class Lives(RuleBasedStateMachine):
    """Admit, chunk, decode, preempt, abort and hit prefixes, in any order."""

    depths = st.just(1)
    beside = ""
    window: int | str = 20
    policy = "h2o"
    resident = "model"
    prefill_chunk = 0
    keep = "none"
    drafts = 0
    files = False
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
            drafts=self.drafts,
            files=self.files,
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


class FiledLives(KeptLives):
    """That is written to files too, of which some fail or go."""

    files = True
    prefill_chunk = 64
    wishes = st.sampled_from(
        [{}, {"keep": "prompt"}, {"budget": 32}, {"continue": True}]
        + [{"continue": True, "keep": "prompt"}, {"keep": "none"}]
    )

    @rule(
        which=st.integers(0, 99),
        more=st.integers(1, 60),
        max_tokens=st.integers(1, 20),
        data=st.data(),
    )
    def next_turn(self, which, more, max_tokens, data):
        ended = [name for name in self.alive if name in self.driver.finished]
        assume(ended)
        before = self.driver.requests[ended[which % len(ended)]]
        turn = [*before.all_token_ids, *[9] * more]
        assume(len(turn) + max_tokens < MAX_MODEL_LEN)
        wishes = data.draw(self.wishes) | {"continue": True}
        self.alive.append(self.driver.add(turn, max_tokens, **wishes))

    @rule(which=st.integers(0, 99))
    def remove(self, which):
        files = sorted(Path(self.driver.folder.name).rglob("*.safetensors"))
        assume(files)
        file = files[which % len(files)]
        if which % 2:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: which - 1])

    @rule(which=st.integers(0, 9))
    def preempt(self, which):
        """Rarely: it begins an epoch, whose requests find no file."""
        if not which:
            super().preempt()


class DraftedLives(Lives):
    """vLLM speculates."""

    drafts = 3


class DraftedChunkedLives(ChunkedLives):
    """The same, where prompts are read in chunks, and what is held is kept."""

    depths = st.just(1)
    keep = "prompt"
    drafts = 4


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
        FiledLives,
        DraftedLives,
        DraftedChunkedLives,
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
