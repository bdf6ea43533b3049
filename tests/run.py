"""Runs a tier of the suite: `python -m tests.run check`, `test` or `all`.

docs/testing.md says what is in which. A tier is run in parts, each a pytest of its own:
what needs no engine first, then the engines. A part that fails does not keep the next
from running. At the end: the slowest tests of all parts, how long each part took, and
how many tests passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "build" / "tests"
NUM_SLOWEST = 20


class Part(NamedTuple):
    """Tests that run side by side."""

    name: str
    markers: str
    workers: int = 0
    """Processes of pytest-xdist; 0: pytest's own."""


TIERS = {
    "check": [Part("check", "check")],
    "test": [
        Part("without engines", "not engine and not slow", workers=2),
        Part("engines", "engine and not slow", workers=2),
    ],
    "all": [
        Part("without engines", "not engine", workers=2),
        Part("engines", "engine", workers=2),
    ],
}


class Test(NamedTuple):
    """How a test went."""

    name: str
    seconds: float
    outcome: str


def main(argv: list[str] | None = None) -> int:
    """Run the parts of a tier; 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tier", choices=TIERS)
    args, options = parser.parse_known_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed, tests, lines = False, [], []
    for part in TIERS[args.tier]:
        say(f"tests: {part.name}")
        results = RESULTS / f"{part.name.replace(' ', '-')}.xml"
        results.unlink(missing_ok=True)
        start = time.monotonic()
        status = run(part, args.tier, results, options)
        failed |= bool(status)
        seconds = time.monotonic() - start
        tests += (found := read(results))
        ended = f"{len(found)} tests" if found else f"no result, exit status {status},"
        lines.append(f"{part.name}: {ended} in {seconds:.0f} s")
    say("\n".join(["", *slowest(tests), "", *lines, total(tests)]))
    return int(failed)


def run(part: Part, tier: str, results: Path, options: Sequence[str]) -> int:
    """Exit status of a part's pytest."""
    command = [sys.executable, "-m", "pytest", "-m", part.markers]
    command += ["--hypothesis-profile", tier, f"--junitxml={results}"]
    env = dict(os.environ)
    if part.workers:
        # Tests of a module share what is costly to make.
        command += ["--numprocesses", str(part.workers), "--dist", "loadfile"]
        # Threads of OpenMP that wait keep their cores from each other, and vLLM would
        # bind every engine to the same core.
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return subprocess.run([*command, *options], env=env).returncode


def read(results: Path) -> list[Test]:
    """The tests of a part by pytest's JUnit file; none if it did not come to it."""
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
