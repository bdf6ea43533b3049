"""What all pictures share: a colour for each system, names at the lines' ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH, HEIGHT = 8.0, 4.5
"""Inches, of a picture as wide as a README shows it."""

_COLORS = {
    "stock": "#475569",
    "full": "#475569",
    "h2o": "#c2410c",
    "h2o uniform": "#f59e0b",
    "kvpress tova": "#1d4ed8",
    "kvpress snapkv": "#0891b2",
    "kvpress observed_attention": "#7c3aed",
    "kvpress streaming_llm": "#15803d",
    "kvpress keydiff": "#be185d",
    "streaming": "#65a30d",
}
_GAP = 14
"""Points between names at the ends of lines, at least."""


def color_of(system: str) -> str:
    """The colour of a system in every picture; what follows its name may say more."""
    known = [name for name in _COLORS if f"{system} ".startswith(f"{name} ")]
    return _COLORS[max(known, key=len)] if known else "#9ca3af"


def name_ends(axes: Any, ends: dict[str, float]) -> None:
    """Write names beside the axes where lines end, none over another.

    Args:
        axes: With its limits and scales as they stay.
        ends: The last y of each line by the system's name.
    """
    names = sorted(ends, key=lambda name: ends[name])
    (_, bottom), (_, top) = axes.transAxes.transform([(0, 0), (1, 1)])
    gap = _GAP * axes.figure.dpi / 72
    wanted = [axes.transData.transform((0, ends[name]))[1] for name in names]
    places: list[float] = []
    for y in wanted:  # From below, each at least a gap over the last;
        places.append(max(y, places[-1] + gap) if places else max(y, bottom))
    for i in reversed(range(len(places))):  # from above, none over the top.
        limit = places[i + 1] - gap if i + 1 < len(places) else top
        places[i] = min(places[i], limit)
    for name, y in zip(names, places, strict=True):
        share = (y - bottom) / (top - bottom)
        axes.text(
            1.02,
            share,
            name,
            transform=axes.transAxes,
            color=color_of(name),
            va="center",
        )
