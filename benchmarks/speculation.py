"""Speculation under eviction: time between tokens by drafts per step, beside stock's.

    python -m benchmarks.speculation --drafts 0 2 4 --requests 1 4 --output FILE

N-grams of the text itself draft, on a text that quotes itself: prose, then its
beginning once more, which the answer goes on with. Greedy, float32. Each system with
each number of drafts is an engine in a process of its own; these take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import OURS, STOCK
from benchmarks.workloads import SOTU, prompt_source

_COUNTERS = ("draft_tokens", "accepted_tokens")


def main(argv: list[str] | None = None) -> None:
    """Measure all, print a line each, write JSON."""
    args = parse_args(argv)
    systems = [(STOCK, None), *(("h2o", budget) for budget in args.budgets)]
    engines = [*itertools.product(systems, args.drafts)]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for (system, budget), drafts in engines:
            job = vars(args) | {"system": system, "budget": budget, "drafts": drafts}
            job["output"] = str(args.output)
            env = engine_env(1) | {"VLLM_CPU_KVCACHE_SPACE": "2"}
            result = run_in_process("benchmarks.speculation:turn", job, env)
            for requests, seen in result.items():
                name = f"{system} {budget or ''}".strip()
                key = f"{name}, {drafts} drafts, {requests} requests"
                found.setdefault(key, []).append(seen)
                print(line(key, [seen]), flush=True)
            write_json(args, turns=found)
    for key, turns in found.items():
        print(line(key, turns), flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="a folder; SmolLM2-135M")
    parser.add_argument("--budgets", nargs="+", default=["20%"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 2, 4])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompt", type=int, default=1600, help="tokens, of prose")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each engine")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    args = parser.parse_args(argv)
    args.model = args.model or str(ensure_model())
    return args


def turn(job: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Inside the process: by requests at once, ms between tokens, and what was
    accepted of the drafts."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"max_model_len": 4096, "disable_log_stats": False}
    if job["system"] != STOCK:
        options |= OURS[job["system"]] | {"h2o_budget": job["budget"]}
    if job["drafts"]:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": job["drafts"],
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    llm = LLM(job["model"], **ENGINE_ARGS | options, enable_prefix_caching=False)
    source = prompt_source(SOTU, job["model"], 0)

    def seconds(requests: int, tokens: int) -> float:
        prompts: list[Any] = []
        for i in range(requests):
            prose = source[i * job["prompt"] : (i + 1) * job["prompt"]]
            quoted = prose[: job["prompt"] // 4]
            prompts.append({"prompt_token_ids": prose + quoted})
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - start

    def counted() -> list[float]:
        found = {metric.name: metric for metric in llm.get_metrics()}
        names = [f"vllm:spec_decode_num_{name}" for name in _COUNTERS]
        return [getattr(found.get(name), "value", 0.0) for name in names]

    seconds(1, 8)
    result = {}
    for requests in job["requests"]:
        first = seconds(requests, 1)
        before = counted()
        later = seconds(requests, job["tokens"]) - first
        drafted, accepted = (b - a for a, b in zip(before, counted(), strict=True))
        result[requests] = {
            "ms_between_tokens": 1e3 * later / (job["tokens"] - 1),
            "drafted": drafted,
            "accepted": accepted,
        }
    llm.llm_engine.engine_core.shutdown()
    return result


def line(key: str, turns: list[dict[str, float]]) -> str:
    """What an engine took."""
    between = statistics.median(turn["ms_between_tokens"] for turn in turns)
    drafted = sum(turn["drafted"] for turn in turns)
    accepted = sum(turn["accepted"] for turn in turns)
    share = f", {accepted / drafted:.0%} of the drafts accepted" if drafted else ""
    return f"{key}: {between:.1f} ms between tokens{share}"


if __name__ == "__main__":
    main()
