"""What the scheduler reports, after the trip to another process."""

from collections import Counter

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.core.helpers import Driver
from vllm_h2o.core.metrics import StepReport
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.life import RowPlan

WHOLE_BLOCKS = SlotLayout(16, 64, 64, sinks=0, whole_blocks=True)
INCREMENTS = ("transitions", "evicted_tokens", "freed_dense_blocks")
INCREMENTS += ("kept_requests", "continued_tokens")


class Front:
    """A front end: the last report, and what its increments add up to."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.last = StepReport()
        self.total: Counter[str] = Counter()
        self.finished: Counter[tuple[int, int]] = Counter()

    def process(self) -> None:
        for outputs in self.driver.process().values():
            if (stats := travelled(outputs).scheduler_stats) is None:
                continue
            report = StepReport.take(stats.num_kv_fetch_reqs_by_stage)
            assert report is not None
            assert not any("h2o" in name for name in stats.num_kv_fetch_reqs_by_stage)
            self.last = report
            self.total.update({name: getattr(report, name) for name in INCREMENTS})
            self.finished.update(report.finished)

    def step(self) -> None:
        self.driver.schedule()
        self.process()

    def drain(self) -> None:
        while self.driver.in_flight:
            self.process()
        while self.driver.scheduler.has_requests():
            self.step()

    @property
    def requests(self) -> dict[str, int]:
        states = ("dense", "prefilling", "resident")
        return {state: getattr(self.last, state) for state in states}

    def assert_counted(self) -> None:
        stats = self.driver.scheduler.h2o_stats
        assert dict(self.total) == {
            "transitions": stats.transitions,
            "evicted_tokens": stats.tokens_evicted,
            "freed_dense_blocks": stats.blocks_freed,
            "kept_requests": stats.kept_requests,
            "continued_tokens": stats.continued_tokens,
        }


def travelled(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    frames = MsgpackEncoder().encode(outputs)
    return MsgpackDecoder(EngineCoreOutputs).decode(frames)


def test_stocks_own_line_says_nothing_of_it(monkeypatch):
    """Of a front end that lacks our logger."""
    from vllm.v1.metrics import loggers

    said: list[str] = []

    def say(message, *values):
        said.append(message % values)

    for level in ("info", "debug"):  # the latter where no tokens are known of
        monkeypatch.setattr(loggers.logger, level, say)
    driver = Driver(num_blocks=64, log_stats=True)
    driver.add([*range(100)], 30)
    driver.schedule()
    (outputs,) = driver.process().values()
    line = loggers.LoggingStatLogger(driver.scheduler.vllm_config)
    line.record(travelled(outputs).scheduler_stats, None)
    line.log()
    assert any("Running: 1 reqs" in part for part in said)
    assert not any("h2o" in part or "KV fetch" in part for part in said)


def test_three_kinds_of_requests():
    driver = Driver(
        num_blocks=64, log_stats=True
    )  # a budget of 64, chunks of 48, blocks of 16
    front = Front(driver)
    driver.add([*range(40)], 10)  # fits the budget
    driver.add([*range(500, 600)], 30)
    front.step()
    assert front.requests == {"dense": 1, "prefilling": 1, "resident": 0}
    assert (front.last.dense_blocks, front.last.resident_blocks) == (3 + 1, 0)
    for _ in range(3):
        front.step()
    assert front.requests == {"dense": 1, "prefilling": 0, "resident": 1}
    # Its dense blocks have gone, the other's tokens take three.
    assert (front.last.dense_blocks, front.last.resident_blocks) == (3, 4)
    front.drain()
    assert not any(front.requests.values())
    assert front.last.dense_blocks == front.last.resident_blocks == 0
    front.assert_counted()
    assert front.total["transitions"] == 1
    # The last token of an answer is not computed.
    assert front.finished == {(0, 49): 1, (129 - 64, 129): 1}
    assert front.total["evicted_tokens"] == 129 - 64


def test_aborted_and_preempted_requests():
    driver = Driver(num_blocks=64, log_stats=True)
    front = Front(driver)
    early = driver.add([*range(100)], 30)
    front.step()
    driver.abort(early)
    late = driver.add([*range(200, 300)], 30)
    for _ in range(5):
        front.step()
    assert front.last.resident == 1
    driver.preempt_all()
    for _ in range(5):
        front.step()
    assert front.last.resident == 1
    driver.abort(late)
    front.drain()
    front.assert_counted()
    assert front.total["transitions"] == 2
    # Who ends before the end of the prompt has no share.
    assert sum(front.finished.values()) == 1
    driver.assert_pool_whole()


def test_windowed_layers_and_two_steps_in_flight():
    driver = Driver(num_blocks=64, beside="window", log_stats=True)
    front = Front(driver)
    driver.add([*range(100)], 30)
    driver.schedule()
    while driver.scheduler.has_unfinished_requests():
        driver.schedule()
        front.process()
    front.drain()
    front.assert_counted()
    assert front.last.resident_blocks == front.last.dense_blocks == 0


def test_budgets_of_requests_count():
    driver = Driver(num_blocks=64, log_stats=True)
    front = Front(driver)
    driver.add([*range(100)], 30, budget=32)
    driver.add([*range(200, 300)], 30, policy="full")
    for _ in range(6):
        front.step()
    assert front.requests == {"dense": 1, "prefilling": 0, "resident": 1}
    assert front.last.resident_blocks == 2
    front.drain()
    front.assert_counted()
    assert front.finished == {(129 - 32, 129): 1, (0, 129): 1}


def test_nothing_is_gathered_where_stats_are_off():
    driver = Driver(num_blocks=64)
    driver.add([*range(100)], 30)
    driver.drain()
    assert driver.scheduler.make_stats() is None
    assert not driver.scheduler._reporter._finished


def test_what_is_kept_and_gone_on_from_is_counted():
    front = Front(Driver(64, budget=64, chunk=200, log_stats=True, keep="end"))
    tokens = list(range(1, 101))
    for turn in range(3):
        name = front.driver.add(tokens, 20, **{"continue": True})
        front.drain()
        assert front.total["kept_requests"] == turn + 1
        tokens = [*front.driver.requests[name].all_token_ids, 5, 6]
    assert front.total["continued_tokens"] == (100 + 19) + (122 + 19)
    front.assert_counted()


@pytest.mark.parametrize("decoded", [300, 303, 304])
def test_what_a_step_evicts_where_whole_blocks_compete(decoded):
    """Of a request that decodes, beside one that reads the last of 500 tokens."""
    rows = [RowPlan(decoded, 1, 200, 168, 128), RowPlan(400, 100, 500, 468, 128)]
    plan = ResidencyPlan(["decodes", "reads"], np.array(rows, np.int64).T)
    stats = H2OStats()
    stats._count_evictions(plan, WHOLE_BLOCKS)
    held = WHOLE_BLOCKS.resident_tokens
    of_decode = 1 - held(decoded + 1) + held(decoded)
    assert of_decode == (16 if decoded == 304 else 0)
    assert stats.tokens_evicted == of_decode + 500 - held(500)
