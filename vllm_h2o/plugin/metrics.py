"""H2O's metrics on vLLM's `/metrics` and in its log; see docs/metrics.md.

Target: `vllm.v1.metrics.loggers.StatLoggerManager`.
Why: vLLM's entry point for loggers (`vllm.stat_logger_plugins`) holds for every engine
    of a server, and a logger that it finds switches the stats on where they are off
    (`--disable-log-stats`): an add-on that nobody asked for would change vLLM. An `LLM`
    does not look there at all.
How: `__init__` is wrapped, once an engine with H2O is configured in this process. If
    the manager's own engine has H2O, our logger comes before the loggers it is given;
    before all others, because it takes out of the stats what is for it alone.
Upstream: nothing yet; a logger plugin could be a function of the config that may
    return None, and `LLMEngine` could load them too.
Remove when: vLLM does.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager

from vllm_h2o.core.metrics import Kept, StepReport
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.plugin.requests import limits_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import (
        IterationStats,
        MultiModalCacheStats,
        SchedulerStats,
    )

logger = init_logger(f"vllm.{__name__}")

_PREFIX = "h2o_"

# Named as the fields of `StepReport`; Prometheus adds `_total` to counters.
COUNTERS = {
    "transitions": "Prompts compressed, or chunks of them; again after a preemption.",
    "evicted_tokens": "Tokens no longer held, per layer and KV head.",
    "freed_dense_blocks": "Dense blocks that compressed prompts gave back.",
    "kept_requests": "Requests, or turns of sessions, of which something was kept.",
    "continued_requests": "Requests that went on from that.",
    "continued_tokens": "Tokens not read, by requests that went on from that.",
    "saved_requests": "Requests of which something was to be written to a file.",
    "loaded_requests": "Requests that went on from a file.",
    "failed_loads": "Files that were not what they should be; they are removed.",
}
GAUGES = {
    "dense_blocks": "Blocks of the pool in use that are not resident ones.",
    "resident_blocks": "Blocks of the pool that compressed requests hold.",
    "kept_snapshots": "Snapshots in the pool that requests can go on from.",
    "kept_blocks": "Free blocks of the pool that have these.",
    "kept_seconds": "Since that of these was used that has not been for longest.",
    "kept_files": "Snapshots in files that requests can go on from.",
    "kept_file_bytes": "Bytes of all files in the folder, about.",
}
_SELDOM = ("saved_requests", "loaded_requests", "failed_loads", *Kept._fields)
"""Of these the log says those that are not 0."""
STATES = ("resident", "prefilling", "dense")
"""Of requests, as `StepReport` names them."""
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Upper bounds of buckets; the first holds requests that lost nothing."""
TOKENS = tuple(2.0**power for power in range(5, 18))

SECONDS = tuple(step * 10.0**power for power in (-4, -3, -2, -1) for step in (1, 2, 5))


def add_metrics() -> None:
    """Give the engines of this process that have H2O its metrics; idempotent."""
    stock = StatLoggerManager.__init__
    if hasattr(stock, "adds_h2o"):
        return

    @functools.wraps(stock)
    def init(
        self, vllm_config, engine_idxs=None, custom_stat_loggers=None, *args, **kwargs
    ) -> None:
        _unregister()
        if h2o_config(vllm_config) is not None:
            custom_stat_loggers = [H2OStatLogger, *(custom_stat_loggers or ())]
        stock(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    init.adds_h2o = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = init  # type: ignore[method-assign]


class H2OStatLogger(AggregateStatLoggerBase):
    """The metrics of a front end's engines, and a line in the log for each engine."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        name = vllm_config.model_config.served_model_name
        self._labels = {index: (name, str(index)) for index in engine_indexes}
        self._counters = {
            name: self._each(_metric(Counter, name, documentation))
            for name, documentation in COUNTERS.items()
        }
        self._gauges = {
            name: self._each(_gauge(name, documentation))
            for name, documentation in GAUGES.items()
        }
        requests = _gauge("requests", "Requests that hold blocks, by state.", "state")
        self._requests = {state: self._each(requests, state) for state in STATES}
        self._shares = self._each(
            _metric(
                Histogram,
                "evicted_share",
                "Share of its context that a finished request had lost, 0 to 1.",
                buckets=SHARES,
            )
        )
        self._held = self._each(
            _metric(
                Histogram,
                "held_tokens",
                "Tokens that a finished request held, per KV head on average.",
                buckets=TOKENS,
            )
        )
        self._seconds = self._each(
            _metric(
                Histogram,
                "transition_seconds",
                "Time to compress a prompt, where the worker's device is the CPU.",
                buckets=SECONDS,
            )
        )
        self._set_constants(vllm_config)
        # Of several front ends each sees a part; stock's line is off then, too.
        alone = vllm_config.parallel_config._api_process_count == 1
        self._lines = {index: _Line(index) for index in engine_indexes if alone}
        # A server takes no other leave of its loggers.
        weakref.finalize(self, _log_at_exit, list(self._lines.values()))

    def _each(self, metric: Any, *labels: str) -> dict[int, Any]:
        """The metric of each engine."""
        return {i: metric.labels(*own, *labels) for i, own in self._labels.items()}

    def _set_constants(self, vllm_config: VllmConfig) -> None:
        config = h2o_config(vllm_config)
        assert config is not None
        longest = vllm_config.model_config.max_model_len
        most = limits_of(vllm_config).climb(None, longest, longest).budget
        budget = _gauge(
            "budget_tokens", "Token slots of the longest request, per KV head."
        )
        asked = _gauge(
            "policy_info",
            "What was asked for; always 1.",
            *("policy", "head_budgets", "prompt_score"),
        )
        for metric, labels, value in (
            (budget, (), most),
            (asked, (config.policy, config.head_budgets, config.prompt_score), 1),
        ):
            for gauge in self._each(metric, *labels).values():
                gauge.set(value)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the scheduler's report out of the stats and count it."""
        if scheduler_stats is None:
            return
        report = StepReport.take(scheduler_stats.num_kv_fetch_reqs_by_stage)
        if report is None or engine_idx not in self._labels:
            return
        for name, counters in self._counters.items():
            counters[engine_idx].inc(getattr(report, name))
        for name, gauges in (self._gauges | self._requests).items():
            gauges[engine_idx].set(getattr(report, name))
        for (evicted, context), count in report.finished.items():
            for _ in range(count):
                self._shares[engine_idx].observe(evicted / context)
                self._held[engine_idx].observe(context - evicted)
        for microseconds, count in report.took.items():
            for _ in range(count):
                self._seconds[engine_idx].observe(1e-6 * microseconds)
        if engine_idx in self._lines:
            self._lines[engine_idx].add(report)

    def log_engine_initialized(self) -> None:
        """Nothing: the scheduler has said what is in force."""

    def log(self) -> None:
        """Log what has changed; a server calls this every 10 seconds."""
        _log(self._lines.values())


class _Line:
    """An engine's counters since it started, as a line of the log."""

    def __init__(self, engine_index: int) -> None:
        self._prefix = f"Engine {engine_index:03d}"
        self._total = StepReport()
        self._logged = str(self)

    def add(self, report: StepReport) -> None:
        """Add the increments of a report to those before."""
        for name in COUNTERS:
            increment = getattr(report, name)
            setattr(report, name, getattr(self._total, name) + increment)
        self._total = report

    def __str__(self) -> str:
        total = self._total
        counted = (
            f"{name.replace('_', ' ')}: {getattr(total, name)}"
            for name in (*COUNTERS, *GAUGES)
            if name not in _SELDOM or getattr(total, name)
        )
        states = (
            f"{state.replace('_', ' ')}: {getattr(total, state)} reqs"
            for state in STATES
        )
        return ", ".join((*counted, *states))

    def log(self) -> None:
        """Log the line if it is not the last one again."""
        if self._logged != (line := str(self)):
            self._logged = line
            logger.info("%s: H2O %s", self._prefix, line)


def _log(lines: Iterable[_Line]) -> None:
    for line in lines:
        line.log()


def _log_at_exit(lines: Iterable[_Line]) -> None:
    raising, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        _log(lines)  # of a process that may have closed its streams
    finally:
        logging.raiseExceptions = raising


def _metric(cls: Any, name: str, documentation: str, *labels: str, **options) -> Any:
    """A metric with vLLM's labels, and others after them."""
    labelnames = ["model_name", "engine", *labels]
    return cls(_PREFIX + name, documentation, labelnames, **options)


def _gauge(name: str, documentation: str, *labels: str) -> Any:
    # Of several front ends the one that has heard last is right.
    return _metric(Gauge, name, documentation, *labels, multiprocess_mode="mostrecent")


def _unregister() -> None:
    """Forget the metrics of an engine before, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(_PREFIX):
            REGISTRY.unregister(collector)
