"""What H2O costs the scheduler: microseconds per step, without an engine.

    python -m benchmarks.scheduler_overhead --running 256

vLLM's AsyncScheduler and ours schedule the same decoding requests in turns. A
step is: schedule (with the plan), pickle the step for the workers, build a worker's
attention metadata (of one KV cache group), and take in their output. Time is CPU
time of this thread, so that others on the machine count for little.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.report import spread, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import STOCK
from vllm_h2o.attention.cpu_backend import H2OCPUBuilder
from vllm_h2o.attention.step import StepRows
from vllm_h2o.core.plan import PLAN_ATTRIBUTE
from vllm_h2o.core.scheduler import H2OScheduler
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec

PHASES = ("schedule", "pickle", "build", "update")
OURS = "h2o"
_BLOCK_SIZE = 16
_EOS = 2


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    args = parse_args(argv)
    # Two of each: what is made last lies at worse places of the memory.
    order = (STOCK, OURS, OURS, STOCK)
    drivers = [(name, SchedulerDriver(name, args)) for name in order]
    freeze_gc_heap()  # as an engine does once it has started
    samples: dict[str, dict[str, list[float]]] = {
        name: {phase: [] for phase in PHASES} for name in order
    }
    for _ in tqdm(range(args.rounds), unit="round"):
        for name, driver in drivers:
            for phase, value in driver.run(args.steps).items():
                samples[name][phase].append(value)
    result = summarize(samples)
    print(table(result))
    write_json(args, **result)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Sizes in requests, tokens and steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=256, help="requests")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--budget", type=int, default=256, help="slots per request")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--log-stats", action="store_true", help="with the metrics")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--steps", type=int, default=50, help="per turn")
    default = Path("benchmarks/results/scheduler_overhead.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


class SchedulerDriver:
    """A scheduler full of decoding requests; the workers' outputs are made up."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.tokens = itertools.count(1000)
        self.worker: WorkerStub | None = None  # not yet while prompts are read
        output_len = args.rounds * args.steps + 2
        max_model_len = args.prompt_tokens + output_len
        ours = {"kv_policy": OURS, "h2o_budget": args.budget} if name == OURS else {}
        config = EngineArgs(
            str(ensure_model()),
            block_size=32,
            max_model_len=max_model_len,
            max_num_batched_tokens=args.running * args.prompt_tokens,
            max_num_seqs=args.running,
            enable_prefix_caching=args.prefix_caching,
            dtype="float32",
            **ours,
        ).create_engine_config()
        # No attention on CPU takes blocks this small, but the scheduler does.
        config.cache_config.block_size = _BLOCK_SIZE
        spec: FullAttentionSpec = FullAttentionSpec(
            block_size=_BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32
        )
        if name == OURS:
            spec = H2OAttentionSpec.of(spec, h2o_config(config), max_model_len)
        request_blocks = -(-(max_model_len + args.budget) // _BLOCK_SIZE) + 1
        num_blocks = args.running * request_blocks + 1
        config.cache_config.num_gpu_blocks = num_blocks
        scheduler_cls = H2OScheduler if name == OURS else AsyncScheduler
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK_SIZE,
            log_stats=args.log_stats,
        )
        init_none_hash(sha256)
        hasher = get_request_block_hasher(_BLOCK_SIZE, sha256)
        self.hasher = hasher if args.prefix_caching else None
        for i in range(args.running):
            self._add(f"r{i}", args.prompt_tokens, output_len)
        self._step()  # the prompts
        assert len(self.scheduler.running) == args.running
        self.worker = WorkerStub(spec, config, args.running)

    def _add(self, name: str, prompt_tokens: int, output_len: int) -> None:
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=_EOS)
        prompt = [next(self.tokens) for _ in range(prompt_tokens)]
        self.scheduler.add_request(
            Request(name, prompt, params, None, block_hasher=self.hasher)
        )

    def run(self, steps: int) -> dict[str, float]:
        """Mean microseconds per step of each phase."""
        seconds = [self._step() for _ in range(steps)]
        return {
            phase: sum(step[i] for step in seconds) / steps * 1e6
            for i, phase in enumerate(PHASES)
        }

    def _step(self) -> tuple[float, ...]:
        """Seconds of each phase of one step."""
        clock = [time.thread_time()]
        output = self.scheduler.schedule()
        clock.append(time.thread_time())
        message = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
        clock.append(time.thread_time())
        received, result = pickle.loads(message), self._model_output(output)
        batch = self.worker.batch(received) if self.worker else None
        clock.append(time.thread_time())
        if self.worker:
            self.worker.build(received, batch)
        clock.append(time.thread_time())
        self.scheduler.update_from_output(output, result)
        clock.append(time.thread_time())
        schedule, pickling, _, build, update = (
            after - before for before, after in itertools.pairwise(clock)
        )
        return schedule, pickling, build, update

    def _model_output(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, [[next(self.tokens)] for _ in names])


class WorkerStub:
    """What a worker does with a step before its first layer, of one group."""

    def __init__(self, spec: FullAttentionSpec, config: Any, running: int) -> None:
        ours = isinstance(spec, H2OAttentionSpec)
        builder = H2OCPUBuilder if ours else CPUAttentionMetadataBuilder
        self.builder = builder(spec, [], config, torch.device("cpu"))
        columns = spec.max_num_blocks_per_req(config, config.model_config.max_model_len)
        self.block_table = torch.zeros(running, columns, dtype=torch.int32)
        self.slots = torch.zeros(running, dtype=torch.int64)
        self.request_ids: list[str] = []
        self.step: StepRows | None = None
        if ours:
            self.step = StepRows()
            self.step.request_ids = lambda: self.request_ids
            self.builder.bind(self.step)

    def batch(self, output: Any) -> CommonAttentionMetadata:
        """The rows of a step in which every request decodes."""
        # A worker's rows keep the order in which requests came; its strings are
        # not those of later messages.
        self.request_ids = self.request_ids or list(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        starts = torch.arange(len(cached.req_ids) + 1, dtype=torch.int32)
        lengths = torch.tensor(cached.num_computed_tokens, dtype=torch.int32) + 1
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=len(lengths),
            max_query_len=1,
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.block_table,
            slot_mapping=self.slots,
        )

    def build(self, received: Any, batch: CommonAttentionMetadata) -> None:
        """Hand over the plan, if there is one, and build."""
        if self.step:
            self.step.begin(getattr(received, PLAN_ATTRIBUTE), [])
        self.builder.build(0, batch)


def summarize(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Spreads in microseconds per step: of each phase, their total, and ours more."""
    for phases in samples.values():
        phases["total"] = [sum(values) for values in zip(*phases.values(), strict=True)]
    overhead = {
        phase: spread(
            ours - stock
            for ours, stock in zip(
                samples[OURS][phase], samples[STOCK][phase], strict=True
            )
        )
        for phase in samples[STOCK]
    }
    systems = {
        name: {phase: spread(values) for phase, values in phases.items()}
        for name, phases in samples.items()
    }
    return {"us_per_step": systems, "overhead_us_per_step": overhead}


def table(result: dict[str, Any]) -> str:
    """Medians, in microseconds per step."""
    columns = {**result["us_per_step"], "overhead": result["overhead_us_per_step"]}
    lines = [f"{'us per step':12}" + "".join(f"{name:>12}" for name in columns)]
    for phase in columns["overhead"]:
        values = (column[phase]["median"] for column in columns.values())
        lines.append(f"{phase:12}" + "".join(f"{value:>12.1f}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
