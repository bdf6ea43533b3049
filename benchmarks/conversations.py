"""Turns of conversations: going on from what the last has held, beside reading again.

    python -m benchmarks.conversations --texts FOLDER --budget 512 --output FILE

Every text becomes a conversation: a system prompt that all share, then, turn by turn,
tokens of the text as the user's and the next ones as the answer, which is forced. One
engine with H2O answers each turn in four ways, in turns: `full`, as stock vLLM with
prefix hits; `hits`, compressed, with prefix hits of its earlier prompts; `again`,
without any, as where others have needed their blocks; `continue`.

Measured by turn: time to first token, blocks that are held when the turn has been
answered, and the loss of the answer, in nats per token over `full`, with an interval
of 95 % over the texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.forcing import forced, processor
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.quality.table import interval
from benchmarks.quality.texts import texts
from benchmarks.report import spread, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.workloads import SOTU, prompt_source
from vllm_h2o.policy.options import parse_budget

FULL, HITS, AGAIN, CONTINUE = "full", "hits", "again", "continue"
WAYS: dict[str, dict[str, Any]] = {
    FULL: {"policy": "full"},
    HITS: {},
    AGAIN: {},
    CONTINUE: {"continue": True},
}


def main(argv: list[str] | None = None) -> None:
    """Measure, print a line for each turn, write JSON."""
    args = parse_args(argv)
    job = vars(args) | {"output": None, "texts": str(args.texts)}
    # In this process, where the pool can be looked at.
    env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    samples = run_in_process("benchmarks.conversations:measure", job, env)
    turns = [summary([x for x in samples if x["turn"] == n]) for n in range(args.turns)]
    for number, turn in enumerate(turns, 1):
        shown = [f"turn {number}, {turn['tokens']:.0f} tokens:"]
        for way in WAYS:
            first, mine = turn[way]["ratio_ttft"], turn[way]
            shown.append(
                f"{way} {first['median']:.2f} [{first['min']:.2f}, {first['max']:.2f}] "
                f"{mine['blocks']:.0f} blocks {mine['loss_delta_nats']:+.3f} "
                "[{:+.3f}, {:+.3f}]".format(*mine["loss_interval"])
            )
        print(" | ".join(shown), flush=True)
    overall = whole_conversations(samples)
    print("all turns, nats per token over `full`:", json.dumps(overall))
    write_json(args, turns=turns, overall=overall, samples=samples)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Lengths in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help="a folder of .txt")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system", type=int, default=512)
    parser.add_argument("--user", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--budget", type=parse_budget, default=512)
    parser.add_argument("--model", default="", help="folder; SmolLM2 without it")
    default = Path("benchmarks/results/conversations.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One turn of all conversations: of each way, beside `full`."""
    turn: dict[str, Any] = {"tokens": statistics.mean(x["tokens"] for x in samples)}
    for way in WAYS:
        mine, full = ([x[name] for x in samples] for name in (way, FULL))
        pairs = list(zip(mine, full, strict=True))
        deltas = [x["loss"] - other["loss"] for x, other in pairs]
        turn[way] = {
            "ttft_s": spread(x["ttft"] for x in mine),
            "ratio_ttft": spread(x["ttft"] / other["ttft"] for x, other in pairs),
            "blocks": statistics.mean(x["blocks"] for x in mine),
            "loss_delta_nats": statistics.mean(deltas),
            "loss_interval": interval(deltas),
        }
    return turn


def whole_conversations(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What answers of all turns lose: the mean of the texts, and both ends of its
    interval, of `continue` and `again` over `full`, and of `again` over `continue`."""
    found = {}
    names = sorted({x["text"] for x in samples})
    for way, other in ((CONTINUE, FULL), (AGAIN, FULL), (AGAIN, CONTINUE)):
        deltas = [
            statistics.mean(
                x[way]["loss"] - x[other]["loss"] for x in samples if x["text"] == name
            )
            for name in names
        ]
        found[f"{way} over {other}"] = [statistics.mean(deltas), *interval(deltas)]
    return found


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Inside the process: a sample for each conversation and turn."""
    from vllm import LLM

    model = job["model"] or str(ensure_model())
    said = job["turns"] * (job["user"] + job["answer"])
    longest = job["system"] + said
    llm = LLM(
        model,
        kv_policy="h2o",
        h2o_budget=job["budget"],
        h2o_keep="end",
        max_model_len=longest + ENGINE_ARGS["block_size"],
        enable_prefix_caching=True,
        logits_processors=[processor()],
        gpu_memory_utilization=0.5,
        **ENGINE_ARGS,
    )
    system = prompt_source(SOTU, model, 0)[: job["system"]]
    found = texts(llm.get_tokenizer(), said, 1, job["texts"])
    samples = []
    for name, (text,) in found.items():
        for turn in range(job["turns"]):
            begins = turn * (job["user"] + job["answer"])
            asks = begins + job["user"]
            prompt, answer = system + text[:asks], text[asks:][: job["answer"]]
            sample = {"text": name, "turn": turn, "tokens": len(prompt)}
            order = [*WAYS] if turn % 2 else [*WAYS][::-1]
            for way in order:
                sample[way] = _take(llm, way, (name, turn), prompt, answer)
            samples.append(sample)
    return samples


def _take(
    llm: Any, way: str, which: tuple[str, int], prompt: list[int], answer: list[int]
) -> dict[str, float]:
    """Answer one turn in one way, which sees nothing of what the others have left."""
    salt = f"{way} {which if way == AGAIN else which[0]}"
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        sampling = forced(answer, record_path=str(record))
        sampling.extra_args["h2o"] = WAYS[way]
        asked = {"prompt_token_ids": prompt, "cache_salt": salt}
        start, first, blocks = time.perf_counter(), 0.0, 0
        llm.llm_engine.add_request(salt, asked, sampling)
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
            first = first or (time.perf_counter() - start if outputs else 0.0)
            blocks = _blocks_in_use(llm) or blocks
        logprobs = json.loads(record.read_text())["logprobs"]
    return {"ttft": first, "blocks": blocks, "loss": -statistics.mean(logprobs)}


def _blocks_in_use(llm: Any) -> int:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


if __name__ == "__main__":
    main()
