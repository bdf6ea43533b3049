"""KV connectors beside requests that give the blocks of their prompts back.

vLLM's own schedulers of offloading, with their real managers; the copies that their
workers make are played: as late as they may be, of what is in a block then.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, NamedTuple

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from tests.core.helpers import BLOCK_SIZE, SMALL_POOL, Driver
from vllm_h2o.core import scheduler
from vllm_h2o.plugin.connectors import MULTI, OFFLOADING, SIMPLE

ROOM = 2**20
"""Bytes for what is offloaded, 60 blocks: less than all prompts have."""


def transfer_of(name: str, **more: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    extra = {"cpu_bytes_to_use": ROOM, **more}
    if name == MULTI:
        extra = {"connectors": [transfer_of(OFFLOADING)]}
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Copies:
    """What a connector's workers do, on blocks that are named by what is in them.

    A store runs behind the steps before it, a load whenever it likes.
    """

    def __init__(self, driver: ConnectorDriver, draw: random.Random) -> None:
        self.driver, self.draw = driver, draw
        self.offloaded: dict[int, Any] = {}
        self.running: dict[Any, tuple[int | None, list[int], list[int]]] = {}
        """Copies that have begun: steps to be run before a store, from where, to
        where."""
        self.done: list[Any] = []
        self.loaded = self.stored = 0

    def begin(self, metadata: Any) -> None:
        """Before anything of a step is written."""
        raise NotImplementedError

    def end(self, metadata: Any) -> tuple[set[str], Any]:
        """After a step: requests whose loads are done, and what goes back."""
        raise NotImplementedError

    def pinned(self, scheduler: Any) -> list[int]:
        """Blocks that the connector holds on to."""
        return []

    def start(self, job: Any, is_store: bool, sources: Any, targets: Any) -> None:
        behind = self.driver.launched if is_store else None
        self.running[job] = behind, list(map(int, sources)), list(map(int, targets))

    def copy(self, job: Any) -> None:
        """Copy at last."""
        behind, sources, targets = self.running.pop(job)
        here, there = self.driver.inside, self.offloaded
        if behind is not None:
            here, there = there, here
            self.driver.run_steps(behind)
        for source, target in zip(sources, targets, strict=True):
            here[target] = there[source]
        self.stored += len(sources) * (behind is not None)
        self.loaded += len(sources) * (behind is None)
        self.done.append(job)

    def copy_some(self) -> None:
        """As late as it may be, or before steps that are in flight."""
        for job, (behind, *_) in list(self.running.items()):
            ready = behind is None or behind <= self.driver.run
            if ready and self.draw.random() < (0.5 if behind is None else 0.05):
                self.copy(job)


class OffloadingCopies(Copies):
    """Those of `OffloadingConnector`: a store begins with the step after its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.later: dict[int, Any] = {}
        self.requests: dict[int, str] = {}

    def begin(self, metadata: OffloadingConnectorMetadata) -> None:
        flushed = set(metadata.jobs_to_flush or ())
        for job in flushed & metadata.store_jobs.keys():
            self.later[job] = metadata.store_jobs.pop(job)
        for job, entry in self.later.items():
            self.start(job, True, entry.src_spec.block_ids, entry.dst_spec.block_ids)
        self.later.clear()
        for job in flushed & self.running.keys():
            self.copy(job)

    def end(self, metadata: OffloadingConnectorMetadata) -> tuple[set[str], Any]:
        for job, entry in metadata.load_jobs.items():
            self.requests[job] = entry.req_id
            self.start(job, False, entry.src_spec.block_ids, entry.dst_spec.block_ids)
        self.later |= metadata.store_jobs
        self.copy_some()
        done, self.done = self.done, []
        said = OffloadingWorkerMetadata(dict.fromkeys(done, 1))
        loaded = {self.requests.pop(job) for job in done if job in self.requests}
        return loaded, said if done else None


class SimpleCopies(Copies):
    """Those of `SimpleCPUOffloadConnector`, which pins what it copies."""

    def begin(self, metadata: Any) -> None:
        if metadata.need_flush:
            for job in list(self.running):
                self.copy(job)

    def end(self, metadata: Any) -> tuple[set[str], Any]:
        for is_store, event, *ids in (
            (False, metadata.load_event, metadata.load_cpu_blocks,
             metadata.load_gpu_blocks),
            (True, metadata.store_event, metadata.store_gpu_blocks,
             metadata.store_cpu_blocks),
        ):  # fmt: skip
            if event >= 0:
                self.start((is_store, event), is_store, *ids)
        self.copy_some()
        done, self.done = self.done, []
        loaded: set[str] = set()
        for is_store, event in done:
            if not is_store:
                loaded.update(metadata.load_event_to_reqs[event])
        stores = {event: 1 for is_store, event in done if is_store}
        return loaded, SimpleCPUOffloadWorkerMetadata(stores) if stores else None

    def pinned(self, scheduler: Any) -> list[int]:
        manager = scheduler.scheduler_manager
        transfers = [
            *manager._store_event_to_blocks.values(),
            *manager._pending_finished_stores,
            *(
                state.transfer_meta
                for state in manager._reqs_to_load.values()
                if state.transfer_meta is not None
            ),
        ]
        return [block for one in transfers for block in one.gpu_block_ids]


KINDS = {OFFLOADING: OffloadingCopies, SIMPLE: SimpleCopies, MULTI: OffloadingCopies}


class Row(NamedTuple):
    """A request's row in a step, as the workers got it."""

    name: str
    plan: Any
    tokens: Any
    dense: list[int]
    residents: list[int]

    def check(self, inside: dict[int, Any], end: int) -> None:
        """All whole blocks of its first tokens are what they should be."""
        for column in range(end // BLOCK_SIZE):
            others, last = inside[self.dense[column]]
            mine = self.tokens[: (column + 1) * BLOCK_SIZE]
            assert others[:last] == mine, f"{self.name} reads {others[:last]}"


class ConnectorDriver(Driver):
    """A scheduler with a connector, and what is in the blocks."""

    def __init__(self, name: str, draw: random.Random, **options: Any) -> None:
        self.inside: dict[int, Any] = {}
        self.launched = self.run = 0
        """Steps that the device has been given, and those that it has run."""
        self.queue: deque[list[Row]] = deque()
        super().__init__(policy="gate", transfer=transfer_of(name), **options)
        self.copies = KINDS[name](self, draw)
        self.is_multi = name == MULTI
        self.said: dict[int, KVConnectorOutput] = {}
        self.steps_of: dict[int, int] = {}

    def _run(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        if self.is_multi:
            (metadata,) = metadata.metadata
        self.copies.begin(metadata)
        super()._run(output)
        rows = [self._row(name, row) for name, row in output.h2o_plan.rows.items()]
        self.queue.append(rows)
        self.launched += 1
        self.steps_of[id(output)] = self.launched
        loaded, said = self.copies.end(metadata)
        if self.is_multi and said:
            said = MultiKVConnectorWorkerMetadata((said,))
        self.said[id(output)] = KVConnectorOutput(
            finished_recving=loaded, kv_connector_worker_meta=said
        )

    def _row(self, name: str, plan: Any) -> Row:
        tokens = self.scheduler.requests[name].all_token_ids
        blocks = [block.block_id for block in self.manager.req_to_blocks[name]]
        return Row(name, plan, tokens, blocks, self._residents(name))

    def run_steps(self, until: int) -> None:
        """Let the device run what it has been given."""
        while self.run < until:
            self.run += 1
            for row in self.queue.popleft():
                self._compute(row)

    def _compute(self, row: Row) -> None:
        """Read what is there, and write a step's tokens."""
        plan, start = row.plan, row.plan.num_computed_tokens
        if plan.decodes and not plan.stays_dense:
            self._hold(row)
            return
        row.check(self.inside, start)
        end = start + plan.num_scheduled_tokens
        for column in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            last = min(end, (column + 1) * BLOCK_SIZE)
            # Of steps in flight the last token may not be known yet.
            self.inside[row.dense[column]] = row.tokens, last
        if plan.is_transition:  # As on a GPU, at once.
            row.check(self.inside, plan.chunk_end)
            self._hold(row)

    def _hold(self, row: Row) -> None:
        for block in row.residents:
            self.inside[block] = ["held", row.name], 2

    def process(self) -> dict[int, Any]:
        self.run_steps(self.steps_of.pop(id(self.in_flight[0])))
        return super().process()

    def transferred(self, output: Any) -> KVConnectorOutput:
        return self.said.pop(id(output))

    def pinned(self) -> list[int]:
        later = [
            block for _, blocks in self.scheduler.deferred_frees for block in blocks
        ]
        held = self.copies.pinned(self.scheduler.connector)
        return held + [block.block_id for block in later if not block.is_null]

    def drain(self, steps: int = 2000) -> None:
        super().drain(steps)
        while self.scheduler.connector.has_pending_push_work():
            self.schedule()
            self.process()


def lives(name: str, steps: int, **options: Any) -> ConnectorDriver:
    """Random requests with prompts that begin alike."""
    draw = random.Random(7)
    driver = ConnectorDriver(name, draw, num_blocks=SMALL_POOL, **options)
    told = [list(range(1, 130)), list(range(200, 290))]
    for _ in range(steps):
        if draw.random() < 0.25 and len(driver.scheduler.requests) < 6:
            turn = draw.choice(told)
            tokens = turn[: draw.randrange(20, len(turn))]
            tokens += [draw.randrange(9)] * draw.choice([1, 5, 20, 60])
            driver.add(tokens[:200], draw.choice([1, 4, 20, 40]))
        if len(driver.in_flight) < driver.depth:
            driver.schedule()
        if driver.in_flight and (
            len(driver.in_flight) == driver.depth or draw.random() < 0.5
        ):
            driver.process()
        if draw.random() < 0.02 and driver.running():
            driver.abort(draw.choice(driver.running()).request_id)
    driver.drain()
    return driver


@pytest.mark.parametrize(("depth", "drafts"), [(1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("name", [OFFLOADING, SIMPLE, MULTI])
def test_what_is_loaded_is_what_was_computed(name, depth, drafts):
    driver = lives(name, 800, depth=depth, drafts=drafts)
    assert driver.copies.stored > 50 and driver.copies.loaded > 30
    assert driver.manager.blocks_freed > 100
    driver.assert_pool_whole()


@pytest.mark.parametrize("name", [OFFLOADING])
def test_a_connector_that_is_not_told_stores_what_is_others(name, monkeypatch):
    """So the test above would find it."""
    monkeypatch.setattr(scheduler, "forget_released", lambda *_: None)
    with pytest.raises(AssertionError, match="reads"):
        lives(name, 600)


def test_a_session_ends_beside_a_connector():
    """Alone, with an error: no connector knows that its blocks are given back."""
    driver = ConnectorDriver(OFFLOADING, random.Random(1), num_blocks=64)
    turn = driver.add(list(range(100)), 4, session="s")
    driver.add(list(range(200, 290)), 4)
    driver.drain()
    assert driver.finished[turn] == FinishReason.ERROR
    assert list(driver.finished.values()).count(FinishReason.LENGTH) == 1
    driver.assert_pool_whole()


def test_a_connector_has_one_kind_of_layers():
    with pytest.raises(ValueError, match="--kv-transfer-config on a model that has"):
        ConnectorDriver(SIMPLE, random.Random(1), num_blocks=64, beside="window")
