"""The quality CSV as the tables of docs/benchmarks/quality.md, in Markdown.

python -m benchmarks.quality.table
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

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


def retrieval_table(rows: Rows) -> str:
    """Exact matches of all questions, by system and task."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if not row["metric"].startswith("exact_match_") or "depth" in row["metric"]:
            continue
        task = row["metric"].removeprefix("exact_match_").replace("_", ", ")
        share = float(row["budget_fraction"])
        name = name_of(row) + ("" if share == 1 else f" {share:.0%}")
        count = round(float(row["value"]) * int(row["samples"]))
        task += f", {row['context_tokens']} tokens"
        found.setdefault(name, {})[task] = f"{count} of {row['samples']}"
    tasks = list(dict.fromkeys(task for cells in found.values() for task in cells))
    return _markdown(
        ["exact match", *tasks],
        ([name, *(cells.get(task, "") for task in tasks)]
         for name, cells in found.items()),
    )  # fmt: skip


def _markdown(head: list[str], body: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="benchmarks/results/quality.csv")
    with Path(parser.parse_args().csv).open(newline="") as file:
        rows = list(csv.DictReader(file))
    print(loss_table(rows), retrieval_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
