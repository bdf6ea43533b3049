"""What the suite costs: CPU seconds of each file of tests, beside the last landing's.

A test's are those of its process and of the processes that it waited for. They order
the files, the dearest first, so that no process of pytest is left with one at the end;
`tests/run.py` says which have grown. `tests/prices.json` is renewed with a landing:
`cp build/tests/prices.json tests/`.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("prices.json")
_PROPERTY = "cpu_seconds"
_NUM_GROWN = 3
_start = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look at the clock before a test."""
    item.stash[_start] = _spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Look at it again, for the JUnit file."""
    yield
    seconds = _spent() - item.stash.get(_start, _spent())
    item.user_properties.append((_PROPERTY, f"{seconds:.2f}"))


def _spent() -> float:
    return sum(os.times()[:4])


def known() -> dict[str, float]:
    """Seconds by file, of the last landing."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def dearest_first(items: list[pytest.Item]) -> None:
    """Sort tests by what their files cost; those with engines first where none is
    known."""
    prices = known()

    def price(item: pytest.Item) -> float:
        of_engine = item.get_closest_marker("engine") is not None
        return prices.get(_file_of(item.nodeid), 100.0 * of_engine)

    dearest = {}
    for item in items:
        file = _file_of(item.nodeid)
        dearest[file] = max(dearest.get(file, 0.0), price(item))
    items.sort(key=lambda item: -dearest[_file_of(item.nodeid)])


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def read(results: Path) -> dict[str, float]:
    """Seconds by file, by pytest's JUnit file; the dearest first."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        file = file.removeprefix("tests/")
        for each in case.iter("property"):
            if each.get("name") == _PROPERTY:
                found[file] += float(each.get("value", 0))
    return {file: round(seconds, 1) for file, seconds in found.most_common()}


def told(now: dict[str, float]) -> list[str]:
    """Lines on what the suite costs, and on the files that have grown most."""
    before = known()
    lines = [f"{sum(now.values()):.0f} CPU seconds"]
    if not before:
        return lines
    both = sum(before.get(file, 0.0) for file in now)
    lines[0] += f", {both:.0f} of these files at the last landing"
    grown = sorted(now, key=lambda file: before.get(file, 0.0) - now[file])
    for file in grown[:_NUM_GROWN]:
        lines.append(f"{now[file]:8.1f} s, was {before.get(file, 0.0):.1f}: {file}")
    return lines
