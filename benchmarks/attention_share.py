"""How much of a decode step is attention, by vLLM's own torch profiler.

    python -m benchmarks.attention_share --context 4000 --requests 8 --budget 20%

Stock and H2O take turns, each in a process of its own. All requests are read
first; then some decode steps are profiled. Attention is vLLM's operator
`unified_attention_with_output` of all layers: for H2O that is graduation, writing,
attention and scores. A step is the worker's `execute_model`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import spread, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import STOCK, Job
from benchmarks.workloads import SOTU, Workload, prompt_source

ATTENTION = ("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update")


def main(argv: list[str] | None = None) -> None:
    """Profile in turns, print a table, write JSON."""
    args = parse_args(argv)
    samples: dict[str, list[dict[str, float]]] = {STOCK: [], "h2o": []}
    for _ in range(args.rounds):
        for system in samples:
            job = vars(args) | {"system": system, "output": None}
            env = engine_env(1)
            found = run_in_process("benchmarks.attention_share:profile", job, env)
            samples[system].append(found)
    systems = {}
    print(f"\n{'':10}{'attention ms':>14}{'step ms':>10}{'share':>8}   (medians)")
    for system, found in samples.items():
        spreads = {name: spread(f[name] for f in found) for name in found[0]}
        systems[system] = spreads
        attention, step, share = (s["median"] for s in spreads.values())
        print(f"{system:10}{attention:14.2f}{step:10.2f}{share:8.1%}")
    write_json(args, systems=systems)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=4000, help="prompt tokens")
    parser.add_argument("--requests", type=int, default=8, help="decoding at once")
    parser.add_argument("--budget", default="20%", help="tokens, or %% of the context")
    parser.add_argument("--steps", type=int, default=16, help="profiled")
    parser.add_argument("--rounds", type=int, default=2)
    default = Path("benchmarks/results/attention_share.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


def profile(job: dict[str, Any]) -> dict[str, float]:
    """Inside the process: milliseconds per step of attention and of all."""
    from vllm import SamplingParams

    from benchmarks.vllm_system import VllmSystem

    model = str(ensure_model())
    output_len = 2 * job["steps"] + job["requests"]
    workload = Workload("share", job["context"], output_len, job["requests"])
    requests = workload.requests(prompt_source(SOTU, model, 0))
    blocks = -(-workload.max_model_len // ENGINE_ARGS["block_size"])
    with tempfile.TemporaryDirectory() as folder:
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": folder,
            "torch_profiler_with_stack": False,
        }
        system = VllmSystem(
            Job(
                system=job["system"],
                model=model,
                requests=requests,
                max_model_len=workload.max_model_len,
                # All requests in full, twice: H2O's pages are larger.
                pool_blocks=2 * job["requests"] * blocks,
                budget_tokens=workload.budget_tokens(job["budget"]),
                engine_args=ENGINE_ARGS | {"profiler_config": profiler},
            )
        )
        engine = system.llm.llm_engine
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False
        )
        for i, request in enumerate(requests):
            prompt = {"prompt_token_ids": request["prompt_token_ids"]}
            engine.add_request(str(i), prompt, sampling)
        started: set[str] = set()
        while len(started) < job["requests"]:
            started |= {output.request_id for output in engine.step()}
        system.llm.start_profile()
        for _ in range(job["steps"]):
            engine.step()
        system.llm.stop_profile()
        system.close()
        return _times(Path(folder), job["steps"])


def _times(folder: Path, steps: int) -> dict[str, float]:
    """Read the worker's trace; durations there are in microseconds."""
    (path,) = folder.glob("*rank*.json.gz")
    with gzip.open(path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if "dur" in e]
    attention = sum(e["dur"] for e in events if e["name"] in ATTENTION)
    step = sum(e["dur"] for e in events if e["name"].startswith("execute_"))
    assert attention and step, "the trace lacks vLLM's marks"
    return {
        "attention_ms": attention / steps / 1000,
        "step_ms": step / steps / 1000,
        "attention_share": attention / step,
    }


if __name__ == "__main__":
    main()
