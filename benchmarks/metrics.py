"""Numbers of one run, by the names and the arithmetic of `vllm bench serve`."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

_TIMES = ("ttft", "tpot", "e2el")
_TOTALS = {
    "completed": "completed",
    "total_input": "total_input_tokens",
    "total_output": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
}


@dataclass(frozen=True)
class RequestTimes:
    """One finished request; times in seconds since it arrived.

    Attributes:
        prompt_len: Tokens.
        output_tokens: Tokens generated.
        ttft: When its first token was there.
        latency: When its last token was there.
    """

    prompt_len: int
    output_tokens: int
    ttft: float
    latency: float


def serving_metrics(times: list[RequestTimes], duration: float) -> dict[str, Any]:
    """The result fields of `vllm bench serve` for requests that came all at once.

    Args:
        times: One entry per request.
        duration: Seconds until the last one was finished.

    Returns:
        `duration` (s), token and request counts and throughputs (per second), and
        mean, median, std, p50 and p99 of `ttft_ms`, `tpot_ms` and `e2el_ms`.
    """
    outputs = [RequestFuncOutput(success=True, **vars(t)) for t in times]
    with contextlib.redirect_stdout(io.StringIO()):  # advertises a plot library
        metrics, _ = calculate_metrics([], outputs, duration, None, [50, 99], {})
    result: dict[str, Any] = {"duration": duration}
    result |= {name: getattr(metrics, field) for field, name in _TOTALS.items()}
    for time in _TIMES:
        for statistic in ("mean", "median", "std"):
            name = f"{statistic}_{time}_ms"
            result[name] = float(getattr(metrics, name))
        for percentile, value in getattr(metrics, f"percentiles_{time}_ms"):
            result[f"p{percentile}_{time}_ms"] = float(value)
    return result


class StepRecorder(AggregateStatLoggerBase):
    """Extremes of what vLLM's engine reports after each step.

    A step's report comes after what finished in it has been freed.

    Attributes:
        kv_cache_usage: Highest share of the KV blocks held.
        max_running_requests: Most requests running at once. Without eviction an
            engine starts more than it can finish, and preempts later.
        running_requests: Sum over the steps of the requests running.
        steps: Steps with a request running.
        preemptions: Requests preempted.
        inter_token_latencies: Seconds between two tokens of a request, of all. Their
            median is a step in which nothing but decoding happens, while TPOT has
            the prompts in it that were read between a request's tokens.
        prefix_cache_queries: Prompt tokens looked up.
        prefix_cache_hits: Of these, tokens found.
    """

    def __init__(self, vllm_config: Any = None, engine_indexes: Any = None) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything before."""
        self.kv_cache_usage = 0.0
        self.max_running_requests = 0
        self.running_requests = 0
        self.steps = 0
        self.preemptions = 0
        self.inter_token_latencies: list[float] = []
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM once per step."""
        if scheduler_stats is not None:
            usage = scheduler_stats.kv_cache_usage
            running = scheduler_stats.num_running_reqs
            self.kv_cache_usage = max(self.kv_cache_usage, usage)
            self.max_running_requests = max(self.max_running_requests, running)
            self.running_requests += running
            self.steps += running > 0
            self.prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.inter_token_latencies += iteration_stats.inter_token_latencies_iter

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
