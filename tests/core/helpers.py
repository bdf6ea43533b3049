"""A real scheduler on a real config, driven without a worker."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import random
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.models import SMOLLM2
from vllm_h2o.core.integrity import check_integrity
from vllm_h2o.core.kept_files import METADATA
from vllm_h2o.core.manager import H2OManager
from vllm_h2o.core.metrics import FAILED_ATTRIBUTE
from vllm_h2o.core.plan import NUM_COUNTS, Load, ResidencyPlan, Save
from vllm_h2o.core.scheduler import H2OScheduler
from vllm_h2o.core.settings import CONFIG_KEY, h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.gate import NUM_QUERIES
from vllm_h2o.policy.life import RowPlan

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
SMALL_POOL = 36
"""Blocks for the longest request and its residents; three of them do not fit."""
HEADS = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


@functools.cache
def config_of(
    window: int | str,
    budget: int | str,
    chunk: int,
    policy: str = "h2o",
    resident: str = "model",
    beside: str = "",
    prefill_chunk: int = 0,
    keep: str = "none",
    depth: int = 1,
    drafts: int = 0,
    files: bool = False,
) -> Any:
    """An engine config with H2O on; for `beside` see `spec_beside`, for the others
    `Driver`."""
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_max": 3,
    }
    config = EngineArgs(
        str(SMOLLM2),
        skip_tokenizer_init=True,
        kv_policy=policy,
        h2o_budget=MAX_MODEL_LEN,
        **({} if policy == "gate" else {"h2o_observation_window": window}),
        block_size=32,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=chunk,
        max_num_seqs=16,
        dtype="float32",
        enable_prefix_caching=True,
        speculative_config=ngram if drafts else None,
    ).create_engine_config()
    # No attention on CPU takes blocks this small, but they find more in a scheduler.
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.enable_prefix_caching = beside != "none"
    if beside == "align":
        config.cache_config.mamba_cache_mode = beside
    # So are the budgets.
    additional = config.additional_config
    settings = {
        **additional[CONFIG_KEY],
        "budget": budget,
        "min_budget": 2 * BLOCK_SIZE,
        "resident_dtype": resident,
        "prefill_chunk": prefill_chunk,
        "keep": keep,
    }
    config.additional_config = {**additional, CONFIG_KEY: settings}
    # An engine on CPU has as many steps in flight as stages.
    config.parallel_config.pipeline_parallel_size = depth
    assert config.max_concurrent_batches == depth
    return config


def plan_of(rows: dict[str, RowPlan]) -> ResidencyPlan:
    """The plan of a step with these rows."""
    counts = np.array(list(rows.values()), dtype=np.int64).reshape(-1, NUM_COUNTS)
    return ResidencyPlan(list(rows), counts.T)


def spec_of(vllm_config: Any) -> H2OAttentionSpec:
    """The spec of a small layer."""
    plain = FullAttentionSpec(block_size=BLOCK_SIZE, **HEADS)
    return H2OAttentionSpec.of(plain, h2o_config(vllm_config), MAX_MODEL_LEN)


def wishes_of(request: Request) -> dict[str, Any]:
    """What a request asks of H2O."""
    return (request.sampling_params.extra_args or {}).get("h2o", {})


def is_full(request: Request) -> bool:
    """Whether a request asks to keep all of its tokens."""
    return wishes_of(request).get("policy") == "full"


def spec_beside(kind: str) -> KVCacheSpec:
    """The spec of layers that H2O leaves alone: they see a window, or have a state.

    Args:
        kind: "window", or vLLM's mode for states: "align" keeps them for the prefix
            cache, where steps end; "none" does without.
    """
    if kind == "window":
        return SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=40, **HEADS)
    return MambaSpec(
        block_size=BLOCK_SIZE if kind == "align" else MAX_MODEL_LEN,
        shapes=((2, 128),),
        dtypes=(torch.float32,),
        mamba_cache_mode=kind,
    )


class Driver:
    """A scheduler, and steps in flight whose outputs are made up.

    What each step's plan must say is worked out here anew, from what requests ask for
    alone: the rules of docs/design.md written a second time, without `policy/life.py`.
    """

    def __init__(
        self,
        num_blocks: int,
        window: int | str = 20,
        budget: int | str = 64,
        chunk: int = 48,
        beside: str = "",
        policy: str = "h2o",
        log_stats: bool = False,
        resident: str = "model",
        prefill_chunk: int = 0,
        keep: str = "none",
        depth: int = 1,
        drafts: int = 0,
        files: bool = False,
        transfer: dict[str, Any] | None = None,
        **limits: float,
    ) -> None:
        """Make the scheduler.

        Args:
            num_blocks: Of the pool.
            window, budget, policy, resident, prefill_chunk, keep: Options of H2O.
            chunk: Tokens of a step, at most.
            beside: Layers that H2O leaves alone; see `spec_beside`.
            log_stats: Whether metrics are counted.
            depth: Steps in flight, at most.
            drafts: Of a request in a step, at most.
            files: Whether what is kept goes to files too, of which some are not
                written, and some fail.
            transfer: vLLM's `kv_transfer_config`.
            limits: `keep_seconds` and `keep_sessions`.
        """
        config = config_of(
            window, budget, chunk, policy, resident, beside, prefill_chunk, keep, depth,
            drafts, files,
        )  # fmt: skip
        if transfer is not None:
            config = copy.copy(config)
            config.kv_transfer_config = KVTransferConfig(**transfer)
        self.folder = tempfile.TemporaryDirectory(prefix="h2o_kept_")
        self.files: dict[str, tuple[str, int, int]] = {}
        """Whose those are, by their stems: of how many tokens and blocks."""
        self.loads = self.failed = 0
        if keep != "none":
            # The config is another driver's too.
            limits = {"keep_seconds": 0.0, "keep_sessions": 0} | limits
            config.additional_config[CONFIG_KEY] |= limits
        if files:
            options = config.additional_config[CONFIG_KEY]
            options |= {"keep_folder": self.folder.name, "keep_size": 1.0}
        self.drafts, self.draw = drafts, random.Random(drafts)
        self.refused = self.accepted = 0
        self.depth = depth
        self.prefill_chunk, self.keep = prefill_chunk, keep
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, int] = {}
        """Tokens that each request has computed when its steps so far have run."""
        self.reached: dict[str, int] = {}
        """The most that it had computed, with drafts that were refused."""
        self.contents: dict[int, tuple[str, int, int]] = {}
        """Of blocks then: whose they are, in which of its resident columns, and for
        how many tokens if they are another's copy of these."""
        self.stood_at: dict[tuple[str, int], tuple[int, int]] = {}
        """Where requests stood on the ladder, and since when, with so many tokens."""
        self.gone_on: dict[str, int] = {}
        """Tokens that each request has not read, as it goes on from another."""
        self.chunks: dict[str, int] = {}
        """Tokens of a chunk of each request whose prompt is read in chunks."""
        config.cache_config.num_gpu_blocks = num_blocks
        spec = spec_of(config)
        self.slots = spec.block_slots
        # In float32; never more than twice as many.
        self.slots_per_token = 2 if resident == "int8" else 1
        groups = [KVCacheGroupSpec(["full"], spec)]
        if beside:
            groups.append(KVCacheGroupSpec(["beside"], spec_beside(beside)))
        page, size = spec.page_size_bytes, num_blocks * spec.page_size_bytes
        tensors = [KVCacheTensor(size, groups[0].layer_names, size, page)]
        self.scheduler = H2OScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, tensors, groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(group.kv_cache_spec.block_size for group in groups),
            hash_block_size=BLOCK_SIZE,
            log_stats=log_stats,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.budget, self.gated = budget, policy == "gate"
        self.ladder = self.scheduler._limits.ladder
        self.steps: dict[str, int] = {}
        """Where the requests stand on it, by their tokens."""
        self.grown_at: dict[str, int] = {}
        """Tokens of each request when it came there; 0: it has begun so."""
        self.starts: dict[str, set[int]] = {}
        """Of the chunks that each request has read since it was admitted."""
        self.window = NUM_QUERIES if self.gated else window
        self.in_flight: deque[Any] = deque()
        self.names = (f"r{i}" for i in itertools.count())
        self.token = itertools.count(1000)
        self.transitions: dict[str, int] = {}
        self.prompts: set[tuple[str, int]] = set()
        """Requests, with the tokens that they had to read at some time."""
        self.read: dict[str, int] = {}
        """Tokens of each request that had to be read when it was admitted."""
        self.runs_to: dict[str, int] = {}
        """Tokens that steps compute of each request at most, by what it had then."""
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.reports: dict[str, Any] = {}

    @property
    def manager(self) -> H2OManager:
        return self.scheduler.h2o_managers[0]

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        session: str | None = None,
        salt: str | None = None,
        named: str | None = None,
        **wishes: Any,
    ) -> str:
        """Add a request with wishes, or the next turn of a streaming-input session.

        `named` is vLLM's `session_id`.
        """
        name = session or next(self.names)
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"h2o": wishes}
        )
        params.update_from_generation_config({}, eos_token_id=2)
        request = Request(
            name,
            prompt,
            params,
            None,
            block_hasher=self.hasher,
            resumable=session is not None,
            cache_salt=salt,
            session_id=named,
        )
        self.requests.setdefault(name, request)
        self.scheduler.add_request(request)
        return name

    def budget_of(self, request: Request) -> int:
        """Slots of a request: what it asks for in whole blocks, one at least.

        Where budgets are shares that is what it has come to.
        """
        if self.climbs(request):
            return self.ladder.budgets[self.steps[request.request_id]] * self.slots
        most = min(request.num_prompt_tokens + request.max_tokens, MAX_MODEL_LEN)
        asked = self.tokens_of(
            wishes_of(request).get("budget", self.manager.budget), most
        )
        blocks = max(1, -(-asked // self.slots))
        return min(blocks * self.slots, self.manager.budget)

    def climbs(self, request: Request) -> bool:
        """Whether its budget follows it."""
        asked = wishes_of(request).get("budget")
        shares_grow = len(self.ladder.budgets) > 1
        is_fixed = isinstance(asked, int) or (asked is not None and not shares_grow)
        return self.is_share and not is_fixed

    @property
    def is_share(self) -> bool:
        """Whether the engine's budget is a share that does not hold all."""
        return isinstance(self.budget, str) and self.manager.budget < MAX_MODEL_LEN

    def share_of(self, request: Request) -> float | None:
        """The share of its own that it asks for."""
        asked = wishes_of(request).get("budget")
        return self.share_of_tokens(asked) if isinstance(asked, str) else None

    def share_of_tokens(self, asked: str) -> float:
        """What a share of the memory is of the tokens."""
        share = float(asked.rstrip("%")) / 100
        return min(self.slots_per_token * share, max(share, 0.75))

    def tokens_of(self, asked: int | str, most: int) -> int:
        """Tokens that a budget stands for, in a request of at most so many."""
        if isinstance(asked, int):
            return asked
        return math.ceil(round(most * self.share_of_tokens(asked), 6))

    def is_refused(self, wishes: dict[str, Any], most: int) -> bool:
        """Whether the budget asked for is more than the engine's."""
        asked = wishes.get("budget", 0)
        if isinstance(asked, str) and self.is_share:
            return float(asked.rstrip("%")) > float(self.budget.rstrip("%"))
        return self.tokens_of(asked, most) > self.manager.budget

    def schedule(self) -> Any:
        """Schedule a step and leave it in flight."""
        output = self.scheduler.schedule()
        self._check_plan(output)
        self._run(output)
        self.in_flight.append(output)
        self.check()
        return output

    def process(self) -> dict[int, Any]:
        """Give the scheduler the output of the oldest step in flight; what it says."""
        output = self.in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            row = output.h2o_plan.rows[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            end = row.num_computed_tokens + row.num_scheduled_tokens
            stay = self.draw.randint(0, drafts)
            self.refused += drafts - stay
            self.accepted += stay
            new = [next(self.token) for _ in range(1 + stay)]
            sampled.append(new if end >= self.read[name] else [])
            self.outputs.setdefault(name, []).extend(sampled[-1])
            self.ends[name] -= drafts - stay
        index = {name: i for i, name in enumerate(names)}
        result = ModelRunnerOutput(names, index, sampled)
        failing = [x for x in output.h2o_plan.loads if self.draw.random() < 0.3]
        self.failed += len(failing)
        setattr(result, FAILED_ATTRIBUTE, failing)
        result.kv_connector_output = self.transferred(output)
        said = self.scheduler.update_from_output(output, result)
        if self.drafts:
            drafted = [[7] * self.draw.randint(0, self.drafts) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))
        for outputs in said.values():
            for ended in outputs.outputs:
                if ended.finish_reason is not None:
                    self.finished[ended.request_id] = ended.finish_reason
                    if ended.kv_transfer_params:
                        self.reports[ended.request_id] = ended.kv_transfer_params["h2o"]
        self.check()
        return said

    def transferred(self, output: Any) -> KVConnectorOutput | None:
        """What a KV connector's workers say after a step."""
        return None

    def pinned(self) -> Iterable[int]:
        """Blocks that a KV connector holds on to, once for each time."""
        return ()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.check()

    def preempt_all(self) -> None:
        """Preempt whatever runs, as a reset of the prefix cache does."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.check()

    def drain(self, steps: int = 2000) -> None:
        """Run everything to its end, one step at a time."""
        while self.in_flight:
            self.process()
        while self.scheduler.has_unfinished_requests():
            steps -= 1
            assert steps, "requests do not finish"
            self.schedule()
            self.process()

    def running(self) -> list[Request]:
        return list(self.scheduler.running)

    def check(self) -> None:
        """Assert the pool's integrity and what each request may hold."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        check_integrity(managers, self.pinned())
        for request in self.scheduler.running:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        manager, name = self.manager, request.request_id
        life = manager.lives[name]
        end = life.prefill_end
        blocks = manager.req_to_blocks[name]
        computed = request.num_computed_tokens
        if life.stays_dense:
            most = request.num_prompt_tokens + request.max_tokens
            assert is_full(request) or most <= max(self.budget_of(request), end + 1)
            assert computed <= self.runs_to[name]
            assert len(blocks) == -(-self.reached[name] // BLOCK_SIZE)
            return
        read_at_once = self.chunks.get(name, end)
        if name in self.gone_on:
            assert manager.is_resident(name)
            first = self.gone_on[name] // BLOCK_SIZE
            prompt = {block.block_id for block in blocks[first : manager.dense_columns]}
            most = min(self.gone_on[name] + read_at_once, end)
            of_chunk = -(-most // BLOCK_SIZE) - first
            assert len(prompt) == of_chunk or prompt == {0}
        else:
            assert manager.is_resident(name) == (computed >= read_at_once)
        if name in self.chunks and name not in self.gone_on:
            prompt = {block.block_id for block in blocks[: manager.dense_columns]}
            of_chunk = -(-min(computed, read_at_once) // BLOCK_SIZE)
            assert len(prompt) == of_chunk or blocks[0].is_null and len(prompt) == 1
        if manager.is_resident(name):
            resident = blocks[manager.dense_columns :]
            budget = self.budget_of(request)
            held = budget if life.climb.grown_at else min(self.reached[name], budget)
            assert len(resident) == -(-held // self.slots)
        # Nothing is published past the prompt, of windowed layers neither.
        for group in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            published = 0 if name in self.chunks else end // BLOCK_SIZE
            for block in group.req_to_blocks[name][published:]:
                assert block.block_hash is None

    def _check_plan(self, output: Any) -> None:
        rows = output.h2o_plan.rows
        assert list(rows) == list(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        admitted = {r.req_id for r in output.scheduled_new_reqs}
        admitted |= set(cached.resumed_req_ids)
        for name, row in rows.items():
            request = self.scheduler.requests[name]
            if name in admitted:
                self.read[name] = request.num_tokens
                self.prompts.add((name, request.num_tokens))
                most = request.num_prompt_tokens + request.max_tokens
                most, end = min(most, MAX_MODEL_LEN), request.num_tokens
                self.runs_to[name] = self._runs_to(request, most)
                if is_full(request):
                    end = self.runs_to[name]
                if self.climbs(request):
                    self.steps[name] = self.ladder.enters(
                        request.num_tokens, most, self.share_of(request)
                    )
                self.transitions[name], self.starts[name] = 0, set()
                self.grown_at[name] = 0
                self.gone_on.pop(name, None)
                copies = [
                    x for x in output.h2o_plan.copies if x[1] in self._residents(name)
                ]
                loads = [x for x in output.h2o_plan.loads if x.request_id == name]
                if loads:
                    (load,) = loads
                    assert load.blocks == self._residents(name)
                    self._note_going_on_from_file(request, row, load)
                elif copies:
                    self._note_going_on(request, row, copies)
                else:
                    budget = self.budget_of(request)
                    assert row.budget == budget
                    chunk = self._note_chunk(request, budget)
                    self._check_admitted(request, row, chunk, min(end, chunk or end))
            end = row.num_computed_tokens + row.num_scheduled_tokens
            reached = 0 if name in admitted else self.reached[name]
            self.reached[name] = max(reached, end)
            if self.climbs(request) and not row.stays_dense:
                self._check_growth(name, end, row, self.share_of(request))
            else:
                assert row.budget == self.budget_of(request)
            assert row.decodes == (row.num_computed_tokens >= row.chunk_end)
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if row.decodes:
                assert row.num_scheduled_tokens == 1 + drafts
                if drafts and not row.stays_dense:
                    self._check_boundaries(request, row, end)
                assert row.stays_dense or self.transitions[name] == len(
                    self.starts[name] or {0}
                )
            else:
                self.starts[name].add(row.chunk_start)
                self._check_chunk(name, row)
                assert end <= row.chunk_end and (is_full(request) or not drafts)
                ends = end == row.chunk_end and not row.stays_dense
                assert row.is_transition == ends
                self.transitions[name] += row.is_transition

    def _check_boundaries(self, request: Request, row: RowPlan, end: int) -> None:
        """A step with drafts ends where heads part or the budget grows, at the latest,
        and computes no token behind the last but one."""
        start = row.num_computed_tokens
        assert row.grown_at or not start < row.budget < end
        if self.climbs(request):
            step, is_last = self.steps[request.request_id], len(self.ladder.budgets) - 1
            served = self.ladder.serves(step, self.share_of(request))
            assert step == is_last or end <= served
        assert end < request.num_prompt_tokens + request.max_tokens

    def _runs_to(self, request: Request, most: int) -> int:
        """Tokens that steps compute of a request at most, which ends with `most`.

        vLLM schedules one whose last two tokens no step has given yet, however many
        steps will.
        """
        beyond = self.depth - 3 if most - request.num_tokens >= 2 else 0
        return min(most + max(beyond, 0), MAX_MODEL_LEN)

    def _check_admitted(
        self, request: Request, row: RowPlan, chunk: int, end: int
    ) -> None:
        """What the cache gave leaves the observation window to compute, where a budget
        can bind and no gate stands for it; else the last token."""
        first_query = self._first_query(request, end)
        most = self.runs_to[request.request_id]
        if is_full(request):
            end = most
        assert row.chunk_end == end
        # Within the budget, or at an end with the first token.
        is_asked_for_later = wishes_of(request).get("keep", "none") != "none"
        if most <= max(row.budget, end + (not is_asked_for_later)):
            first_query = max(row.budget, end)
        assert row.first_query == first_query
        limit = request.num_tokens - 1
        if not self.gated:
            limit = min(row.first_query, limit)
        assert row.num_computed_tokens <= (0 if chunk else limit)

    def _note_chunk(self, request: Request, budget: int) -> int:
        """Tokens of a chunk, if the request is read in chunks; else 0."""
        self.chunks.pop(request.request_id, None)
        asked = wishes_of(request).get("prefill_chunk", self.prefill_chunk)
        chunk = -(-max(asked, 2 * budget) // BLOCK_SIZE) * BLOCK_SIZE
        reads_on = asked and request.num_tokens > chunk
        if not reads_on or is_full(request):
            return 0
        self.chunks[request.request_id] = chunk
        return chunk

    def _first_query(self, request: Request, end: int) -> int:
        """The first that scores of a prompt, or a chunk, with this end."""
        asked = wishes_of(request).get("observation_window", self.window)
        return max(0, end - (end if asked == "all" else int(asked)))

    def _check_chunk(self, name: str, row: RowPlan) -> None:
        """A step is within a chunk, and knows what the chunks before have left."""
        request, chunk = self.scheduler.requests[name], self.chunks.get(name)
        if chunk is None:
            assert row.chunk_start == 0
            return
        origin = self.gone_on.get(name, 0)
        start = origin + (row.num_computed_tokens - origin) // chunk * chunk
        end = min(start + chunk, self.read[name])
        if self.climbs(request):
            start = max(start, self.grown_at[name])
            if self.steps[name] < len(self.ladder.budgets) - 1:
                share = self.share_of(request)
                end = min(end, self.ladder.serves(self.steps[name], share))
        assert (row.chunk_start, row.chunk_end) == (start, end)
        assert row.first_query == self._first_query(request, row.chunk_end)
        if start > origin:
            assert row.scored_from == self._first_query(request, start)

    def _kept(self, request: Request) -> str:
        """What stays of the request."""
        keep = wishes_of(request).get("keep", self.keep)
        return "none" if is_full(request) else keep

    def _residents(self, name: str) -> list[int]:
        blocks = self.manager.req_to_blocks[name][self.manager.dense_columns :]
        return [block.block_id for block in blocks]

    def _note_going_on(
        self, request: Request, row: RowPlan, copies: list[tuple[int, int]]
    ) -> None:
        """What a request goes on from is there, whole, and of its own first tokens."""
        assert self._goes_on(request)
        name, start = request.request_id, row.num_computed_tokens
        assert [target for _, target in copies] == self._residents(name)[: len(copies)]
        held = [self.contents[source] for source, _ in copies]
        ended, _, copied_at = held[0]
        assert held == [(ended, column, copied_at) for column in range(len(copies))]
        keeps, is_session = self._kept(other := self.requests[ended]), other.resumable
        if keeps == "prompt" or (is_session and copied_at):
            assert (ended, start) in self.prompts and copied_at in (0, start)
        else:
            gone = ended not in self.scheduler.requests
            assert gone or ended in self.finished or is_session
            assert self.ends[ended] == start and copied_at == 0
        assert keeps != "none"
        self._note_start(request, row, ended, len(copies))

    def _note_going_on_from_file(
        self, request: Request, row: RowPlan, load: Load
    ) -> None:
        """The same of what is in a file."""
        assert self._goes_on(request)
        (path,) = map(Path, load.paths)
        ended, num_tokens, num_blocks = self.files[path.name.partition("-0of1")[0]]
        assert num_tokens == row.num_computed_tokens
        assert num_blocks <= len(load.blocks)
        assert self._kept(self.requests[ended]) != "none"
        self.loads += 1
        self._note_start(request, row, ended, num_blocks)

    def _note_start(
        self, request: Request, row: RowPlan, ended: str, num_blocks: int
    ) -> None:
        """What a request goes on from is of its own first tokens."""
        name, start = request.request_id, row.num_computed_tokens
        tokens = self.requests[ended].all_token_ids[:start]
        assert request.all_token_ids[:start] == tokens and start < request.num_tokens
        assert self.requests[ended].cache_salt == request.cache_salt
        if "continue" not in wishes_of(request):
            assert self.requests[ended].session_id == request.session_id
        self.gone_on[name] = start
        budget = self.budget_of(self.requests[ended])
        if self.climbs(request):
            assert self.share_of(request) == self.share_of(self.requests[ended])
            self.steps[name], self.grown_at[name] = self.stood_at[ended, start]
            budget = self.ladder.budgets[self.steps[name]] * self.slots
        assert num_blocks == budget // self.slots
        asked = wishes_of(request).get("prefill_chunk", self.prefill_chunk)
        rest = -(-(request.num_tokens - start) // BLOCK_SIZE) * BLOCK_SIZE
        least = -(-max(asked, 2 * row.budget) // BLOCK_SIZE) * BLOCK_SIZE
        self.chunks[name] = min(least, rest) if asked else rest

    def _goes_on(self, request: Request) -> bool:
        """Whether it asks for that, or has the name of a session."""
        return wishes_of(request).get("continue", request.session_id is not None)

    def _run(self, output: Any) -> None:
        """What the worker will do to blocks, in the order of the steps."""
        plan = output.h2o_plan
        for save in plan.saves:
            self._write(save)
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        mine = {block for name in plan.rows for block in self._residents(name)}
        copied = {}
        for source, target in plan.copies:
            name, column, _ = self.contents[source]
            copied[target] = name, column, self.ends[name]
            if target not in mine:  # It stays of a prompt, before an answer is added.
                assert self.ends[name] == self.read[name]
                assert plan.rows[name].num_computed_tokens == self.read[name]
        self.contents |= copied
        for name, row in plan.rows.items():
            self.ends[name] = row.num_computed_tokens + row.num_scheduled_tokens
            stands = self.steps.get(name, 0), self.grown_at.get(name, 0)
            self.stood_at[name, self.ends[name]] = stands
            blocks = self.manager.req_to_blocks[name]
            for block in blocks[: self.manager.dense_columns]:
                self.contents[block.block_id] = name, -1, 0
            for column, block_id in enumerate(self._residents(name)):
                self.contents[block_id] = name, column, 0

    def _write(self, save: Save) -> None:
        """Write a file of what is in blocks before anything else is, or fail to."""
        held = [self.contents[block] for block in save.blocks]
        name, _, copied_at = held[0]
        assert held == [(name, column, copied_at) for column in range(len(held))]
        assert copied_at in (0, self.ends[name])
        num_tokens = json.loads(save.about)["tokens"]
        assert num_tokens == self.ends[name]
        self.files[Path(save.stem).name] = name, num_tokens, len(held)
        if self.draw.random() < 0.9:
            path = f"{save.stem}-0of1-{64 * '0'}.safetensors"
            about = {METADATA: save.about}
            save_file({"layer": torch.zeros(1)}, path, about)

    def _check_growth(
        self, name: str, end: int, row: RowPlan, share: float | None
    ) -> None:
        """A request grows in the step whose token its budget does not serve, or when it
        goes on and will outgrow that, if all heads are full."""
        step, start = self.steps[name], row.num_computed_tokens
        is_last = step == len(self.ladder.budgets) - 1
        grows = not is_last and end > self.ladder.serves(step, share)
        if start == self.gone_on.get(name) and not is_last and not grows:
            since, served = self.grown_at[name], self.ladder.serves(step, share)
            full = since == 0
            if step:
                before = self.ladder.serves(step - 1, share)
                full |= start - since >= served - before
            grows = full and self.read[name] > served
        assert grows == (row.grown_at == start > 0 and row.grown_from > 0)
        if grows:
            self.steps[name] += 1
            self.grown_at[name] = start
            assert row.decodes or name in self.gone_on
            assert start > row.grown_from
            assert row.grown_from == self.ladder.budgets[step] * self.slots
        assert row.budget == self.ladder.budgets[self.steps[name]] * self.slots

    def assert_pool_whole(self) -> None:
        self.check()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
