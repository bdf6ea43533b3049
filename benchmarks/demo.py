"""Stock vLLM and H2O side by side: same model, same text, same KV memory.

    make demo          or: python -m benchmarks.demo --help

Each system runs in a process of its own, one after the other, with as many
bytes of KV memory. Ends with a table.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.process import run_in_process
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import STOCK, Job, warm_up
from benchmarks.workloads import SOTU, Workload, prompt_source


def main() -> None:
    """Run both systems, print the table."""
    args = parse_args()
    model = str(ensure_model())
    workload = Workload("demo", args.prompt_tokens, args.output_tokens, args.requests)
    requests = workload.requests(prompt_source(SOTU, model, 0))
    results = []
    for system in (STOCK, args.policy):
        print(f"\n== {system}: starting the engine (half a minute)", flush=True)
        job = Job(
            system=system,
            model=model,
            requests=requests,
            max_model_len=workload.max_model_len,
            pool_blocks=args.pool_blocks,
            budget_tokens=args.budget,
            engine_args=ENGINE_ARGS | {"block_size": args.block_size},
        )
        results.append(run_in_process("benchmarks.demo:run", dataclasses.asdict(job)))
    print(table(results, args))
    if args.output:
        write_json(args, systems=results)


def parse_args() -> argparse.Namespace:
    """Options: sizes in tokens, memory in blocks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--budget", type=int, default=256, help="slots per request")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--block-size", type=int, default=32, help="tokens")
    parser.add_argument("--pool-blocks", type=int, default=160, help="stock's")
    parser.add_argument("--output", type=Path, help="keep the figures as JSON, here")
    return parser.parse_args()


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Inside the process: serve the requests and keep the answers."""
    from benchmarks.vllm_system import VllmSystem

    job = Job(**given)
    system = VllmSystem(job)
    warm_up(system, job.requests)
    result, outputs = system.generate(job.requests, detokenize=True)
    system.close()
    answers = [output.outputs[0].text for output in outputs]
    return {"system": job.system, **result, "answers": answers}


def table(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The comparison as text."""
    stock, ours = results
    ratio = ours["output_throughput"] / stock["output_throughput"]
    rows = {
        "output tokens/s": [r["output_throughput"] for r in results],
        "requests at once, mean": [r["mean_running_requests"] for r in results],
        "at most": [r["max_running_requests"] for r in results],
        "KV blocks": [r["kv_blocks"] for r in results],
        "peak KV blocks": [r["peak_kv_blocks"] for r in results],
        "preemptions": [r["preemptions"] for r in results],
        "blocks freed by eviction": [0, ours["h2o"]["blocks_freed"]],
        "ratio of tokens/s": [1, ratio],
    }
    lines = [
        "",
        f"{args.requests} requests of {args.prompt_tokens} + {args.output_tokens} "
        f"tokens, policy {args.policy}, budget {args.budget}, both systems with "
        f"{stock['kv_pool_bytes'] / 2**20:.0f} MiB of KV memory in blocks of "
        f"{args.block_size} tokens",
        "",
        f"{'':28}{'stock':>10}{args.policy:>10}",
    ]
    for name, values in rows.items():
        lines.append(f"{name:28}" + "".join(f"{v:>10.4g}" for v in values))
    lines.append("")
    for i in range(args.requests):
        for result in results:
            words = " ".join(result["answers"][i].split()[:10])
            lines.append(f"{i} {result['system']:>6}: {words}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
