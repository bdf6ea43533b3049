"""Stock vLLM against H2O on the same requests, in as many KV bytes, in turns.

    make bench          or: python -m benchmarks.compare --quick
    python -m benchmarks.compare --workloads 512+1024 --budgets 20% --rounds 3
    python -m benchmarks.compare --workloads all --baselines stock transformers

Every turn is an engine in a process of its own; with `--together` all engines stay
up and a turn is one run of the workload. Prints a table per workload, writes a JSON
per workload and adds rows to `throughput.csv`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, run_cell
from benchmarks.live import LiveSystems
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import append_rows, rows, table
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import Job
from benchmarks.workloads import PAPER, WORKLOADS

RESULTS = Path("benchmarks/results")
QUICK = (
    Cell("128+1024", ("20%",), scale=0.2, num_prompts=8, pool_requests=2),
    Cell("short", scale=0.2, num_prompts=8, rounds=1),
)
"""What `--quick` runs, but for the options given."""

_GROUPS = {"all": tuple(WORKLOADS), "paper": PAPER}


def main(argv: list[str] | None = None) -> None:
    """Compare on every workload asked for."""
    args = parse_args(argv)
    if not args.model:
        ensure_model()
    for cell in cells_of(args):
        result = run(cell)
        path = save(result, cell, args.output_dir)
        print(table(result), f"written to {path}", sep="\n\n", flush=True)


def add_cell_args(parser: argparse.ArgumentParser) -> None:
    """Options of cells; those without a default are the workload's or `Cell`'s."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="small, in 5 minutes")
    which.add_argument(
        "--workloads",
        nargs="+",
        default=["paper"],
        help=f"all, paper, or of {', '.join(WORKLOADS)}",
    )
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument(
        "--budgets", nargs="+", help="tokens, or %% of the final length", **unset
    )
    parser.add_argument(
        "--share",
        action="store_true",
        help="budgets in %% are ours of each request's memory, as --h2o-budget",
        **unset,
    )
    parser.add_argument("--policies", nargs="*", help="ours, or kvpress", **unset)
    parser.add_argument("--baselines", nargs="+", help="stock, transformers", **unset)
    parser.add_argument(
        "--model", default="", help="SmolLM2-135M-Instruct if not given"
    )
    parser.add_argument("--dataset-name", choices=("sotu", "random"), **unset)
    parser.add_argument("--scale", type=float, help="of all lengths", **unset)
    parser.add_argument("--num-prompts", type=int, help="requests", **unset)
    parser.add_argument(
        "--pool-requests", type=int, help="full-length requests in the pool", **unset
    )
    parser.add_argument("--rounds", type=int, help="turns of each system", **unset)
    parser.add_argument("--repeats", type=int, help="samples per turn", **unset)
    parser.add_argument(
        "--engine-args", type=json.loads, help="vLLM's, as JSON, for all", **unset
    )
    parser.add_argument("--output-dir", type=Path, default=RESULTS)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_cell_args(parser)
    parser.add_argument("--tensor-parallel-size", type=int, default=argparse.SUPPRESS)
    parser.add_argument(
        "--together", action="store_true", help="engines stay up between their turns"
    )
    parser.add_argument(
        "--restart-every",
        type=int,
        help="turns after which the engines of --together start anew",
        default=argparse.SUPPRESS,
    )
    return parser.parse_args(argv)


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """One cell per workload, with all its budgets."""
    fields = {f.name for f in dataclasses.fields(Cell)}
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in fields
    }
    names = [n for name in args.workloads for n in _GROUPS.get(name, (name,))]
    cells = QUICK if args.quick else map(Cell, names)
    cells = [dataclasses.replace(cell, **options) for cell in cells]
    for cell in cells:
        cell.check()
    return cells


def run(cell: Cell) -> dict[str, Any]:
    """Let the systems of a cell take turns on this machine."""
    if not cell.together:
        return run_cell(cell, measure_in_process)
    env = engine_env(cell.tensor_parallel_size)
    with LiveSystems(env, cell.restart_every) as measure:
        return run_cell(cell, measure)


def measure_in_process(job: Job) -> list[dict[str, Any]]:
    """One turn."""
    env = engine_env(job.engine_args["tensor_parallel_size"])
    return run_in_process("benchmarks.systems:measure", dataclasses.asdict(job), env)


def result_path(cell: Cell, folder: Path) -> Path:
    """Where the result of a cell is."""
    return folder / "cells" / f"{cell.key()}.json"


def save(result: dict[str, Any], cell: Cell, folder: Path) -> Path:
    """Write the JSON of a cell and add its rows to the CSV."""
    path = result_path(cell, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    append_rows(folder / "throughput.csv", rows(result))
    return path


if __name__ == "__main__":
    main()
