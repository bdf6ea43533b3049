"""Pictures of the quality CSV, into docs/pictures/.

python -m benchmarks.quality.plot
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from benchmarks.pictures import FOLDER, HEIGHT, WIDTH, color_of, name_ends

OURS, BEST_PEERS = ("h2o", "h2o uniform"), 3
"""Lines of the pictures; all others are in the tables."""
SYSTEM_LABELS = {
    "prompt_only": "prompt only ",
    "vllm_h2o": "",
    "kvpress": "kvpress ",
    "shared_blocks": "shared ",
    "torch": "authors' ",
}
MODELS = {
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B",
    "qwen2.5-coder-0.5b-instruct": "Qwen2.5-Coder-0.5B",
    "smollm2-135m-instruct": "SmolLM2-135M",
    "gemma-3-270m": "Gemma 3 270M",
}
BARS = {
    "h2o int8": "h2o as it comes, in int8",
    "h2o": "in the model's type",
    "h2o prompt_score=attention": "the same by attention",
    "kvpress snapkv": "kvpress SnapKV",
}
OF_MODELS = "quality-qwen-1.5b.csv", "quality-models-2.csv", "quality-unseen-2.csv"
"""Results of texts on which nothing was chosen; of equal rows that of the first."""


def draw(csv_path: Path, folder: Path = FOLDER) -> list[Path]:
    """Draw what the CSV has rows for; returns the files written."""
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [*_loss(rows, folder), *_retrieval(rows, folder)]


def divergences(rows: list[dict[str, str]]) -> dict[str, dict[str, float]]:
    """KL divergence in nats by model and system, where these have 20 % of the bytes."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        least, most = (0.3, 0.4) if "int8" in row["policy"] else (0.19, 0.21)
        is_one = row["metric"] == "kl_nats" and row["model"] in MODELS
        if is_one and least < float(row["budget_fraction"]) < most:
            of_model = found.setdefault(row["model"], {})
            of_model.setdefault(name_of(row), float(row["value"]))
    return found


def draw_models(results: Path, folder: Path = FOLDER) -> Path:
    """Draw what models of several makes lose at 20 % of the memory."""
    rows: list[dict[str, str]] = []
    for name in OF_MODELS:
        with (results / name).open(newline="") as file:
            rows += csv.DictReader(file)
    found = divergences(rows)
    figure, axes = _figure()
    for i, (system, label) in enumerate(BARS.items()):
        bars = [
            (place + 0.2 * i, found[model][system])
            for place, model in enumerate(MODELS)
            if system in found[model]
        ]
        x, y = zip(*bars, strict=True)
        color = color_of(system) if i in (0, 3) else ("#f59e0b", "#fcd34d")[i - 1]
        axes.bar(x, y, width=0.19, label=label, color=color)
    axes.set_xticks([0.3 + place for place in range(len(MODELS))], MODELS.values())
    axes.set_ylabel("KL divergence from the full cache, nats per token")
    axes.legend(title="20 % of the KV memory")
    return _save(figure, axes, {}, folder / "quality-models.png")


def name_of(row: dict[str, str]) -> str:
    """System and policy of a row; ours by the policy alone."""
    return SYSTEM_LABELS[row["system"]] + row["policy"]


def _is_system(row: dict[str, str]) -> bool:
    """Not a lever, whose name has its value in it: they are left to the table."""
    return "=" not in row["policy"]


def loss_deltas(rows: list[dict[str, str]]) -> dict[str, list[tuple[float, float]]]:
    """`(budget fraction, loss over the full cache in nats)` by system and policy."""
    rows = [r for r in rows if r["metric"] == "loss_delta_nats"]
    most = max((int(r["samples"]) for r in rows), default=0)
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        # The quick grid reads fewer tokens: its losses are another measure.
        if int(r["samples"]) == most:
            point = (float(r["budget_fraction"]), float(r["value"]))
            lines.setdefault(name_of(r), []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def shown(lines: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Names of ours, and of the best peers over the budgets that all have."""
    peers = {n: dict(p) for n, p in lines.items() if n.startswith("kvpress ")}
    peers = {name: points for name, points in peers.items() if len(points) > 1}
    common = set.intersection(*map(set, peers.values())) if peers else set()
    best = sorted(peers, key=lambda name: sum(peers[name][x] for x in common))
    return [name for name in OURS if name in lines] + best[:BEST_PEERS]


def _loss(rows: list[dict[str, str]], folder: Path) -> list[Path]:
    lines = loss_deltas([r for r in rows if _is_system(r)])
    names = shown(lines)
    if not names:
        return []
    figure, axes = _figure()
    for name in names:
        x, y = zip(*((100 * x, y) for x, y in lines[name]), strict=True)
        width = 2.5 if name == "h2o" else 1.5
        axes.plot(x, y, marker="o", linewidth=width, color=color_of(name))
    axes.set(
        xlabel="budget, % of the context",
        ylabel="loss over the full cache, nats per token",
        xscale="log",
    )
    axes.set_ylim(bottom=0)
    # The smallest budget, where lines are farthest apart, is at the right.
    axes.invert_xaxis()
    ticks = sorted({100 * x for name in names for x, _ in lines[name]})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    ends = {name: lines[name][0][1] for name in names}
    return [_save(figure, axes, ends, folder / "quality-loss.png")]


def _retrieval(rows: list[dict[str, str]], folder: Path) -> list[Path]:
    panels = _passkeys(rows)
    if not panels:
        return []
    names = ["full", *shown(loss_deltas([r for r in rows if _is_system(r)]))]
    # The budget at which most systems were asked.
    share, lines = max(panels.items(), key=lambda panel: len(panel[1]))
    figure, axes = _figure()
    ends = {}
    for name in (name for name in names if name in lines):
        x, y = zip(*sorted(lines[name]), strict=True)
        axes.plot(x, y, marker="o", color=color_of(name))
        ends[name] = y[-1]
    axes.set(
        xlabel="depth of the number in the prompt, share of its tokens",
        ylabel=f"passkeys found, share, at {share:.0%} of the context",
        ylim=(-0.05, 1.05),
    )
    return [_save(figure, axes, ends, folder / "quality-retrieval.png")]


def _passkeys(
    rows: list[dict[str, str]],
) -> dict[float, dict[str, list[tuple[float, float]]]]:
    """`(depth, exact match)` by budget and by system; the full cache at each budget."""
    prefix = "exact_match_passkey_known_depth_"
    rows = [r for r in rows if r["metric"].startswith(prefix) and _is_system(r)]
    shares = {float(r["budget_fraction"]) for r in rows if r["policy"] != "full"}
    panels: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for r in rows:
        point = (float(r["metric"].removeprefix(prefix)), float(r["value"]))
        own = shares if r["policy"] == "full" else {float(r["budget_fraction"])}
        for share in own:
            lines = panels.setdefault(share, {})
            lines.setdefault(name_of(r), []).append(point)
    return panels


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, HEIGHT))


def _save(figure: Any, axes: Any, ends: dict[str, float], path: Path) -> Path:
    """Write a picture, its lines named at their ends."""
    figure.tight_layout()
    axes.grid(alpha=0.3)
    name_ends(axes, ends)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="benchmarks/results/quality.csv")
    results = Path(parser.parse_args().csv)
    for path in (*draw(results), draw_models(results.parent)):
        print(path)


if __name__ == "__main__":
    main()
