"""The Triton kernels on a GPU: correct, how fast, against what.

    python -m benchmarks.gpu            a table, and benchmarks/results/gpu-*.json
    python -m benchmarks.gpu --sweep    also how the attend kernel could be tuned
    python -m benchmarks.gpu --tiny     every code path on the CPU, interpreted:
                                        its times say nothing

Needs torch >= 2.11 and triton >= 3.6, neither vLLM nor an installed vllm_h2o.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Check, measure, print, write."""
    args = parse_args()
    if args.tiny:
        # Before anything imports triton.
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu import correctness, decode, measure, prompt
    from benchmarks.gpu.sizes import FULL, TINY

    device = measure.device(args.tiny)
    sizes = TINY if args.tiny else FULL
    result: dict[str, Any] = {"environment": measure.environment(device)}
    result["sizes"] = vars(sizes)
    output = output_path(args, result["environment"]["device"])

    def note(part: str, found: Any) -> Any:
        """Keep what there is: a crash or a time limit loses the rest only."""
        result[part] = found
        output.write_text(json.dumps(result, indent=2))
        print(f"{part}: done", flush=True)
        return found

    copy = note("copy_gb_per_s", measure.copy_bandwidth(device, sizes))
    note("correctness", correctness.check_all(args.tiny))
    note("decode", decode.measure_all(sizes, device, copy))
    note("prompt", prompt.measure_all(sizes, device))
    if not args.tiny:
        note("targets", targets(result))
    if args.sweep:
        note("sweep", decode.sweep(sizes, device, copy))
    print(report(result))
    print(f"written to {output}")
    failed = [row for row in result["correctness"] if not row["ok"]]
    if failed:
        raise SystemExit(f"{len(failed)} checks against the reference failed")


def output_path(args: argparse.Namespace, device: str) -> Path:
    """The JSON file, in a folder that exists."""
    name = device.lower().replace(" ", "-")
    folder = "build" if args.tiny else "benchmarks/results"
    output = Path(args.output or f"{folder}/gpu-{name}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="interpreted, on the CPU")
    parser.add_argument("--sweep", action="store_true", help="try other tunings")
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args()


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Targets set before anything was measured, beside what was."""
    from benchmarks.gpu.decode import CONTEXT, PLAIN, SCORED
    from benchmarks.gpu.prompt import SCORING_AND_TRANSITION

    decode = {row["kernel"]: row for row in result["decode"]}
    scored, plain, context = decode[SCORED], decode[PLAIN], decode[CONTEXT]
    parts = {row["part"]: row for row in result["prompt"]}
    transition = parts[SCORING_AND_TRANSITION]
    cost = scored["us_per_layer"] / plain["us_per_layer"] - 1
    rows = [
        ("decode bandwidth over copy, at least", 0.8, scored["of_copy"], 1),
        ("cost of scores and graduation, at most", 0.08, cost, -1),
        ("full context over resident, at least", 10.0, context["times_scored"], 1),
        ("scoring and transition, at most", 0.05, transition["of_attention"], -1),
    ]
    return [
        {"target": name, "asked": asked, "measured": got, "met": got * up >= asked * up}
        for name, asked, got, up in rows
    ]


def report(result: dict[str, Any]) -> str:
    """The tables."""
    checks = result["correctness"]
    lines = [
        f"{result['environment']}",
        f"correctness: {sum(row['ok'] for row in checks)} of {len(checks)}",
        *(
            f"  FAILED {row['check']}: {row['error']}"
            for row in checks
            if not row["ok"]
        ),
        f"copy: {result['copy_gb_per_s']:.0f} GB/s (read and written)",
    ]
    for title in ("decode", "prompt", "targets", "sweep"):
        if title in result:
            lines += ["", title, *table(result[title])]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of the same keys as aligned text."""
    cells = [list(rows[0])]
    for row in rows:
        cells.append(
            [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


if __name__ == "__main__":
    main()
