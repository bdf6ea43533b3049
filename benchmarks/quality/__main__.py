"""Quality under eviction: ours in the engine, the peers on the same work.

    make quality                          a small grid, about 20 minutes on two cores
    python -m benchmarks.quality --full   all of it (hours)
    python -m benchmarks.quality --texts FOLDER --context 8128 --output FILE
    python -m benchmarks.quality --questions 1024 2048 --output FILE

Appends to the CSV what is not in it yet, a row per measurement, and draws the
pictures. A cell that fails is reported and left out; the rest goes on. The third form
measures the loss over the .txt files of a folder, each a kind of its own, or with
--context alone over other lengths of the usual kinds; the fourth asks questions of
these lengths, RULER's if no `--tasks` are named; `--prompt-only` measures what
compresses a prompt once, and `--chunks` prompts that are read in chunks, in place of
all others. A row does not say which texts and which engine it is from, so give each
combination a FILE of its own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.quality.cells import (
    FULL,
    GENERATION,
    LOSS,
    RETRIEVAL,
    Cell,
    Rows,
    run_apart,
)
from benchmarks.quality.grid import OTHER_SCORED_TOKENS, fraction_of, grid, loss_only
from benchmarks.quality.ruler import LEAST_TOKENS
from benchmarks.quality.ruler import TASKS as RULER_TASKS
from benchmarks.quality.tasks import RECIPES
from benchmarks.report import append_rows
from benchmarks.smollm2 import ensure_model

FIELDS = (
    "policy,system,metric,budget_fraction,value,samples,context_tokens,model,seed,"
    "vllm_version,date"
).split(",")
QUALITY_CSV = Path("benchmarks/results/quality.csv")


def main() -> None:
    """Measure what the CSV lacks, then draw."""
    args = parse_args()
    path = Path(args.output)
    known = {key_of(row) for row in read(path)}
    folder = args.references or tempfile.mkdtemp(prefix="vllm_h2o_quality_")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for whole in chosen(list(grid(args, folder)), args.only):
        cell = unknown_part(whole, known)
        if done(cell, known):
            continue
        start = time.monotonic()
        try:
            rows = run_apart(cell)
        except subprocess.CalledProcessError:
            print(f"failed, and left out: {cell}", flush=True)
            continue
        append_rows(path, csv_rows(cell, rows), FIELDS)
        shown = ", ".join(f"{name} {value:.4f}" for name, value, _ in rows[:4])
        print(
            f"{cell.system} {cell.name} {cell.work} {cell.budget_tokens} tokens: "
            f"{shown} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    if path == QUALITY_CSV:
        from benchmarks.quality.plot import draw

        draw(path)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--model", default=None, help="a folder; SmolLM2-135M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", default="", help="a folder of .txt: their loss only")
    parser.add_argument("--context", type=int, help="tokens of a text: the loss only")
    parser.add_argument("--max-model-len", type=int, default=0, help="of the engine")
    parser.add_argument("--questions", type=int, nargs="+", help="lengths in tokens")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=(*RULER_TASKS, *RECIPES),
        help="of questions; RULER's",
    )
    parser.add_argument(
        "--prompt-only", action="store_true", help="what compresses a prompt once"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", help="`h2o`, in chunks of so many budgets"
    )
    parser.add_argument("--dtype", default="", help="of the model; float32")
    help_ = "of --texts and the like, 0.2 0.1; of --questions, 0.5 0.25 0.125"
    parser.add_argument("--budgets", type=float, nargs="+", help=help_)
    parser.add_argument("--output", help=f"a CSV; default, without them: {QUALITY_CSV}")
    parser.add_argument("--references", help="keep the full cache's outputs here")
    help_ = "recent shares of the budget, with --texts: these in place of all else"
    parser.add_argument("--recent", nargs="+", type=float, help=help_)
    parser.add_argument("--only", nargs="+", help="cells whose text has one of these")
    args = parser.parse_args(argv)
    args.model = args.model or str(ensure_model())
    if args.recent and (not loss_only(args) or args.prompt_only or args.chunks):
        parser.error("--recent goes with --texts, --context or --max-model-len alone")
    if args.budgets and not (loss_only(args) or args.questions):
        parser.error(
            "--budgets needs --texts, --context, --max-model-len or --questions"
        )
    apart = loss_only(args) or args.questions or args.prompt_only or args.chunks
    if apart and not args.output:
        parser.error(
            "--texts, --context, --max-model-len, --questions, --prompt-only and "
            "--chunks need an --output: their rows would read like those of the usual "
            "grid"
        )
    if args.context is not None and args.context <= OTHER_SCORED_TOKENS:
        parser.error(
            f"--context is {args.context}, but the last {OTHER_SCORED_TOKENS} tokens "
            "are scored: give more"
        )
    if args.questions and (loss_only(args) or args.full):
        parser.error("--questions has texts of its own: drop the other options")
    if args.dtype and not (loss_only(args) or args.questions):
        parser.error("--dtype needs --texts, --context, --max-model-len or --questions")
    if args.tasks and not args.questions:
        parser.error("--tasks are of questions: give --questions their lengths")
    args.tasks = args.tasks or list(RULER_TASKS)
    rulers = set(args.tasks) & set(RULER_TASKS)
    if args.questions and rulers and min(args.questions) < LEAST_TOKENS:
        parser.error(
            f"--questions has {min(args.questions)}: {', '.join(sorted(rulers))} need "
            f"{LEAST_TOKENS} or more"
        )
    if args.chunks and (args.questions or args.prompt_only or args.full):
        parser.error("--chunks has cells of its own: drop the other options")
    args.output = args.output or str(QUALITY_CSV)
    return args


def chosen(cells: list[Cell], only: list[str] | None) -> list[Cell]:
    """Cells whose text has one of `only`, and the full cache's that they refer to."""
    if not only:
        return cells
    asked = [cell for cell in cells if any(part in str(cell) for part in only)]
    works = {cell.work for cell in asked} - {RETRIEVAL}
    return [c for c in cells if c in asked or (c.policy == FULL and c.work in works)]


def read(path: Path) -> list[dict[str, str]]:
    """Rows of the CSV, none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def done(cell: Cell, known: set[tuple[str, ...]]) -> bool:
    """Whether the CSV has the cell's rows; what writes references runs again."""
    if cell.policy == FULL and cell.work != RETRIEVAL:
        name = "generated.json" if cell.work == GENERATION else "0.npy"
        if not (Path(cell.references) / name).exists():
            return False
    if cell.work == RETRIEVAL:
        return not unknown_part(cell, known).tasks
    first = {LOSS: "loss_nats", GENERATION: "repetition_rate"}[cell.work]
    return _has(cell, first, known)


def unknown_part(cell: Cell, known: set[tuple[str, ...]]) -> Cell:
    """The cell without the questions whose rows the CSV has."""
    if cell.work != RETRIEVAL:
        return cell
    asked = "known" if cell.question_known else "unknown"
    first = {
        task: f"{'ruler' if task in RULER_TASKS else 'exact_match'}_{task}_{asked}"
        for task in cell.tasks
    }
    return replace(
        cell, tasks=[task for task in first if not _has(cell, first[task], known)]
    )


def _has(cell: Cell, metric: str, known: set[tuple[str, ...]]) -> bool:
    (row,) = csv_rows(cell, [(metric, 0.0, cell.samples)])
    return key_of(row) in known


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """All of a CSV row but what was measured, and when."""
    varies = ("value", "vllm_version", "date")
    return tuple(str(row[name]) for name in FIELDS if name not in varies)


def csv_rows(cell: Cell, rows: Rows) -> list[dict[str, Any]]:
    """What a cell measured, as rows of the CSV."""
    common = {
        "policy": cell.name,
        "system": cell.system,
        "budget_fraction": fraction_of(cell),
        "context_tokens": cell.context_tokens,
        "model": Path(cell.model).name,
        "seed": cell.seed,
        "vllm_version": version("vllm"),
        "date": datetime.date.today().isoformat(),
    }
    return [
        common | {"metric": metric, "value": f"{value:.5f}", "samples": samples}
        for metric, value, samples in rows
    ]


if __name__ == "__main__":
    main()
