"""The quality CSV as the tables of docs/benchmarks/quality.md, in Markdown.

    python -m benchmarks.quality.table
    python -m benchmarks.quality.table --csv FILE --intervals

Intervals are of 95 %, by drawing the texts, or questions, again and again.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.quality.plot import loss_deltas, name_of

Rows = list[dict[str, str]]


def loss_table(rows: Rows) -> str:
    """Loss over the full cache by system and budget; sorted where most have a row."""
    lines = loss_deltas(rows)
    measured = Counter(x for points in lines.values() for x, _ in points)
    ((common, _),) = measured.most_common(1)
    budgets = sorted(measured, reverse=True)

    def loss(line: tuple[str, list[tuple[float, float]]]) -> float:
        return dict(line[1]).get(common, math.inf)

    return _markdown(
        ["nats per token over the full cache", *(f"{x:.0%}" for x in budgets)],
        (
            [name, *(f"{dict(points)[x]:+.3f}" if x in dict(points) else ""
                     for x in budgets)]
            for name, points in sorted(lines.items(), key=loss)
        ),
    )  # fmt: skip


def retrieval_table(rows: Rows, intervals: bool = False) -> str:
    """Exact matches of all questions, by system and task; with intervals, if asked."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if not row["metric"].startswith("exact_match_") or "depth" in row["metric"]:
            continue
        task = row["metric"].removeprefix("exact_match_").replace("_", ", ")
        share = float(row["budget_fraction"])
        name = name_of(row) + ("" if share == 1 else f" {share:.0%}")
        count = round(float(row["value"]) * int(row["samples"]))
        task += f", {row['context_tokens']} tokens"
        samples = int(row["samples"])
        shown = f"{count} of {samples}"
        if intervals:
            low, high = interval([1.0] * count + [0.0] * (samples - count))
            shown += f" [{low * samples:.0f}, {high * samples:.0f}]"
        found.setdefault(name, {})[task] = shown
    tasks = list(dict.fromkeys(task for cells in found.values() for task in cells))
    return _markdown(
        ["exact match", *tasks],
        ([name, *(cells.get(task, "") for task in tasks)]
         for name, cells in found.items()),
    )  # fmt: skip


def ruler_table(rows: Rows) -> str:
    """Answers of RULER's tasks in per cent, by system, task, length and budget."""
    samples = "0"
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if not row["metric"].startswith("ruler_") or "tokens" in row["metric"]:
            continue
        task, _, known = row["metric"].removeprefix("ruler_").rpartition("_")
        samples = row["samples"]
        when = {"known": "", "unknown": ", asked later"}[known]
        column = f"{task} {row['context_tokens']}{when}"
        column += f", {float(row['budget_fraction']):.1%}"
        found.setdefault(name_of(row), {})[column] = f"{float(row['value']):.0%}"
    columns = list(
        dict.fromkeys(column for cells in found.values() for column in cells)
    )
    return _markdown(
        [f"of {samples} questions each", *columns],
        ([name, *(cells.get(x, "") for x in columns)] for name, cells in found.items()),
    )


def interval_table(rows: Rows) -> str:
    """Loss over the full cache with an interval over its texts, by system and budget.

    Texts of one kind are one: a row of each kind is looked for.
    """
    found: dict[str, dict[float, str]] = {}
    for row in rows:
        metric, _, kind = row["metric"].partition("loss_delta_nats")
        if metric or kind:
            continue
        varies = ("metric", "value", "samples", "date", "vllm_version")
        same = [name for name in row if name not in varies]
        kinds = [
            float(other["value"])
            for other in rows
            if other["metric"].startswith("loss_delta_nats_")
            and all(other[name] == row[name] for name in same)
        ]
        shown = f"{float(row['value']):+.3f}"
        if len(kinds) > 1:
            shown += " [{:.3f}, {:.3f}]".format(*interval(kinds))
        found.setdefault(name_of(row), {})[float(row["budget_fraction"])] = shown
    budgets = sorted({x for cells in found.values() for x in cells}, reverse=True)
    return _markdown(
        ["nats per token over the full cache", *(f"{x:.1%}" for x in budgets)],
        ([name, *(cells.get(x, "") for x in budgets)] for name, cells in found.items()),
    )


def divergence_table(rows: Rows) -> str:
    """KL divergence from the full cache, in nats per token, first choices that are
    alike, and loss over the full cache, by model, system and budget."""
    metrics = {
        "kl_nats": "{:.4f}",
        "top1_agreement": "{:.1%}",
        "loss_delta_nats": "{:+.3f}",
    }
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if shape := metrics.get(row["metric"]):
            budgets = found.setdefault(f"{row['model']}, {name_of(row)}", {})
            cell = budgets.setdefault(row["budget_fraction"], {})
            cell[row["metric"]] = shape.format(float(row["value"]))
    budgets = sorted({x for cells in found.values() for x in cells}, reverse=True)
    return _markdown(
        ["KL, first choices, loss", *(f"{float(x):.1%}" for x in budgets)],
        (
            [name, *(", ".join(cells.get(x, {}).get(m, "") for m in metrics).strip(", ")
                     for x in budgets)]
            for name, cells in found.items()
        ),
    )  # fmt: skip


def interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """An interval of 95 % for the mean of what was measured, by bootstrap."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(values), (draws, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def _markdown(head: list[str], body: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="benchmarks/results/quality.csv")
    parser.add_argument("--intervals", action="store_true", help="of 95 %%")
    args = parser.parse_args()
    with Path(args.csv).open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables: dict[str, Callable[[Rows], str]] = {
        "loss_delta": interval_table if args.intervals else loss_table,
        "kl_nats": divergence_table,
        "exact_match": partial(retrieval_table, intervals=args.intervals),
        "ruler": ruler_table,
    }
    for measured, table in tables.items():
        if any(row["metric"].startswith(measured) for row in rows):
            print(table(rows), end="\n\n")


if __name__ == "__main__":
    main()
