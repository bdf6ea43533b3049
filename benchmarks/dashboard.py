"""The dashboard of examples/monitoring as one HTML page, for those without Grafana.

    python -m benchmarks.dashboard --prometheus http://localhost:9090

Asks Prometheus what Grafana would ask, and draws it: numbers, lines over time, and of
histograms how many requests were in which bucket.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import requests

DASHBOARD = (
    Path(__file__).parents[1] / "examples/monitoring/grafana/dashboards/h2o.json"
)
COLOURS = ("#0969da", "#bf8700", "#1a7f37", "#cf222e", "#8250df", "#6e7781")
NUM_POINTS, SECONDS = 240, 30
COLUMNS, ROW_HEIGHT = 24, 34  # of Grafana's grid; the height in pixels
WIDTH, HEIGHT = 560, 170  # of a chart, in units of its own
STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1rem; color: #1b1f24;
  background: #fff }
main { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px }
section { border: 1px solid #d0d7de; border-radius: 6px; padding: 6px 10px;
  overflow: hidden; min-width: 0 }
h2 { font-size: 13px; margin: 0 0 4px } big { font-size: 26px }
svg { width: 100%; height: 75% } small { color: #57606a; margin-right: 1em }
text { font-size: 11px; fill: #57606a }
"""


class Series(NamedTuple):
    """Values of an expression over time."""

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]
    """Of seconds since 1970; what is not finite is left out."""


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prometheus", default="http://localhost:9090")
    parser.add_argument("--minutes", type=float, default=30, help="up to now")
    parser.add_argument("--output", type=Path, default=Path("dashboard.html"))
    args = parser.parse_args(argv)
    args.output.write_text(page(args.prometheus, 60 * args.minutes), "utf-8")
    print(f"written to {args.output}")


def page(prometheus: str, seconds: float) -> str:
    """The page.

    Args:
        prometheus: Its address.
        seconds: To show, up to now.
    """
    end = time.time()
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [
        _panel(
            panel, [_ask(prometheus, x, end - seconds, end) for x in panel["targets"]]
        )
        for panel in dashboard["panels"]
    ]
    title = html.escape(dashboard["title"])
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><main>{''.join(panels)}</main>"
    )


def _ask(
    prometheus: str, target: dict[str, Any], start: float, end: float
) -> list[Series]:
    step = (end - start) / NUM_POINTS
    expression = target["expr"].replace("$model_name", ".*").replace("$engine", ".*")
    # As Grafana has it, at least four scrapes; rates of single ones are jagged.
    expression = expression.replace("$__rate_interval", f"{max(4 * step, 60):.0f}s")
    times = {"start": start, "end": end, "step": step}
    path = "query_range"
    if target.get("instant"):
        times, path = {"time": end}, "query"
    answer = requests.get(
        f"{prometheus}/api/v1/{path}",
        params={"query": expression, **times},
        timeout=SECONDS,
    ).json()
    if answer["status"] != "success":
        raise ValueError(f"{expression}: {answer['error']}")
    found = []
    for series in answer["data"]["result"]:
        values = series["values"] if "values" in series else [series["value"]]
        points = [(at, float(value)) for at, value in values]
        finite = [point for point in points if math.isfinite(point[1])]
        name = target.get("legendFormat", "")
        for label, value in series["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        if finite:
            found.append(Series(name, series["metric"], finite))
    return found


def _panel(panel: dict[str, Any], by_target: list[list[Series]]) -> str:
    series, grid = sum(by_target, []), panel["gridPos"]
    draw = {"stat": _number, "table": _labels, "heatmap": _buckets}
    content = draw.get(panel["type"], _lines)(series, panel)
    place = (
        f"grid-column: {grid['x'] + 1} / span {grid['w']}; "
        f"height: {grid['h'] * ROW_HEIGHT}px"
    )
    title = html.escape(panel["title"])
    return f'<section style="{place}"><h2>{title}</h2>{content}</section>'


def _said(value: float, panel: dict[str, Any]) -> str:
    unit = panel["fieldConfig"]["defaults"].get("unit")
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    ends = {"s": " s", "ops": " /s"}.get(unit, "")
    return f"{value:.3g}{ends}" if abs(value) < 1000 else f"{value:,.0f}{ends}"


def _number(series: list[Series], panel: dict[str, Any]) -> str:
    if not series:
        return "no data"
    return f"<big>{_said(series[0].points[-1][1], panel)}</big>"


def _labels(series: list[Series], panel: dict[str, Any]) -> str:
    hidden = {"__name__", "job", "instance", "model_name", "engine"}
    shown = {k: v for x in series for k, v in x.labels.items() if k not in hidden}
    return "<br>".join(html.escape(f"{k}: {v}") for k, v in shown.items()) or "no data"


def _lines(series: list[Series], panel: dict[str, Any]) -> str:
    if not series:
        return "no data"
    times = [at for x in series for at, _ in x.points]
    first, last = min(times), max(times)
    most = max(value for x in series for _, value in x.points) or 1.0
    span = (last - first) or 1.0
    drawn, legend = "", ""
    for one, colour in zip(series, itertools.cycle(COLOURS), strict=False):
        places = " ".join(
            f"{(at - first) / span * WIDTH:.1f},{HEIGHT - value / most * HEIGHT:.1f}"
            for at, value in one.points
        )
        drawn += f'<polyline points="{places}" fill="none" stroke="{colour}" '
        drawn += 'stroke-width="2" vector-effect="non-scaling-stroke"/>'
        legend += f'<small><b style="color: {colour}">&#9644;</b> '
        legend += f"{html.escape(one.name)}</small>"
    return _chart(drawn, f"most: {_said(most, panel)}") + legend


def _chart(drawn: str, says: str) -> str:
    return (
        f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" preserveAspectRatio="none">'
        f"{drawn}</svg><small>{says}</small>"
    )


def _buckets(series: list[Series], panel: dict[str, Any]) -> str:
    """A column for each time and a row for each bucket; what they count below it."""
    if not series:
        return "no data"
    rows = sorted(series, key=lambda one: float(one.labels["le"]))
    at = sorted({time for one in rows for time, _ in one.points})
    below = dict.fromkeys(at, 0.0)
    counts: list[list[float]] = []
    for one in rows:
        up_to = dict(one.points)
        counts.append([max(up_to.get(t, 0.0) - below[t], 0.0) for t in at])
        below |= up_to
    most = max(map(max, counts)) or 1.0
    wide, high = WIDTH / len(at), HEIGHT / len(rows)
    drawn = "".join(
        f'<rect x="{x * wide:.1f}" y="{HEIGHT - (y + 1) * high:.1f}" '
        f'width="{wide:.1f}" height="{high:.1f}" fill="{COLOURS[0]}" '
        f'opacity="{count / most:.2f}"/>'
        for y, row in enumerate(counts)
        for x, count in enumerate(row)
        if count
    )
    bounds = " &lt; ".join(one.labels["le"] for one in rows)
    return _chart(drawn, f"from below: {bounds}")


if __name__ == "__main__":
    main()
