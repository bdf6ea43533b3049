"""Runs a tier of the suite: `python -m tests.run check`, `test` or `all`.

docs/testing.md says what is in which. At the end: the slowest tests, what the suite
costs beside the last landing (`tests/prices.py`), how long it took, and how many tests
passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests import prices

RESULTS = Path(__file__).parents[1] / "build" / "tests"
NUM_SLOWEST = 20


class Tier(NamedTuple):
    """Which tests are run, and how."""

    markers: str
    workers: int = 0
    """Processes of pytest-xdist; 0: pytest's own."""


TIERS = {
    "check": Tier("check"),
    "test": Tier("not slow", workers=2),
    "all": Tier("", workers=2),
}


class Test(NamedTuple):
    """How a test went."""

    name: str
    seconds: float
    outcome: str


def main(argv: list[str] | None = None) -> int:
    """Run a tier; 0 if all of its tests passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tier", choices=TIERS)
    args, options = parser.parse_known_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = RESULTS / f"{args.tier}.xml"
    results.unlink(missing_ok=True)
    start = time.monotonic()
    status = run(args.tier, results, options)
    seconds = time.monotonic() - start
    tests = read(results)
    ended = f"{len(tests)} tests" if tests else f"no result, exit status {status},"
    lines = ["", *slowest(tests), ""]
    if tests:
        costs = prices.read(results)
        (RESULTS / prices.FILE.name).write_text(json.dumps(costs, indent=1) + "\n")
        lines += prices.told(costs)
    say("\n".join([*lines, f"{ended} in {seconds:.0f} s", total(tests)]))
    return int(bool(status))


def run(tier: str, results: Path, options: Sequence[str]) -> int:
    """Exit status of a tier's pytest."""
    markers, workers = TIERS[tier]
    command = [sys.executable, "-m", "pytest", "-m", markers]
    command += ["--hypothesis-profile", tier, f"--junitxml={results}"]
    env = dict(os.environ)
    if workers:
        # Tests of a module share what is costly to make; the dearest come first.
        command += ["--numprocesses", str(workers), "--dist", "loadfile"]
        command += ["--no-loadscope-reorder"]
        # Threads of OpenMP that wait keep their cores from each other, and vLLM would
        # bind every engine to the same core.
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return subprocess.run([*command, *options], env=env).returncode


def read(results: Path) -> list[Test]:
    """The tests that ran, by pytest's JUnit file; none if it did not come to it."""
    if not results.exists():
        return []
    tests = []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        name = f"{case.get('classname')}::{case.get('name')}"
        tests.append(Test(name, float(case.get("time", 0)), outcome))
    return tests


def slowest(tests: Sequence[Test]) -> list[str]:
    """Lines on the slowest tests, with what they set up."""
    found = sorted(tests, key=lambda test: -test.seconds)[:NUM_SLOWEST]
    return [f"{len(found)} slowest tests:"] + [
        f"{test.seconds:8.1f} s  {test.name}" for test in found
    ]


def total(tests: Sequence[Test]) -> str:
    """The last line."""
    counts = [
        sum(test.outcome == outcome for test in tests)
        for outcome in ("passed", "failed", "skipped")
    ]
    return "total: {} passed, {} failed, {} skipped".format(*counts)


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
