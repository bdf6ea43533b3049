"""Pictures of the quality CSV, into docs/.

python -m benchmarks.quality.plot
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
SYSTEM_LABELS = {"vllm_h2o": "", "kvpress": "kvpress ", "shared_blocks": "shared "}


def draw(csv_path: Path, folder: Path = DOCS) -> list[Path]:
    """Draw what the CSV has rows for; returns the files written."""
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [*_loss(rows, folder), *_retrieval(rows, folder)]


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


def _loss(rows: list[dict[str, str]], folder: Path) -> list[Path]:
    lines = loss_deltas([r for r in rows if _is_system(r)])
    if not lines:
        return []
    # Beside lines, what was measured at one budget only is left to the table.
    if any(len(points) > 1 for points in lines.values()):
        lines = {name: points for name, points in lines.items() if len(points) > 1}
    figure, (axes,) = _figure()
    for name, points in sorted(lines.items(), key=lambda line: line[1][0][1]):
        ours = not name.startswith(tuple(v for v in SYSTEM_LABELS.values() if v))
        axes.plot(
            [100 * x for x, _ in points],
            [y for _, y in points],
            marker="o",
            linestyle="-" if ours else "--",
            linewidth=2.5 if name == "h2o" else 1.2,
            label=name,
        )
    axes.set(
        xlabel="budget, % of the context",
        ylabel="loss over the full cache, nats per token",
        xscale="log",
        yscale="log",
        title="Loss under eviction",
    )
    ticks = sorted({100 * x for points in lines.values() for x, _ in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return [_save(figure, [axes], folder / "quality-loss.png")]


def _retrieval(rows: list[dict[str, str]], folder: Path) -> list[Path]:
    panels = _passkeys(rows)
    if not panels:
        return []
    names = sorted({name for lines in panels.values() for name in lines})
    figure, all_axes = _figure(len(panels))
    for axes, (share, lines) in zip(all_axes, sorted(panels.items()), strict=True):
        for number, name in enumerate(names):
            if name not in lines:
                continue
            xs, ys = zip(*sorted(lines[name]), strict=True)
            color, style = f"C{number % 10}", "-" if number < 10 else "--"
            axes.plot(xs, ys, style, marker="o", linewidth=1.5, color=color, label=name)
        axes.set(xlabel="depth of the number", ylim=(-0.05, 1.05))
        axes.set_title(f"budget {share:.0%}")
    all_axes[0].set_ylabel("exact match, passkey, question known")
    return [_save(figure, all_axes, folder / "quality-retrieval.png")]


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


def _figure(panels: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (5 + 4 * panels, 5)
    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, sharey=True)
    return figure, list(axes[0])


def _save(figure: Any, panels: list[Any], path: Path) -> Path:
    """One legend for all panels, beside the last."""
    labels = {}
    for axes in panels:
        axes.grid(alpha=0.3)
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    panels[-1].legend(
        labels.values(),
        labels.keys(),
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="benchmarks/results/quality.csv")
    for path in draw(Path(parser.parse_args().csv)):
        print(path)


if __name__ == "__main__":
    main()
