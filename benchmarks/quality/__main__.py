"""Quality under eviction: ours in the engine, the peers on the same work.

    make quality                          a small grid, about 20 minutes on two cores
    python -m benchmarks.quality --full   all of it (hours)

Appends to the CSV what is not in it yet, a row per measurement, and draws the
pictures. A cell that fails is reported and left out; the rest goes on.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.quality.cells import (
    BLOCK_SIZE,
    BLOCKS,
    ENGINE,
    FULL,
    GENERATION,
    KVPRESS,
    LOSS,
    RETRIEVAL,
    Cell,
    Rows,
    run_apart,
)
from benchmarks.report import append_rows
from benchmarks.smollm2 import ensure_model

FIELDS = (
    "policy,system,metric,budget_fraction,value,samples,context_tokens,model,seed,"
    "vllm_version,date"
).split(",")
BUDGETS = (0.5, 0.2, 0.1, 0.05)
TEXT_TOKENS, QUESTION_TOKENS = 2560, 960

UNIFORM = ("h2o uniform", "h2o", {"head_budgets": "uniform"})
OURS = [
    ("h2o", "h2o", {}),
    UNIFORM,
    ("h2o-paper", "h2o-paper", {}),
    ("streaming", "streaming", {}),
]
OURS_TOO = [
    ("snapkv", "snapkv", {}),
    ("tova", "tova", {}),
    ("h2o block", "h2o", {"eviction_unit": "block"}),
]
"""`(label, preset, options)`."""
PRESSES = ["tova", "observed_attention", "snapkv", "streaming_llm"]
PRESSES_TOO = ["expected_attention", "keydiff", "random"]
SHARED = ["32-head-sum", "32-layer-sum", "32-model-sum", "32-model-random"]


def main() -> None:
    """Measure what the CSV lacks, then draw."""
    args = parse_args()
    path = Path(args.output)
    known = {key_of(row) for row in read(path)}
    folder = args.references or tempfile.mkdtemp(prefix="vllm_h2o_quality_")
    for cell in grid(args, folder):
        if args.only and not any(part in str(cell) for part in args.only):
            continue
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
    from benchmarks.quality.plot import draw

    draw(path)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--model", default=None, help="a folder; SmolLM2-135M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="benchmarks/results/quality.csv")
    parser.add_argument("--references", help="keep the full cache's outputs here")
    parser.add_argument("--only", nargs="+", help="cells whose text has one of these")
    args = parser.parse_args()
    args.model = args.model or str(ensure_model())
    return args


def grid(args: argparse.Namespace, folder: str) -> Iterator[Cell]:
    """The cells; the full cache first, which writes the references."""
    base = {"model": args.model, "seed": args.seed, "references": folder}
    yield from _losses(args.full, base)
    yield from _retrievals(args.full, base)
    if args.full:
        yield from _generations(base)


def _losses(full: bool, base: dict) -> Iterator[Cell]:
    work = base | {
        "work": LOSS,
        "context_tokens": TEXT_TOKENS,
        "scored_tokens": 1024 if full else 256,
    }
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in BUDGETS if full else BUDGETS[1:3]:
        budget = tokens_of(fraction, TEXT_TOKENS)
        for label, preset, options in OURS + (OURS_TOO if full else []):
            yield Cell(
                ENGINE, preset, budget_tokens=budget, label=label, options=options,
                **work,
            )  # fmt: skip
    for fraction in (0.2, 0.1, 0.05, 0.5) if full else (0.2,):
        budget = tokens_of(fraction, TEXT_TOKENS)
        for press in PRESSES + PRESSES_TOO if full else PRESSES[:1]:
            yield Cell(KVPRESS, press, budget_tokens=budget, **work)
        for policy in SHARED if full else []:
            yield Cell(BLOCKS, policy, budget_tokens=budget, **work)


def _retrievals(full: bool, base: dict) -> Iterator[Cell]:
    work = base | {"work": RETRIEVAL, "context_tokens": QUESTION_TOKENS}
    budgets = (0.5, 0.2, 0.1) if full else (0.2,)
    for known in (True, False):
        asked = work | {"question_known": known}
        yield Cell(ENGINE, FULL, budget_tokens=0, **asked)
        for fraction in budgets:
            budget = tokens_of(fraction, QUESTION_TOKENS)
            for label, preset, options in OURS + (OURS_TOO if full else []):
                if full or known or label == "h2o":
                    yield Cell(
                        ENGINE, preset, budget_tokens=budget, label=label,
                        options=options, **asked,
                    )  # fmt: skip
    if full:
        for press in PRESSES + PRESSES_TOO:
            budget = tokens_of(0.2, QUESTION_TOKENS)
            yield Cell(KVPRESS, press, budget_tokens=budget, **work)


def _generations(base: dict) -> Iterator[Cell]:
    work = base | {"work": GENERATION, "context_tokens": 1024, "scored_tokens": 512}
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in (0.5, 0.2):
        for label, preset, options in OURS:
            yield Cell(
                ENGINE, preset, budget_tokens=tokens_of(fraction, 1024), label=label,
                options=options, **work,
            )  # fmt: skip


def tokens_of(fraction: float, context_tokens: int) -> int:
    """Budget in whole blocks, exact for the lengths used here but 5 and 10 % of 960."""
    return round(fraction * context_tokens / BLOCK_SIZE) * BLOCK_SIZE


def fraction_of(cell: Cell) -> str:
    """The budget over the context, 1 for the full cache."""
    return f"{cell.budget_tokens / cell.context_tokens or 1.0:.4f}"


def read(path: Path) -> list[dict[str, str]]:
    """Rows of the CSV, none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def done(cell: Cell, known: set[tuple[str, ...]]) -> bool:
    """Whether the CSV has the cell; what writes references runs again."""
    if cell.policy == FULL and cell.work != RETRIEVAL:
        name = "generated.json" if cell.work == GENERATION else "0.npy"
        if not (Path(cell.references) / name).exists():
            return False
    first = {LOSS: "loss_nats", GENERATION: "repetition_rate"}.get(cell.work)
    if first is None:
        asked = "known" if cell.question_known else "unknown"
        first = f"exact_match_{cell.tasks[0]}_{asked}"
    (row,) = csv_rows(cell, [(first, 0.0, cell.samples)])
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
