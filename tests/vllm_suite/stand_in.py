"""pytest plugin for vLLM's own tests: H2O's scheduler and options in stock's place.

It is loaded beside vLLM's `tests` package, whose name ours has too, so that it imports
nothing from here. What H2O refuses (drafters with layers of their own, connectors,
pooling ..) stays stock's.
After every step each block of the pool has to be free or owned as counted.

Environment:
    H2O_STANDS_IN: `stock`; `async`: vLLM's AsyncScheduler everywhere, which H2O
        extends; or H2O's budget in tokens.
    H2O_OUTCOMES: A file that gets a line of JSON per test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_h2o.core.integrity import check_integrity
from vllm_h2o.core.manager import H2OManager
from vllm_h2o.core.scheduler import H2OScheduler
from vllm_h2o.core.settings import CONFIG_KEY, parse_settings
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.life import Life

MODE = os.environ["H2O_STANDS_IN"]
OUTCOMES = Path(os.environ["H2O_OUTCOMES"])
WITH_H2O = MODE not in ("stock", "async")
SETTINGS = {"policy": "h2o", "budget": int(MODE)} if WITH_H2O else {}

used = {"h2o": 0, "transitions": 0}
"""Steps, requests and engines of H2O's in a test, and compressed requests."""


def with_h2o(config: KVCacheConfig, max_model_len: int) -> KVCacheConfig | None:
    """With H2O's spec where layers have full attention; None: none has."""
    groups, found = [], False
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        full = type(spec) is FullAttentionSpec and not group.is_eagle_group
        if full and spec.sliding_window is spec.attention_chunk_size is None:
            spec = H2OAttentionSpec.of(spec, parse_settings(SETTINGS), max_model_len)
            group, found = replace(group, kv_cache_spec=spec), True
        groups.append(group)
    return replace(config, kv_cache_groups=groups) if found else None


def is_refused(config: Any, stock: type[Scheduler]) -> bool:
    """Whether H2O's front door would have refused what a stock scheduler gets."""
    in_pipeline = config.parallel_config.pipeline_parallel_size > 1
    drafted = config.speculative_config
    overlaps = issubclass(stock, AsyncScheduler)
    return (
        (drafted is not None and (drafted.method != "ngram" or overlaps))
        or config.kv_transfer_config is not None
        or config.diffusion_config is not None
        or config.model_config.is_encoder_decoder
        or config.model_config.runner_type == "pooling"
        or (in_pipeline and not overlaps)
    )


class StandIn(H2OScheduler):
    """H2O's scheduler where it is not refused; else stock's."""

    stock: type[Scheduler]

    def __new__(
        cls, vllm_config: Any, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> Any:
        """Of this class or of stock's, whose own `__init__` has run then."""
        longest = vllm_config.model_config.max_model_len
        refused = is_refused(vllm_config, cls.stock)
        if not refused and with_h2o(kv_cache_config, longest):
            return object.__new__(cls)
        return cls.stock(vllm_config, kv_cache_config, *args, **kwargs)

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Take what tests give a stock scheduler."""
        longest = vllm_config.model_config.max_model_len
        config = with_h2o(kv_cache_config, longest)
        others = vllm_config.additional_config or {}
        vllm_config.additional_config = {**others, CONFIG_KEY: SETTINGS}
        super().__init__(vllm_config, config, *args, **kwargs)


class ForScheduler(StandIn):
    """In the place of vLLM's scheduler."""

    stock = Scheduler


class ForAsyncScheduler(StandIn):
    """In the place of vLLM's asynchronous one."""

    stock = AsyncScheduler


class StandInManager(KVCacheManager):
    """A manager that tests drive without a scheduler, which says where prompts end."""

    def __init__(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any):
        """Take what tests give stock's; the length is its first argument."""
        longest = args[0] if args else kwargs["max_model_len"]
        config = with_h2o(kv_cache_config, longest) or kv_cache_config
        super().__init__(config, *args, **kwargs)

    def _begin(self, request: Any) -> None:
        name, longest = request.request_id, self.max_model_len
        for manager in self.coordinator.single_type_managers:
            if not isinstance(manager, H2OManager) or name in manager.req_to_blocks:
                continue
            used["h2o"] += 1
            most = min(request.num_prompt_tokens + request.max_tokens, longest)
            limits = manager.kv_cache_spec.limits("cpu")
            climb = limits.climb(None, request.num_tokens, most)
            life = Life.begin(manager.terms, request.num_tokens, most, climb)
            manager.begin(name, life)

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        self._begin(request)
        return super().get_computed_blocks(request, *args, **kwargs)

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        self._begin(request)
        return super().allocate_slots(request, *args, **kwargs)


def check_every_step() -> None:
    """Have H2O's scheduler check the pool after what it does."""
    for name in ("schedule", "update_from_output"):
        original = getattr(H2OScheduler, name)

        def checked(self: Any, *args: Any, original: Any = original, **kw: Any) -> Any:
            result = original(self, *args, **kw)
            used["h2o"] += 1
            transitions = self.h2o_stats.transitions
            used["transitions"] = max(used["transitions"], transitions)
            if not self.deferred_frees:  # which no request owns
                managers = self.kv_cache_manager.coordinator.single_type_managers
                check_integrity(managers)
            return result

        setattr(H2OScheduler, name, checked)


def start_small() -> None:
    """Have engines start on this machine, and with H2O."""
    original = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        self.enforce_eager, self.gpu_memory_utilization = True, 0.3
        if self.block_size is None or self.block_size % 32:
            self.block_size = 32
        if WITH_H2O and self.speculative_config is None:
            self.kv_policy, self.h2o_budget = "h2o", int(MODE)
            used["h2o"] += 1
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def swap(module: ModuleType) -> None:
    """Put what stands in where a module of tests has stock's."""
    by_mode = {Scheduler: AsyncScheduler}
    if WITH_H2O:
        by_mode = {
            Scheduler: ForScheduler,
            AsyncScheduler: ForAsyncScheduler,
            KVCacheManager: StandInManager,
        }
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value in by_mode:
            setattr(module, name, by_mode[value])


def pytest_configure() -> None:
    """Before any test is read."""
    # A second's work after each test; none of these compiles.
    torch._dynamo.reset = lambda: None
    start_small()
    if WITH_H2O:
        check_every_step()


def pytest_collection_finish() -> None:
    """Once all tests, and what they import, are there."""
    if MODE == "stock":
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.v1.core") or name.endswith("scheduler_streaming"):
            swap(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count a test's own steps."""
    used.update(h2o=0, transitions=0)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test went."""
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {"test": report.nodeid, "outcome": report.outcome, **used}
    if report.outcome == "failed":
        said = crash.message if crash else str(report.longrepr)
        line |= {"at": crash.path if crash else "", "said": said[:600]}
    with OUTCOMES.open("a") as file:
        file.write(json.dumps(line) + "\n")
