"""What stays of requests that end, and which requests go on from it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Self

import numpy as np
from vllm.v1.request import RequestStatus

from vllm_h2o.core.kept_files import KeptFiles
from vllm_h2o.core.metrics import Kept
from vllm_h2o.core.snapshots import KeptLimits, Snapshots, is_known_by_tokens
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.options import END, NONE, PROMPT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_h2o.core.manager import H2OManager
    from vllm_h2o.core.plan import Load, ResidencyPlan, Save
    from vllm_h2o.core.snapshots import Entry, Snapshot
    from vllm_h2o.core.stats import H2OStats
    from vllm_h2o.policy.ladder import Climb


_SECONDS_BETWEEN_LOOKS = 5.0


class Continuing:
    """Keeps snapshots of requests, and finds the one that a request begins with."""

    def __init__(
        self,
        manager: H2OManager,
        stats: H2OStats,
        hash_block_size: int,
        runs_ahead: bool,
        limits: KeptLimits,
        files: KeptFiles | None = None,
    ) -> None:
        """Begin with no snapshot in the pool.

        Args:
            manager: Of the one group of layers.
            stats: Counts what is kept.
            hash_block_size: Tokens of a block as vLLM hashes them.
            runs_ahead: Whether a step may have computed tokens behind the last one of
                a turn: a step is scheduled before the last has ended, or has drafts.
            limits: How long snapshots are of use, and of how many sessions.
            files: A second place for snapshots.
        """
        self._manager, self._stats, self._runs_ahead = manager, stats, runs_ahead
        pool = manager.block_pool
        self._snapshots = Snapshots(hash_block_size, pool, limits)
        self._files = files
        self._origins: dict[str, Snapshot] = {}
        self._looked, self._held = -math.inf, (0, 0, 0.0)
        self._just_kept: list[str] = []
        self._ran_on: set[str] = set()
        self._saves: list[Save] = []
        self._loading: set[str] = set()
        self._derived: dict[str, list[Entry]] = {}

    @classmethod
    def of_engine(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        managers: list[H2OManager],
        stats: H2OStats,
        hash_block_size: int,
    ) -> Self | None:
        """Where an engine keeps snapshots of requests; None: it keeps none.

        Args:
            vllm_config: The engine's.
            kv_cache_config: Its pool.
            managers: Of the groups of layers that evict.
            stats: Counts what is kept.
            hash_block_size: Tokens of a block as vLLM hashes them.

        Raises:
            ValueError: Layers have caches of several kinds.
        """
        spec, groups = managers[0].kv_cache_spec, kv_cache_config.kv_cache_groups
        assert isinstance(spec, H2OAttentionSpec)
        if not (config := spec.h2o).keeps:
            return None
        if len(groups) > 1:
            raise ValueError(
                f"H2O does not support --h2o-keep={config.keep!r}: this model has "
                f"layers with a window or a state of their own: use {NONE!r}"
            )
        runs_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        runs_ahead |= vllm_config.speculative_config is not None
        files = KeptFiles.of_engine(
            vllm_config, kv_cache_config, spec, len(groups[0].layer_names),
            hash_block_size,
        )  # fmt: skip
        limits = KeptLimits(config.keep_seconds or math.inf, config.keep_sessions)
        return cls(managers[0], stats, hash_block_size, runs_ahead, limits, files)

    def hit(
        self,
        request: Request,
        climb: Climb,
        num_hits: int,
        most_hit: int | None,
        session: str | None,
    ) -> int:
        """Let a request go on from the longest snapshot that it begins with.

        Args:
            request: It has just begun its life.
            climb: The budget that it asks for.
            num_hits: Tokens of its prefix-cache hit; a snapshot has to have more.
            most_hit: Tokens that may be a hit, as vLLM says; None: it does not say.
            session: Whose the snapshot has to be; None: anybody's.

        Returns:
            Tokens of the snapshot; 0: there is none.
        """
        # vLLM has asked a session's first turn alone.
        params = request.sampling_params
        needs_logits = params is not None and params.prompt_logprobs is not None
        if not is_known_by_tokens(request) or needs_logits:
            return 0
        last = request.num_tokens - 1
        most = last if most_hit is None else min(last, most_hit)
        found = [self._snapshots.longest(request, most, climb, session)]
        if self._files:
            found.append(self._files.longest(request, most, climb, session))
        # Of equally long ones that in the pool.
        snapshot = max(filter(None, found), key=_length, default=None)
        if snapshot is None or snapshot.num_tokens <= num_hits:
            return 0
        self._manager.go_on(request.request_id, snapshot)
        self._origins[request.request_id] = snapshot
        return snapshot.num_tokens

    def keep(self, request: Request) -> None:
        """Keep what a request holds that ends, if that is what it asks for."""
        manager, name = self._manager, request.request_id
        before = self._origins.pop(name, None)
        ran_on = name in self._ran_on
        self._ran_on.discard(name)
        computed = request.num_computed_tokens
        # With the tokens of steps in flight, of which the last may not be known.
        unknown = ran_on or computed > request.num_tokens
        failed = request.status == RequestStatus.FINISHED_ERROR
        unknown |= name in self._loading
        if unknown or failed or not is_known_by_tokens(request):
            return
        if not manager.is_resident(name):
            return
        life = manager.lives[name]
        what = life.options.kept(life.terms.policy)
        if what == NONE or (what == PROMPT and computed > life.prefill_end):
            return  # a copy of the prompt is kept already
        snapshot = manager.snapshot(name, computed)
        if snapshot is not None:
            self._snapshots.keep(request, snapshot, before)
            self._stats.kept_requests += 1
            self._just_kept.append(name)
            self._save(request, snapshot)

    def keep_prompts(self, plan: ResidencyPlan, requests: dict[str, Request]) -> None:
        """Keep what requests hold whose prompts have been read by the last step."""
        manager = self._manager
        pool, ours = manager.block_pool, []
        read = plan.num_computed_tokens == plan.chunk_ends
        for i in np.flatnonzero(read & ~plan.stay_dense).tolist():
            request, end = requests[plan.request_ids[i]], int(plan.chunk_ends[i])
            if not self._keeps_prompt(request) or not is_known_by_tokens(request):
                continue
            held = manager.snapshot(request.request_id, end)
            if held is None:
                continue
            self._save(request, held)
            if known := self._snapshots.same(request, end, held.climb):
                pool.touch(known.blocks)  # another sample, or the same prompt once more
                ours.append(known)
            elif copy := manager.copy_of(held):
                name = request.request_id
                entry = self._snapshots.keep(request, copy, self._origins.get(name))
                if name in self._loading:
                    self._derived.setdefault(name, []).append(entry)
                ours.append(copy)
                self._stats.kept_requests += 1
        # From now on they may be given away, but not to each other.
        for snapshot in ours:
            pool.free_blocks(reversed(snapshot.blocks))

    def _save(self, request: Request, held: Snapshot) -> None:
        """Have what a request holds written to a file too, if there is a place for it.

        Not with an adapter: its name may get other weights.
        """
        if self._files is None or request.lora_request is not None:
            return
        held = self._manager.filled(held)
        save = self._files.save(request, held)
        if save is not None:
            self._saves.append(save)
            self._stats.saved_requests += 1

    def take_saves(self) -> list[Save]:
        """What is to be written to files before anything of the step is."""
        saves, self._saves = self._saves, []
        return saves

    def note_loads(self, loads: list[Load]) -> None:
        """Note what steps in flight read from files, which may be damaged."""
        self._loading.update(load.request_id for load in loads)

    def end_loads(self, loads: list[Load], failed: list[Load]) -> None:
        """Take in how reading files went, of a step that has ended.

        Args:
            loads: All of the step's.
            failed: Those whose files were not what they should be: nothing goes on from
                these any more, nor from what was kept of their requests since.
        """
        for load in failed:
            assert self._files is not None
            self._files.drop(load.paths)
            self._stats.failed_loads += 1
            for entry in self._derived.get(load.request_id, ()):
                entry.forget()
        for load in loads:
            self._loading.discard(load.request_id)
            self._derived.pop(load.request_id, None)

    def kept(self) -> Kept:
        """What can be gone on from now, looked up every few seconds."""
        if (now := time.monotonic()) - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked, self._held = now, self._snapshots.held()
        files = self._files.count() if self._files else (0, 0)
        return Kept(*self._held, *files)

    def forget(self) -> None:
        """Let no request go on from what has been kept by now."""
        self._saves.clear()
        if self._files is not None:
            self._files.forget()

    def _keeps_prompt(self, request: Request) -> bool:
        """Whether what is held of the prompt stays.

        Also of a session's turns: where one ends by a stop token, tokens behind it may
        have been computed, and what is held then is of no use to the next.
        """
        life = self._manager.lives[request.request_id]
        what = life.options.kept(life.terms.policy)
        return what == PROMPT or (
            what == END and request.resumable and self._runs_ahead
        )

    def note_stop(self, request: Request) -> None:
        """Note a session that steps in flight run behind: what it holds is then of
        tokens that vLLM takes off it."""
        if request.resumable and request.num_output_placeholders:
            self._ran_on.add(request.request_id)

    def take_kept(self) -> list[str]:
        """Requests, or turns of sessions, that were kept since the last step."""
        kept, self._just_kept = self._just_kept, []
        return kept


def _length(snapshot: Snapshot) -> int:
    return snapshot.num_tokens
