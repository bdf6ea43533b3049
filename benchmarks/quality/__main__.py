"""Quality under eviction: ours in the engine, the peers on the same work.

    make quality                          a small grid, about 20 minutes on two cores
    python -m benchmarks.quality --full   all of it (hours)
    python -m benchmarks.quality --texts FOLDER --context 8128 --output FILE
    python -m benchmarks.quality --ruler 1024 2048 --output FILE

Appends to the CSV what is not in it yet, a row per measurement, and draws the
pictures. A cell that fails is reported and left out; the rest goes on. The third form
measures the loss over the .txt files of a folder, each a kind of its own, or with
--context alone over other lengths of the usual kinds; the fourth asks RULER's
questions of these lengths; `--prompt-only` measures what compresses a prompt once, and
`--chunks` prompts that are read in chunks, in place of all others. A row does not say
which texts and which engine it is from, so give each combination a FILE of its own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    PROMPT_ONLY,
    RETRIEVAL,
    TORCH,
    Cell,
    Rows,
    run_apart,
)
from benchmarks.quality.ruler import LEAST_TOKENS
from benchmarks.quality.ruler import TASKS as RULER_TASKS
from benchmarks.report import append_rows
from benchmarks.smollm2 import ensure_model

FIELDS = (
    "policy,system,metric,budget_fraction,value,samples,context_tokens,model,seed,"
    "vllm_version,date"
).split(",")
BUDGETS = (0.5, 0.2, 0.1, 0.05)
TEXT_TOKENS, QUESTION_TOKENS = 2560, 960
OTHER_BUDGETS, OTHER_SCORED_TOKENS = (0.2, 0.1), 512
QUALITY_CSV = Path("benchmarks/results/quality.csv")
LIST_TOKENS = 320
"""Of the tasks in which a 135M model loses its way in longer prompts."""

Variant = tuple[str, str, dict[str, Any]]
"""`(label, preset, options)`."""

H2O: Variant = ("h2o", "h2o", {})
UNIFORM: Variant = ("h2o uniform", "h2o", {"head_budgets": "uniform"})
OURS = [H2O, UNIFORM, ("h2o-paper", "h2o-paper", {}), ("streaming", "streaming", {})]
BY_ATTENTION = {"prompt_score": "attention"}
INT8: Variant = ("h2o int8", "h2o", {"resident_dtype": "int8"})
THEIR_TYPE = {"resident_dtype": "model"}
"""Of all variants that say nothing else: their budgets are shares of the tokens."""
ATTENTION: Variant = ("h2o prompt_score=attention", "h2o", BY_ATTENTION)
CAKE: Variant = ("cake", "cake", {})
READS_OR_MERGES: list[Variant] = [
    ("mpcache", "mpcache", {}),
    ("h2o read=20%", "h2o", {"read": "20%"} | BY_ATTENTION),
    ("d2o", "d2o", {}),
    ("d2o uniform", "d2o", {"head_budgets": "uniform"}),
    ("h2o merge=value", "h2o", {"merge": "value"} | BY_ATTENTION),
]
OURS_TOO: list[Variant] = [
    ("snapkv", "snapkv", {}),
    ("tova", "tova", {}),
    ATTENTION,
    CAKE,
    *READS_OR_MERGES,
    ("h2o block", "h2o", {"eviction_unit": "block", "head_budgets": "uniform"}),
]
LEVERS: list[Variant] = [
    (f"h2o {name}={value}", "h2o", {name: value} | BY_ATTENTION)
    for name, value in (
        ("sinks", 0),
        ("recent_ratio", 0.5),
        ("score", "sum"),
        ("score", "norm"),
        ("observation_window", "all"),
        ("observation_window", 64),
        ("pooling", 1),
    )
]
"""What the preset sets where prompts go by attention, one at a time set otherwise."""
PRESSES = ["tova", "observed_attention", "snapkv", "streaming_llm"]
PRESSES_TOO = ["expected_attention", "keydiff", "random"]
PROMPT_PRESSES = [
    "kvzip",
    "kvzip_plus",
    "kvgrad",
    "kvzap",
    "lukv",
    "adakv_snapkv",
    "adakv_expected_attention",
    "adakv_compactor",
    "critical_adakv_snapkv",
    "tova",
    "snapkv",
]
"""Methods of `prompt_only`."""
RULER_BUDGETS = (0.5, 0.25, 0.125)
SHARED = ["32-head-sum", "32-layer-sum", "32-model-sum", "32-model-random"]


def main() -> None:
    """Measure what the CSV lacks, then draw."""
    args = parse_args()
    path = Path(args.output)
    known = {key_of(row) for row in read(path)}
    folder = args.references or tempfile.mkdtemp(prefix="vllm_h2o_quality_")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for cell in chosen(list(grid(args, folder)), args.only):
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
    parser.add_argument("--ruler", type=int, nargs="+", help="lengths in tokens")
    parser.add_argument("--tasks", nargs="+", choices=RULER_TASKS, help="of RULER's")
    parser.add_argument(
        "--prompt-only", action="store_true", help="what compresses a prompt once"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", help="`h2o`, in chunks of so many budgets"
    )
    parser.add_argument("--dtype", default="", help="of the engine's model")
    parser.add_argument(
        "--budgets", type=float, nargs="+", help="with these three; default: 0.2 0.1"
    )
    parser.add_argument("--output", help=f"a CSV; default, without them: {QUALITY_CSV}")
    parser.add_argument("--references", help="keep the full cache's outputs here")
    help_ = "recent shares of the budget, with --texts: these in place of all else"
    parser.add_argument("--recent", nargs="+", type=float, help=help_)
    parser.add_argument("--only", nargs="+", help="cells whose text has one of these")
    args = parser.parse_args(argv)
    args.model = args.model or str(ensure_model())
    if args.recent and (not _loss_only(args) or args.prompt_only or args.chunks):
        parser.error("--recent goes with --texts, --context or --max-model-len alone")
    if args.budgets and not _loss_only(args):
        parser.error("--budgets needs --texts, --context or --max-model-len")
    apart = _loss_only(args) or args.ruler or args.prompt_only or args.chunks
    if apart and not args.output:
        parser.error(
            "--texts, --context, --max-model-len, --ruler, --prompt-only and --chunks "
            "need an --output: their rows would read like those of the usual grid"
        )
    if args.context is not None and args.context <= OTHER_SCORED_TOKENS:
        parser.error(
            f"--context is {args.context}, but the last {OTHER_SCORED_TOKENS} tokens "
            "are scored: give more"
        )
    if args.ruler and (_loss_only(args) or args.full or args.dtype):
        parser.error("--ruler has lengths and texts of its own: drop the other options")
    if args.ruler and min(args.ruler) < LEAST_TOKENS:
        parser.error(f"--ruler has {min(args.ruler)}: use {LEAST_TOKENS} or more")
    if args.chunks and (args.ruler or args.prompt_only or args.full):
        parser.error("--chunks has cells of its own: drop the other options")
    if args.tasks and not args.ruler:
        parser.error("--tasks are RULER's: give --ruler its lengths")
    if args.prompt_only and args.dtype:
        parser.error("--prompt-only is in float32: drop --dtype")
    args.output = args.output or str(QUALITY_CSV)
    return args


def _loss_only(args: argparse.Namespace) -> bool:
    return bool(args.texts or args.context or args.max_model_len)


def chosen(cells: list[Cell], only: list[str] | None) -> list[Cell]:
    """Cells whose text has one of `only`, and the full cache's that they refer to."""
    if not only:
        return cells
    asked = [cell for cell in cells if any(part in str(cell) for part in only)]
    works = {cell.work for cell in asked} - {RETRIEVAL}
    return [c for c in cells if c in asked or (c.policy == FULL and c.work in works)]


def grid(args: argparse.Namespace, folder: str) -> Iterator[Cell]:
    """The cells; the full cache first, which writes the references."""
    base = {"model": args.model, "seed": args.seed, "references": folder}
    if args.ruler:
        yield from _ruler(args, base)
        return
    if _loss_only(args):
        yield from _other_losses(args, base)
        return
    if args.prompt_only or args.chunks:
        for known in (True, False):
            asked = {"work": RETRIEVAL, "context_tokens": QUESTION_TOKENS}
            asked |= base | {"question_known": known}
            yield from (
                _chunked(args.chunks, 0.2, asked)
                if args.chunks
                else _prompt_only(0.2, asked)
            )
        return
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
    if not full:
        yield from _ours(OURS, 0.2, work)
        yield from _ours(OURS[:2], 0.1, work)
        yield from _peers(PRESSES[:1], 0.2, work)
        return
    for fraction in BUDGETS:
        yield from _ours(OURS + OURS_TOO, fraction, work)
    for fraction in BUDGETS[2:]:
        yield from _ours(LEVERS, fraction, work)
    for fraction in BUDGETS:
        yield from _peers(PRESSES + PRESSES_TOO, fraction, work)
        budget = tokens_of(fraction, TEXT_TOKENS)
        yield Cell(TORCH, "cake", budget_tokens=budget, **work)
        for policy in SHARED:
            yield Cell(BLOCKS, policy, budget_tokens=budget, **work)


def _other_losses(args: argparse.Namespace, base: dict) -> Iterator[Cell]:
    work = base | {
        "work": LOSS,
        "context_tokens": args.context or TEXT_TOKENS,
        "scored_tokens": OTHER_SCORED_TOKENS,
        "texts": args.texts,
        "max_model_len": args.max_model_len,
        "dtype": args.dtype,
    }
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in args.budgets or OTHER_BUDGETS:
        if args.prompt_only:
            yield from _prompt_only(fraction, work)
            continue
        if args.chunks:
            yield from _chunked(args.chunks, fraction, work)
            continue
        if args.recent:
            variants: list[Variant] = [
                (f"h2o recent_ratio={ratio:g}", "h2o", {"recent_ratio": ratio})
                for ratio in args.recent
            ]
            yield from _ours(variants, fraction, work)
            continue
        as_users = {"budget": f"{100 * fraction:g}%", "resident_dtype": "auto"}
        share: Variant = ("h2o share", "h2o", as_users)
        yield from _ours(
            [H2O, share, INT8, ATTENTION, UNIFORM, CAKE, *READS_OR_MERGES],
            fraction,
            work,
        )
        yield from _peers(PRESSES, fraction, work)
        budget = tokens_of(fraction, work["context_tokens"])
        yield Cell(TORCH, "cake", budget_tokens=budget, **work)


def _prompt_only(fraction: float, work: dict) -> Iterator[Cell]:
    """Cells of what compresses a prompt once, ours in the same form."""
    ours = _ours([H2O, ATTENTION, UNIFORM], fraction, work)
    yield from (replace(cell, system=PROMPT_ONLY) for cell in ours)
    peers = _peers(PROMPT_PRESSES, fraction, work)
    yield from (replace(cell, system=PROMPT_ONLY) for cell in peers)


def _chunked(chunks: list[int], fraction: float, work: dict) -> Iterator[Cell]:
    """Cells of prompts that are read whole, and in chunks of so many budgets."""
    budget = tokens_of(fraction, work["context_tokens"])
    variants: list[Variant] = [H2O]
    for count in chunks:
        options = {"prefill_chunk": count * budget}
        variants.append((f"h2o in chunks of {count} budgets", "h2o", options))
    yield from _ours(variants, fraction, work)


def _ruler(args: argparse.Namespace, base: dict) -> Iterator[Cell]:
    """RULER's questions, known or asked later: the full cache answers alike."""
    for length in args.ruler:
        for task in args.tasks or RULER_TASKS:
            work = base | {
                "work": RETRIEVAL,
                "context_tokens": length,
                "tasks": [task],
                # Besides the chat template, whose tokens RULER does not count.
                "max_model_len": length + 256,
            }
            yield Cell(ENGINE, FULL, budget_tokens=0, **work)
            for known in (True, False):
                asked = work | {"question_known": known}
                for fraction in RULER_BUDGETS:
                    if args.prompt_only:
                        yield from _prompt_only(fraction, asked)
                        continue
                    yield from _ours([H2O, ATTENTION, UNIFORM], fraction, asked)
                    yield from _peers(PRESSES, fraction, asked)


def _retrievals(full: bool, base: dict) -> Iterator[Cell]:
    work = base | {"work": RETRIEVAL, "context_tokens": QUESTION_TOKENS}
    if not full:
        work |= {"per_depth": 2}
    asked_later = work | {"question_known": False}
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    yield from _ours([*OURS[:2], INT8], 0.2, work)
    yield from _ours([H2O, INT8], 0.2, asked_later)
    if not full:
        return
    lists = work | {"context_tokens": LIST_TOKENS, "tasks": ["keyvalue", "counting"]}
    for asked in (asked_later, lists):
        yield Cell(ENGINE, FULL, budget_tokens=0, **asked)
    yield from _ours(OURS[:2], 0.2, lists)
    yield from _ours(OURS[2:] + OURS_TOO + LEVERS, 0.2, work)
    yield from _peers(PRESSES + PRESSES_TOO, 0.2, work)
    yield from _peers(PRESSES + PRESSES_TOO, 0.2, lists)
    budget = tokens_of(0.2, QUESTION_TOKENS)
    for asked in (work, asked_later):
        yield Cell(TORCH, "cake", budget_tokens=budget, **asked)
    yield from _ours([H2O], 0.5, asked_later)
    yield from _ours([ATTENTION, UNIFORM], 0.2, asked_later)
    yield from _peers(PRESSES, 0.2, asked_later)
    for fraction in (0.5, 0.1):
        yield from _ours(OURS, fraction, work)
        yield from _peers(PRESSES, fraction, work)


def _generations(base: dict) -> Iterator[Cell]:
    work = base | {"work": GENERATION, "context_tokens": 1024, "scored_tokens": 512}
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in (0.5, 0.2):
        yield from _ours(OURS, fraction, work)


def _ours(variants: list[Variant], fraction: float, work: dict) -> Iterator[Cell]:
    budget = tokens_of(fraction, work["context_tokens"])
    for label, preset, options in variants:
        yield Cell(
            ENGINE, preset, budget_tokens=budget, label=label,
            options=THEIR_TYPE | options, **work,
        )  # fmt: skip


def _peers(presses: list[str], fraction: float, work: dict) -> Iterator[Cell]:
    budget = tokens_of(fraction, work["context_tokens"])
    for press in presses:
        yield Cell(KVPRESS, press, budget_tokens=budget, **work)


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
    """Whether the CSV has the cell's first row; what writes references runs again."""
    if cell.policy == FULL and cell.work != RETRIEVAL:
        name = "generated.json" if cell.work == GENERATION else "0.npy"
        if not (Path(cell.references) / name).exists():
            return False
    first = {LOSS: "loss_nats", GENERATION: "repetition_rate"}.get(cell.work)
    if first is None:
        asked = "known" if cell.question_known else "unknown"
        kind = "ruler" if cell.tasks[0] in RULER_TASKS else "exact_match"
        first = f"{kind}_{cell.tasks[0]}_{asked}"
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
