"""What scoring and the transition add to the time to first token, in one engine.

    python -m benchmarks.first_token --prompts 512 4096 --cached 512 4096

Two engines of one kind differ by more than 3 %, for as long as they live, so that
`compare` can not tell such a difference. Here both sides are one engine with H2O:
a request whose answer may be as long as fits its budget stays dense, its prompt
goes through stock's attention and nothing else, as in stock vLLM; one that may
generate more is scored. They take turns, and both are stopped after a few tokens.

What a transition adds is taken from a second engine, whose budget is what the option
says: how much later the second token comes than those that follow. With `--engines`
several such pairs follow each other, and their turns count together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import vllm_h2o
from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import spread, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import Job
from benchmarks.workloads import SOTU, prompt_source
from vllm_h2o.calibration.loaded_model import FEWEST_TOKENS

ROOM, TOKENS = 64, 6
"""Tokens of a budget that is larger than the prompt by so many; tokens awaited."""


def main(argv: list[str] | None = None) -> None:
    """Measure every prompt, print a line each, write JSON."""
    args = parse_args(argv)
    cells = []
    for cached, lengths in ((False, args.prompts), (True, args.cached)):
        for length in lengths:
            cells.append(measure(length, cached, args))
            print(line(cells[-1]), flush=True)
    write_json(args, cells=cells)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Lengths in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 512, 1024])
    parser.add_argument("--cached", nargs="*", type=int, default=[512, 4096])
    parser.add_argument(
        "--budget",
        type=int,
        default=20,
        help="%% of the prompt, and a block at least",
    )
    parser.add_argument("--policy", default="h2o", help="the preset that evicts")
    parser.add_argument("--dtype", default=ENGINE_ARGS["dtype"], help="of the model")
    parser.add_argument("--rounds", type=int, default=24, help="turns of an engine")
    parser.add_argument("--engines", type=int, default=1, help="pairs, one by one")
    parser.add_argument("--model", default="", help="folder; SmolLM2 without it")
    default = Path("benchmarks/results/first_token.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


def measure(length: int, cached: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One prompt: scored against one that stays dense, and the transition."""
    job = {"length": length, "cached": cached, "model": args.model}
    job |= {"policy": args.policy, "dtype": args.dtype}
    budget = max(-(-length * args.budget // 100), 2 * ENGINE_ARGS["block_size"])
    fits = ROOM // 2, 2 * ROOM
    engines = []
    for _ in range(args.engines):
        turns = run(job | {"budget": length + ROOM}, [fits, fits[::-1]], args.rounds)
        dense, scored = ([turn[str(n)] for turn in turns] for n in fits)
        evicted = run(job | {"budget": budget}, [(fits[1],)], args.rounds)
        engines.append((dense, scored, [turn[str(fits[1])] for turn in evicted]))
    together = summary(*(sum(parts, []) for parts in zip(*engines, strict=True)))
    one = [summary(*parts)["ratio_ttft_and_transition"] for parts in engines]
    head = {"prompt": length, "cached": cached, "budget_tokens": budget}
    return head | together | {"ratio_ttft_and_transition_by_engine": one}


def summary(
    dense: list[list[float]], scored: list[list[float]], evicted: list[list[float]]
) -> dict[str, Any]:
    """Times of tokens by turn, in seconds, as the figures of a cell."""
    first = [1e3 * t[0] for t in dense]
    lag = [1e3 * late(t) for t in evicted]
    ratio = spread(s[0] / w[0] for s, w in zip(scored, dense, strict=True))
    extra = statistics.median(lag) / statistics.median(first)
    return {
        "ttft_dense_ms": spread(first),
        "ratio_ttft": ratio,
        "dense_second_token_late_ms": spread(1e3 * late(t) for t in dense),
        "second_token_late_ms": spread(lag),
        "ratio_ttft_and_transition": ratio["median"] + extra,
    }


def late(times: list[float]) -> float:
    """How much longer the second token takes than the following ones, in seconds."""
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return gaps[0] - statistics.median(gaps[1:])


def run(
    job: dict[str, Any], orders: list[tuple[int, ...]], rounds: int
) -> list[dict[str, list[float]]]:
    """An engine's turns: the requests of the orders, which alternate."""
    job |= {"orders": orders, "rounds": rounds}
    return run_in_process("benchmarks.first_token:turns", job, engine_env(1))


def turns(job: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Inside the process: per turn and `max_tokens`, seconds until each token."""
    from benchmarks.vllm_system import VllmSystem

    model = job["model"] or str(ensure_model())
    prompt = prompt_source(SOTU, model, 0)[: job["length"]]
    longest = max(job["length"] + 4 * ROOM, FEWEST_TOKENS)  # which a gate takes
    system = VllmSystem(
        Job(
            system=job["policy"],
            model=model,
            requests=[],
            max_model_len=longest,
            pool_blocks=4 * -(-longest // ENGINE_ARGS["block_size"]),
            budget_tokens=job["budget"],
            prefix_caching=job["cached"],
            engine_args=ENGINE_ARGS | {"dtype": job["dtype"]},
        )
    )
    found, scored = [], 0
    for turn in range(-2, job["rounds"]):  # the first two warm up
        order = job["orders"][turn % len(job["orders"])]
        times = {str(n): token_times(system.llm.llm_engine, prompt, n) for n in order}
        scored += sum(job["length"] + n > job["budget"] for n in order)
        if turn >= 0:
            found.append(times)
    transitions = vllm_h2o.stats(system.llm)["transitions"]
    assert transitions == scored, (
        f"{transitions} transitions of {scored} scored prompts"
    )
    system.close()
    return found


def token_times(
    engine: Any,
    prompt: list[int],
    max_tokens: int,
    wishes: dict[str, Any] | None = None,
) -> list[float]:
    """Seconds from the request's arrival to each of its first tokens.

    Args:
        engine: vLLM's `LLMEngine`.
        prompt: Tokens.
        max_tokens: Of the answer, `TOKENS` at least.
        wishes: What the request asks of H2O.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False,
        extra_args={"h2o": wishes or {}},
    )  # fmt: skip
    start, times = time.perf_counter(), []
    name = str(start)
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while len(times) < TOKENS:
        for output in engine.step():
            now = time.perf_counter() - start
            count = len(output.outputs[0].token_ids)
            times += [now] * (count - len(times))
    engine.abort_request([name])
    time.sleep(0.1)  # the engine may be within a step of it
    return times


def line(cell: dict[str, Any]) -> str:
    """Medians, then [lowest, highest]."""
    ratio, lag = cell["ratio_ttft"], cell["second_token_late_ms"]
    return (
        f"{'cached' if cell['cached'] else 'prompt'} {cell['prompt']}: "
        f"{cell['ttft_dense_ms']['median']:.1f} ms dense; scored over that "
        f"{ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}]; "
        f"transition {lag['median']:.1f} ms "
        f"(dense {cell['dense_second_token_late_ms']['median']:.1f}); "
        f"with it {cell['ratio_ttft_and_transition']:.3f} (by engine "
        f"{', '.join(f'{x:.3f}' for x in cell['ratio_ttft_and_transition_by_engine'])})"
    )


if __name__ == "__main__":
    main()
