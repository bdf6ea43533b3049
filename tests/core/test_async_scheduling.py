"""Several steps in flight: nothing that a step reads is released under it."""

import random

import pytest

from tests.core.helpers import BLOCK_SIZE, Driver


class AsyncDriver(Driver):
    """Remembers what each step in flight reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reads = []
        self.gone = set()
        self.overlapped_transitions = 0

    def schedule(self):
        output = super().schedule()
        reads = {}
        for name, row in output.h2o_plan.rows.items():
            blocks = self.manager.req_to_blocks[name]
            dense = self.manager.dense_columns
            moved = row.decodes and not row.stays_dense
            part = blocks[dense:] if moved else blocks
            reads[name] = {b.block_id for b in part if not b.is_null}
            assert reads[name]
        self.reads.append(reads)
        # What was preempted in this step has left its earlier steps behind.
        self.gone |= set(output.preempted_req_ids or ())
        self.check_reads()
        return output

    def process(self):
        super().process()
        self.reads.pop(0)
        if not self.reads:
            self.gone.clear()
        self.check_reads()

    def abort(self, name):
        self.gone.add(name)
        super().abort(name)

    def preempt_all(self):
        self.gone |= {r.request_id for r in self.running()}
        super().preempt_all()

    def check_reads(self):
        """Every block a step in flight reads is still its request's own.

        A request that is aborted or preempted gives its blocks back at once:
        the worker runs steps in order, so whoever gets them writes later. Its
        owner must be gone, though.
        """
        for reads in self.reads:
            for name, blocks in reads.items():
                request = self.scheduler.requests.get(name)
                if name in self.gone or request is None or request.is_finished():
                    continue
                held = {b.block_id for b in self.manager.req_to_blocks[name]}
                assert blocks <= held, f"{name} lost blocks that a step reads"
        steps_with_transition = [
            any(row.is_transition for row in output.h2o_plan.rows.values())
            for output in self.in_flight
        ]
        if len(steps_with_transition) == 2 and steps_with_transition[0]:
            self.overlapped_transitions += 1


@pytest.mark.rule("R20")
def test_dense_blocks_wait_for_the_transition_to_be_processed():
    driver = AsyncDriver(64, budget=64, chunk=200)
    driver.add(list(range(100, 230)), 20)
    dense, resident = -(-130 // BLOCK_SIZE), 64 // BLOCK_SIZE

    def held():
        return driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()

    first = driver.schedule()
    assert next(iter(first.h2o_plan.rows.values())).is_transition
    # The first decode step is scheduled while the transition is in flight.
    second = driver.schedule()
    assert next(iter(second.h2o_plan.rows.values())).decodes
    assert held() == dense + resident
    driver.process()
    driver.schedule()
    assert held() == resident
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.rule("R5")
def test_two_steps_in_flight_with_aborts_and_preemptions(seed):
    rng = random.Random(seed)
    driver = AsyncDriver(40, budget=rng.choice([32, 64]), chunk=rng.choice([33, 200]))
    names, finished = [], 0
    for _ in range(400):
        action = rng.random()
        if action < 0.10 and len(driver.scheduler.requests) < 8:
            length = rng.randrange(1, 180)
            start = rng.choice([0, 1000])
            names.append(
                driver.add(list(range(start, start + length)), rng.randrange(1, 60))
            )
        elif action < 0.13 and names:
            name = names.pop(rng.randrange(len(names)))
            if name in driver.scheduler.requests:
                driver.abort(name)
                finished += 1
        elif action < 0.14:
            driver.preempt_all()
        elif len(driver.in_flight) < 2:
            driver.schedule()
        else:
            driver.process()
    assert driver.overlapped_transitions > 0
    assert driver.scheduler.h2o_stats.transitions > 10
    driver.drain()
    driver.assert_pool_whole()


def test_tiny_pool_preempts_with_two_steps_in_flight():
    driver = AsyncDriver(24, budget=96, chunk=200)
    names = [driver.add(list(range(i * 1000, i * 1000 + 40)), 150) for i in range(5)]
    lengths = {name: driver.scheduler.requests[name] for name in names}
    while driver.scheduler.has_unfinished_requests():
        if len(driver.in_flight) < 2:
            driver.schedule()
        else:
            driver.process()
    assert driver.scheduler.h2o_stats.preemptions > 0
    for request in lengths.values():
        assert request.num_output_tokens == 150
    while driver.in_flight:
        driver.process()
    driver.assert_pool_whole()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_next_turn_of_a_session_is_read_densely_again(in_flight):
    driver = AsyncDriver(64, budget=64, chunk=200)
    name = driver.add(list(range(100, 220)), 10, session="chat")
    request = driver.scheduler.requests[name]
    ends, restarts = [], []
    for turn in range(3):
        while request.num_output_tokens < 10 and request.max_tokens:
            output = driver.schedule()
            row = output.h2o_plan.rows.get(name)
            restarts += [len(ends)] * output.h2o_plan.restarted.count(name)
            if row and row.is_transition:
                ends.append(row.chunk_end)
            while len(driver.in_flight) >= in_flight:
                driver.process()
            if request.status.name == "WAITING_FOR_STREAMING_REQ":
                break
        while driver.in_flight:
            driver.process()
        driver.add(list(range(turn, turn + 30)), 10, session=name)
    # A turn drops the last sampled token: 120, + 9 + 30, + 9 + 30.
    assert ends == [120, 159, 198]
    # The worker is told before the next turn's prompt has been read.
    assert restarts == [1, 2]
    driver.abort(name)
    driver.assert_pool_whole()


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "prompt, generated, wishes",
    [
        (40, 24, {}),
        (40, 23, {}),
        (40, 40, {}),
        (100, 1, {}),
        (100, 2, {}),
        (100, 28, {"policy": "full"}),
        (100, 30, {"budget": 32}),
    ],
)
def test_steps_run_past_a_requests_end(depth, prompt, generated, wishes):
    """From four steps in flight on, as in stock; a budget that would bind there does.

    A request that stays dense would else write over blocks that others may share.
    """
    driver = AsyncDriver(64, budget=64, chunk=48, depth=depth)
    name = driver.add(list(range(10, 10 + prompt)), generated, **wishes)
    request, computed = driver.scheduler.requests[name], 0
    while not request.is_finished():
        while len(driver.in_flight) < depth:
            driver.schedule()
            computed = max(computed, request.num_computed_tokens)
        driver.process()
    assert request.num_output_tokens == generated
    # The last token of an answer is computed only by a step that runs past it.
    ran_past = depth - 2 if generated > 1 else 0
    assert computed == prompt + generated - 1 + ran_past
    driver.drain()
    driver.assert_pool_whole()
