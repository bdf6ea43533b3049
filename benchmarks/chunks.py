"""Time to first token of prompts that are read in chunks, over that of whole ones.

    python -m benchmarks.chunks --prompts 2048 4096 7000 --chunk 1024 --budget 512

Both sides are requests of one engine with `--h2o-prefill-chunk`, in turns: one asks for
`h2o_prefill_chunk=0`, and is read whole.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.first_token import ROOM, TOKENS, token_times
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import spread, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.workloads import SOTU, prompt_source


def main(argv: list[str] | None = None) -> None:
    """Measure every prompt, print a line each, write JSON."""
    args = parse_args(argv)
    cells = []
    for length in args.prompts:
        job = {"length": length, "model": args.model, "rounds": args.rounds}
        job |= {"chunk": args.chunk, "budget": args.budget}
        turns = run_in_process("benchmarks.chunks:turns", job, engine_env(1))
        whole, chunked = zip(*turns, strict=True)
        ratio = spread(b / a for a, b in zip(whole, chunked, strict=True))
        cells.append({"prompt": length, "whole_s": spread(whole), "ratio": ratio})
        print(
            f"{length}: {cells[-1]['whole_s']['median']:.2f} s whole; in chunks over "
            f"that {ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}]",
            flush=True,
        )
    write_json(args, cells=cells)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Lengths in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", nargs="+", type=int, default=[2048, 4096, 7000])
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="turns of an engine")
    parser.add_argument("--model", default="", help="folder; SmolLM2 without it")
    default = Path("benchmarks/results/chunks.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


def turns(job: dict[str, Any]) -> list[tuple[float, float]]:
    """Inside the process: per turn the seconds of a whole and of a chunked prompt."""
    from vllm import LLM

    model = job["model"] or str(ensure_model())
    prompt = prompt_source(SOTU, model, 0)[: job["length"]]
    longest = job["length"] + ROOM
    llm = LLM(
        model,
        kv_policy="h2o",
        h2o_budget=job["budget"],
        h2o_prefill_chunk=job["chunk"],
        max_model_len=longest,
        num_gpu_blocks_override=4 * -(-longest // ENGINE_ARGS["block_size"]),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        **ENGINE_ARGS,
    )
    found = []
    for turn in range(-1, job["rounds"]):  # the first warms up
        whole, chunked = (
            token_times(llm.llm_engine, prompt, TOKENS, wishes)[0]
            for wishes in ({"prefill_chunk": 0}, {})
        )
        if turn >= 0:
            found.append((whole, chunked))
    return found


if __name__ == "__main__":
    main()
