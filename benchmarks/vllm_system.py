"""vLLM, stock or with H2O, in a pool of as many KV bytes."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm_h2o
from benchmarks.metrics import RequestTimes, StepRecorder, serving_metrics
from benchmarks.systems import OURS, STOCK, Job

_COUNTERS = ("transitions", "tokens_evicted", "blocks_freed")


class VllmSystem:
    """An engine in its defaults, but for the job's `engine_args`."""

    def __init__(self, job: Job) -> None:
        # It would override the size of the pool.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        self.job = job
        h2o: dict[str, Any] = {}
        if job.system != STOCK:
            budget = job.share or job.budget_tokens
            h2o = OURS[job.system] | {"h2o_budget": budget}
        options: dict[str, Any] = {
            "max_model_len": job.max_model_len,
            "enable_prefix_caching": job.prefix_caching,
            "disable_log_stats": False,
            **job.engine_args,
        }
        self.pool_bytes = pool_bytes(job, options)
        options["kv_cache_memory_bytes"] = self.pool_bytes
        self.llm = LLM(job.model, **options, **h2o)
        self.recorder = StepRecorder()
        manager = self.llm.llm_engine.logger_manager
        assert manager is not None
        manager.stat_loggers.append(self.recorder)

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve the requests greedily, to their full lengths."""
        return self.generate(requests)[0]

    def generate(
        self, requests: list[dict[str, Any]], detokenize: bool = False
    ) -> tuple[dict[str, Any], list[RequestOutput]]:
        """As `run`, and vLLM's outputs."""
        prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
        params = [
            SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=r["output_len"],
                detokenize=detokenize,
            )
            for r in requests
        ]
        if self.job.prompts_cached:
            self.llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        elif self.job.prefix_caching:
            # Repeats do not profit from the one before.
            self.llm.reset_prefix_cache()
        self.recorder.reset()
        before = self._h2o_counters()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=True)
        duration = time.perf_counter() - start
        result = self._result(outputs, duration)
        after = self._h2o_counters()
        result["h2o"] = {name: after[name] - before[name] for name in after}
        return result, outputs

    def _h2o_counters(self) -> dict[str, int]:
        """Those that only grow; none for stock."""
        if self.job.system == STOCK:
            return {}
        counters = vllm_h2o.stats(self.llm)
        return {name: counters[name] for name in _COUNTERS}

    def _result(self, outputs: list[RequestOutput], duration: float) -> dict[str, Any]:
        recorder, config = self.recorder, self.llm.llm_engine.vllm_config
        blocks = config.cache_config.num_gpu_blocks - 1  # without the null block
        result = serving_metrics([_times(o) for o in outputs], duration)
        latencies = recorder.inter_token_latencies
        median_itl_ms = 1000 * statistics.median(latencies)
        # What is no decode step: a transition may lie between a request's first two
        # tokens, and with one request nothing else does.
        decode_steps = result["total_output_tokens"] / result["completed"] - 1
        until_decode = result["median_e2el_ms"] - decode_steps * median_itl_ms
        return result | {
            "mean_itl_ms": 1000 * statistics.fmean(latencies),
            "median_itl_ms": median_itl_ms,
            "median_ttft_and_transition_ms": until_decode,
            "preemptions": recorder.preemptions,
            "peak_kv_blocks": round(recorder.kv_cache_usage * blocks),
            "kv_blocks": blocks,
            "kv_pool_bytes": self.pool_bytes,
            "max_running_requests": recorder.max_running_requests,
            "mean_running_requests": recorder.running_requests / max(recorder.steps, 1),
            "prefix_cache_queries": recorder.prefix_cache_queries,
            "prefix_cache_hits": recorder.prefix_cache_hits,
        }

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def pool_bytes(job: Job, options: dict[str, Any]) -> int:
    """KV bytes of a rank in which stock has `pool_blocks` blocks.

    Given to every system by vLLM's `kv_cache_memory_bytes`: pages of ours are a
    little larger, so ours get fewer.
    """
    config = EngineArgs(job.model, **options).create_engine_config()
    model, parallel = config.model_config, config.parallel_config
    page = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    ).page_size_bytes
    blocks = job.pool_blocks + 1  # and the null block
    return blocks * page * model.get_num_layers(parallel)


def _times(output: RequestOutput) -> RequestTimes:
    """Out of vLLM's own request metrics."""
    stats = output.metrics
    assert stats is not None and output.prompt_token_ids is not None
    decoding = stats.last_token_ts - stats.first_token_ts
    return RequestTimes(
        prompt_len=len(output.prompt_token_ids),
        output_tokens=stats.num_generation_tokens,
        ttft=stats.first_token_latency,
        latency=stats.first_token_latency + decoding,
    )
