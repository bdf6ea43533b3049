"""Requests that arrive over time: `vllm bench serve` against both servers, in turns.

    python -m benchmarks.serve --request-rate 0.5 --budget 20%

A turn is `vllm serve`, stock or with H2O, in as many KV bytes, and vLLM's own
client: prompts of a chat with a shared system prompt (its `prefix_repetition`),
Poisson arrivals. What the client saves is kept as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.process import ENGINE_ENV
from benchmarks.report import ratios, summary, systems_table, write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import STOCK, Job
from benchmarks.workloads import Workload

READY_SECONDS = 300
_VLLM = str(Path(sys.executable).with_name("vllm"))


def main(argv: list[str] | None = None) -> None:
    """Let the servers take turns, print a table, write JSON."""
    args = parse_args(argv)
    samples: dict[str, list[dict[str, Any]]] = {STOCK: [], args.policy: []}
    for _ in range(args.rounds):
        for system in samples:
            samples[system].append(turn(system, args))
    systems = [
        {
            "label": system,
            "summary": summary(found),
            "ratios": ratios(found, samples[STOCK]),
            "samples": found,
        }
        for system, found in samples.items()
    ]
    print("\n".join(systems_table(systems)))
    write_json(args, systems=systems)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line; lengths in tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--request-rate", type=float, default=0.5, help="per second")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--prefix-len", type=int, default=512, help="shared")
    parser.add_argument("--suffix-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--pool-requests", type=int, default=4, help="full-length")
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2-135M")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", default="20%", help="tokens, or %% of the length")
    parser.add_argument("--rounds", type=int, default=2)
    default = Path("benchmarks/results/serve.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args(argv)


def turn(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One server and one client; returns what the client saved.

    Raises:
        RuntimeError: The client failed; the message ends with what both printed.
    """
    from benchmarks.vllm_system import pool_bytes

    model, port = str(args.model or ensure_model()), _free_port()
    workload = Workload("chat", args.prefix_len + args.suffix_len, args.output_len)
    # The client's tokenizer may read a prompt as a few tokens more.
    max_model_len = workload.max_model_len + 64
    block_size = ENGINE_ARGS["block_size"]
    blocks = args.pool_requests * -(-max_model_len // block_size)
    job = Job(system, model, [], max_model_len, blocks)
    options = ENGINE_ARGS | {"max_model_len": max_model_len}
    given = options | {"kv_cache_memory_bytes": pool_bytes(job, options)}
    if system != STOCK:
        budget = workload.budget_tokens(args.budget)
        given |= {"kv_policy": system, "h2o_budget": budget}
    server = [_VLLM, "serve", model, "--port", str(port), *_flags(given)]
    client = [_VLLM, "bench", "serve", "--port", str(port), "--model", model]
    client += _flags(
        {
            "dataset_name": "prefix_repetition",
            "prefix_repetition_prefix_len": args.prefix_len,
            "prefix_repetition_suffix_len": args.suffix_len,
            "prefix_repetition_num_prefixes": 1,
            "prefix_repetition_output_len": args.output_len,
            "num_prompts": args.num_prompts,
            "request_rate": args.request_rate,
            "ignore_eos": True,
            "temperature": 0,
            "ready_check_timeout_sec": READY_SECONDS,
            "metric_percentiles": "50,99",
            "save_result": True,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        client += ["--result-dir", folder, "--result-filename", "result.json"]
        env = ENGINE_ENV | os.environ
        log = Path(folder) / "server.log"
        with log.open("w") as file:
            process = subprocess.Popen(server, env=env, stdout=file, stderr=file)
        try:
            done = subprocess.run(client, env=env, capture_output=True, text=True)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(READY_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{done.stderr[-2000:]}\n{log.read_text()[-2000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    main()
