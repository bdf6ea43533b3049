"""Pictures out of the results of `benchmarks.compare` and `benchmarks.ray_sweep`.

    python -m benchmarks.plot --results benchmarks/results --output-dir docs/pictures

Time between tokens over context length; requests at once and tokens/s in equal memory.
Each only if there are results for it.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks.pictures import FOLDER, HEIGHT, WIDTH, color_of, name_ends  # noqa: E402

Point = tuple[float, dict[str, float]]
"""An x, and the spread at it."""
Groups = dict[str, dict[str, float]]
"""Heights of bars by group and label."""

_GROWTH = "growth-"
_TIMES = (_GROWTH, "prompt-", "cached-", "decode-")
"""Workloads of a single step's time: what they say of tokens/s means nothing."""
_QUALITY = Path(__file__).parent / "results" / "quality-models-2.csv"
_HELD = {"h2o": ("h2o int8", 1.75), "h2o-model": ("h2o", 1.0)}
"""Whose divergence is that of a system, and tokens held over tokens of the memory, in
bfloat16 with heads of 64."""


def main(argv: list[str] | None = None) -> None:
    """Draw what the results hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--output-dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    results = load(args.results)
    if not results:
        raise SystemExit(f"no results in {args.results}: run benchmarks.compare first")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(results)
        if figure is not None:
            path = args.output_dir / f"{name}.png"
            figure.savefig(path, dpi=110, bbox_inches="tight")
            plt.close(figure)
            print(f"written to {path}")


def load(folder: Path) -> list[dict[str, Any]]:
    """Results of cells, but for failed ones."""
    paths = sorted((folder / "cells").glob("*.json"))
    done = (path for path in paths if not path.name.endswith(".failed.json"))
    return [json.loads(path.read_text()) for path in done]


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


def equal_memory(results: list[dict[str, Any]]) -> Any:
    """Requests at once and tokens/s in as many KV bytes; bars grouped by workload."""
    results = [r for r in results if not _of_times(r) and _evicts(r)]
    results = [r for r in results if not r.get("share")]
    if not results:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(1.5 * WIDTH, HEIGHT))
    running: Groups = defaultdict(dict)
    tokens: Groups = defaultdict(dict)
    for result in results:
        group = _with_ranks(result, _workload(result))
        for system in result["systems"]:
            label = system["label"]
            spread = system["summary"]["mean_running_requests"]
            running[group][label] = spread["median"]
            ratio = (system["ratios"] or {}).get("ratio_output_tokens_per_s")
            tokens[group][label] = ratio["median"] if ratio else 1.0
    _bars(panels[0], running, "requests running at once, mean")
    _bars(panels[1], tokens, "output tokens/s, over stock's")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="upper center")
    return figure


def _bars(axes: Any, groups: Groups, ylabel: str) -> None:
    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        at = [g + i * width for g, bars in enumerate(groups.values()) if label in bars]
        heights = [bars[label] for bars in groups.values() if label in bars]
        axes.bar(at, heights, width, label=label, color=color_of(label))
    middle = width * (len(labels) - 1) / 2
    ticks = [g + middle for g in range(len(groups))]
    axes.set_xticks(ticks, [name.replace(" ", "\n") for name in groups])
    axes.set_xlabel("tokens of prompt + answer")
    axes.set_ylabel(ylabel)


def quality_over_speed(results: list[dict[str, Any]]) -> Any:
    """Divergence from the full cache over tokens/s in as many KV bytes, of shares."""
    found = [result for result in results if result.get("share")]
    points = {
        f"{_workload(result)} {system['label']}": (
            system["ratios"]["ratio_output_tokens_per_s"]["median"],
            divergence,
        )
        for result in found
        for system in result["systems"]
        if (divergence := _divergence(result["model_id"], system)) is not None
    }
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
    for label, at in points.items():
        name = label.partition(" ")[2]
        axes.plot(*at, "o", color=color_of(name))
        axes.annotate(name, at, (6, 6), textcoords="offset points")
    axes.set_xlabel("output tokens/s in as much KV memory, over stock's")
    axes.set_ylabel("KL divergence from the full cache, nats per token")
    axes.margins(0.2)
    axes.grid(alpha=0.3)
    return figure


def _divergence(model: str, system: dict[str, Any]) -> float | None:
    """That of the share of the tokens that a share of the memory holds, if it is
    known."""
    if system["budget_fraction"] is None:
        return 0.0
    policy, per_token = _HELD.get(system["system"], ("", 0.0))
    share = per_token * system["budget_fraction"]
    with _QUALITY.open(newline="") as file:
        for row in csv.DictReader(file):
            same = (row["policy"], row["metric"]) == (policy, "kl_nats")
            same &= row["model"] == Path(model).name.lower()
            if same and abs(float(row["budget_fraction"]) - share) < 0.005:
                return float(row["value"])
    return None


PICTURES = {
    "tpot_over_context": tpot_over_context,
    "equal_memory": equal_memory,
    "quality_over_speed": quality_over_speed,
}


def _grows(result: dict[str, Any]) -> bool:
    return result["workload"]["name"].startswith(_GROWTH)


def _evicts(result: dict[str, Any]) -> bool:
    budgets = [system["budget_fraction"] for system in result["systems"]]
    return any(budget is not None and budget < 1 for budget in budgets)


def _of_times(result: dict[str, Any]) -> bool:
    return result["workload"]["name"].startswith(_TIMES)


def _workload(result: dict[str, Any]) -> str:
    scale = f" x{result['scale']:g}" if result["scale"] != 1 else ""
    eager = result["engine_args"].get("enforce_eager")
    return result["workload"]["name"] + scale + ("" if eager else " compiled")


def _with_ranks(result: dict[str, Any], name: str) -> str:
    ranks = result["tensor_parallel_size"]
    return name if ranks == 1 else f"{name} TP={ranks}"


def _lines(lines: dict[str, list[Point]], xlabel: str, ylabel: str) -> Any:
    """A line per name, through medians, with bars from lowest to highest."""
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        medians = [spread["median"] for _, spread in points]
        below = [s["median"] - s["min"] for _, s in points]
        above = [s["max"] - s["median"] for _, s in points]
        x = [at for at, _ in points]
        axes.errorbar(
            x, medians, (below, above), marker="o", capsize=3, color=color_of(name)
        )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    ends = {name: points[-1][1]["median"] for name, points in lines.items()}
    name_ends(axes, ends)
    return figure


if __name__ == "__main__":
    main()
