"""What is said about samples: medians, spreads, ratios, CSV rows, tables, JSON."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import hardware

FIELDS = (
    "workload budget_fraction policy ratio_output_tokens_per_s ratio_tpot ratio_ttft "
    "preemptions peak_blocks concurrency samples model hardware vllm_version date "
    "command"
).split()
"""Columns of `throughput.csv`; `concurrency` is the mean over engine steps."""

SUMMARIZED = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_ttft_and_transition_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "median_itl_ms",
    "preemptions",
    "peak_kv_blocks",
    "max_running_requests",
    "mean_running_requests",
)
RATIOS = {
    "ratio_output_tokens_per_s": "output_throughput",
    "ratio_tpot": "median_tpot_ms",
    "ratio_ttft": "median_ttft_ms",
    "ratio_itl": "median_itl_ms",
    "ratio_ttft_and_transition": "median_ttft_and_transition_ms",
}

Sample = Mapping[str, Any]
Spread = dict[str, float]


def spread(values: Iterable[float]) -> Spread:
    """Median, lowest and highest."""
    values = list(values)
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def summary(samples: Sequence[Sample]) -> dict[str, Spread]:
    """Spreads of the metrics that a system has."""
    return {
        name: spread(sample[name] for sample in samples)
        for name in SUMMARIZED
        if name in samples[0]
    }


def ratios(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Spread]:
    """Spreads of ours over the baseline's, turn by turn.

    Above 1 is better for output tokens/s, below 1 for times. Samples at the
    same place were taken beside each other, so a machine that gets slower
    hits both.
    """
    pairs = list(zip(samples, baseline, strict=True))
    return {
        ratio: spread(ours[name] / theirs[name] for ours, theirs in pairs)
        for ratio, name in RATIOS.items()
        if name in samples[0] and name in baseline[0]
    }


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """CSV rows of a cell's result, one per system; medians."""
    found = []
    for system in result["systems"]:
        medians = {k: v["median"] for k, v in system["summary"].items()}
        shared = {name: result[name] for name in FIELDS[-4:]}
        row = {
            "workload": _workload_name(result),
            "budget_fraction": system["budget_fraction"],
            "policy": system["system"],
            **{
                name: f"{ratio['median']:.4f}"
                for name, ratio in system["ratios"].items()
                if name in FIELDS
            },
            "preemptions": medians["preemptions"],
            "peak_blocks": medians.get("peak_kv_blocks"),
            "concurrency": medians["mean_running_requests"],
            "samples": len(system["samples"]),
            "model": Path(result["model_id"]).name,
        }
        found.append(row | shared)
    return found


def _workload_name(result: Mapping[str, Any]) -> str:
    """Scaled workloads do not go by the name of the full one."""
    name = result["workload"]["name"]
    return name if result["scale"] == 1 else f"{name} x{result['scale']:g}"


def append_rows(
    path: Path, new: Iterable[Mapping[str, Any]], fields: Sequence[str] = FIELDS
) -> None:
    """Add rows to a CSV, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if is_new:
            writer.writeheader()
        writer.writerows(new)


def table(result: Mapping[str, Any]) -> str:
    """The comparison as text: medians, then [lowest, highest]."""
    workload = result["workload"]
    lines = [
        "",
        f"{_workload_name(result)}: {workload['num_prompts']} requests of up to "
        f"{workload['input_len']} + {workload['output_len']} tokens; the KV memory "
        f"fits {workload['pool_requests']} of them in full",
        *systems_table(result["systems"]),
    ]
    return "\n".join(lines)


def systems_table(systems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A column per system: its `label`, `summary` and `ratios`."""
    width = max(len(name) for name in (*SUMMARIZED, *RATIOS)) + 2
    lines = [" " * width + "".join(f"{s['label']:>26}" for s in systems)]
    for kind, names in (("summary", SUMMARIZED), ("ratios", RATIOS)):
        for name in names:
            cells = (_cell(s[kind].get(name)) for s in systems)
            lines.append(f"{name:{width}}" + "".join(f"{c:>26}" for c in cells))
    return lines


def write_json(args: argparse.Namespace, **result: Any) -> None:
    """Write what a benchmark found, and with which options, to `args.output`."""
    whole = {"options": vars(args), "hardware": hardware(), **result}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # Paths, which options may be, become text.
    args.output.write_text(json.dumps(whole, indent=1, default=str))
    print(f"written to {args.output}")


def _cell(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.4g} [{value['min']:.4g}, {value['max']:.4g}]"
