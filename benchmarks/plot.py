"""Pictures out of the results of `benchmarks.compare` and `benchmarks.ray_sweep`.

    python -m benchmarks.plot --results benchmarks/results --output-dir docs

Throughput over budget, TPOT over context length, concurrency at equal memory; each
only if there are results for it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks.systems import STOCK  # noqa: E402

Point = tuple[float, dict[str, float]]
"""An x, and the spread at it."""

_GROWTH = "growth-"
_TIMES = (_GROWTH, "prompt-", "cached-", "decode-")
"""Workloads of a single step's time: what they say of tokens/s means nothing."""


def main(argv: list[str] | None = None) -> None:
    """Draw what the results hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--output-dir", type=Path, default=Path("docs"))
    args = parser.parse_args(argv)
    results = load(args.results)
    if not results:
        raise SystemExit(f"no results in {args.results}: run benchmarks.compare first")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(results)
        if figure is not None:
            path = args.output_dir / f"{name}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            plt.close(figure)
            print(f"written to {path}")


def load(folder: Path) -> list[dict[str, Any]]:
    """Results of cells, but for failed ones."""
    paths = sorted((folder / "cells").glob("*.json"))
    done = (path for path in paths if not path.name.endswith(".failed.json"))
    return [json.loads(path.read_text()) for path in done]


def throughput_over_budget(results: list[dict[str, Any]]) -> Any:
    """Output tokens/s over stock's, by budget; a line per workload and policy."""
    lines: dict[str, list[Point]] = defaultdict(list)
    for result, system in _ours(result for result in results if not _of_times(result)):
        ratio = system["ratios"]["ratio_output_tokens_per_s"]
        lines[_name(result, system)].append((100 * system["budget_fraction"], ratio))
    figure = _lines(
        lines, "budget, % of the final length", "output tokens/s over stock"
    )
    if figure is not None:
        figure.gca().axhline(1, color="gray", linestyle="--", label=STOCK)
        figure.gca().legend()
    return figure


def tpot_over_context(results: list[dict[str, Any]]) -> Any:
    """Median time between two tokens by final context length, of every system."""
    lines: dict[str, list[Point]] = defaultdict(list)
    for result in filter(_grows, results):
        context = result["workload"]["input_len"] + result["workload"]["output_len"]
        for system in result["systems"]:
            # Without the prompts that are read in between.
            tpot = system["summary"]["median_itl_ms"]
            lines[_with_ranks(result, system["label"])].append((context, tpot))
    return _lines(lines, "context, tokens", "time between tokens, ms (median)")


def concurrency_at_equal_memory(results: list[dict[str, Any]]) -> Any:
    """Requests running at once, mean of the steps; bars grouped by workload."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for result in results:
        if not _of_times(result):
            for system in result["systems"]:
                reached = system["summary"]["mean_running_requests"]["median"]
                groups[_with_ranks(result, _workload(result))][system["label"]] = (
                    reached
                )
    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    if not groups:
        return None
    figure, axes = plt.subplots()
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        at = [g + i * width for g, bars in enumerate(groups.values()) if label in bars]
        heights = [bars[label] for bars in groups.values() if label in bars]
        axes.bar(at, heights, width, label=label)
    middle = width * (len(labels) - 1) / 2
    axes.set_xticks([g + middle for g in range(len(groups))], list(groups), rotation=20)
    axes.set_ylabel("requests running at once, same KV bytes")
    axes.margins(y=0.2)  # room for the legend
    axes.legend(ncols=len(labels), loc="upper center")
    return figure


PICTURES = {
    "throughput_over_budget": throughput_over_budget,
    "tpot_over_context": tpot_over_context,
    "concurrency_at_equal_memory": concurrency_at_equal_memory,
}


def _ours(results: Iterable[dict[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """Every result with each of its systems that has a budget."""
    for result in results:
        for system in result["systems"]:
            if system["budget_fraction"] is not None:
                yield result, system


def _grows(result: dict[str, Any]) -> bool:
    return result["workload"]["name"].startswith(_GROWTH)


def _of_times(result: dict[str, Any]) -> bool:
    return result["workload"]["name"].startswith(_TIMES)


def _workload(result: dict[str, Any]) -> str:
    scale = f" x{result['scale']:g}" if result["scale"] != 1 else ""
    eager = result["engine_args"].get("enforce_eager")
    return result["workload"]["name"] + scale + ("" if eager else " compiled")


def _with_ranks(result: dict[str, Any], name: str) -> str:
    ranks = result["tensor_parallel_size"]
    return name if ranks == 1 else f"{name} TP={ranks}"


def _name(result: dict[str, Any], system: dict[str, Any]) -> str:
    return _with_ranks(result, f"{_workload(result)} {system['system']}")


def _lines(lines: dict[str, list[Point]], xlabel: str, ylabel: str) -> Any:
    """A line per name, through medians, with bars from lowest to highest."""
    if not lines:
        return None
    figure, axes = plt.subplots()
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        medians = [spread["median"] for _, spread in points]
        below = [s["median"] - s["min"] for _, s in points]
        above = [s["max"] - s["median"] for _, s in points]
        x = [at for at, _ in points]
        axes.errorbar(x, medians, (below, above), marker="o", capsize=3, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
