"""Runs vLLM's own tests with H2O in stock's place: `make test-vllm` (half an hour).

Stock goes first: what fails there on this machine is not asked of H2O.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.vllm_suite.hub import make_hub
from tests.vllm_suite.known import DIFFERENT, ENDED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "vllm-suite"

SUITES = {
    "scheduler": (
        "v1/core/test_scheduler.py",
        "v1/core/test_async_scheduler.py",
        "v1/core/test_prefix_caching.py",
        "v1/core/prefix_cache",
        "v1/core/test_prefix_replay.py",
        "v1/core/test_deferred_block_free.py",
        "v1/core/test_priority_preemption_bug.py",
        "v1/core/test_priority_scheduler_random.py",
        "v1/streaming_input/test_scheduler_streaming.py",
    ),
    "engine": (
        "v1/core/test_scheduler_e2e.py",
        "v1/core/test_reset_prefix_cache_e2e.py",
        "v1/engine/test_engine_core.py",
        "v1/engine/test_llm_engine.py",
        "v1/engine/test_async_llm.py",
        "v1/e2e/general/test_streaming_input.py",
        "v1/e2e/general/test_min_tokens.py",
        "v1/sample/test_logprobs.py",
        "v1/sample/test_sampling_params_e2e.py",
        "entrypoints/llm/test_generate.py",
    ),
}
UNBOUND, SMALL = "100000", {"scheduler": "32", "engine": "64"}
"""Budgets in tokens."""
TEST_SECONDS = 200
"""Within which a test ends."""


class Outcome(NamedTuple):
    """How a test went."""

    outcome: str
    with_h2o: bool
    compressed: bool = False
    at: str = ""
    said: str = ""


def main(argv: list[str] | None = None) -> int:
    """Run the suites; 0 if nothing fails that is not known."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environment", type=Path, help="of requirements/vllm_tests.py")
    parser.add_argument("suites", nargs="*", default=list(SUITES), metavar="SUITE")
    args = parser.parse_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    make_hub(RESULTS / "hub")
    faults: list[str] = []
    for suite in args.suites:
        modes = ["stock", "async"] if suite == "scheduler" else ["stock"]
        controls = [run(args.environment, suite, mode) for mode in modes]
        passed = in_all(controls)
        print(f"{suite}: {len(passed)} of {len(controls[0])} pass in stock", flush=True)
        for budget, judge in ((UNBOUND, differing), (SMALL[suite], ended)):
            found = run(args.environment, suite, budget)
            wrong = judge(passed, found)
            asked = [found[name] for name in passed & found.keys()]
            with_h2o = sum(test.with_h2o for test in asked)
            # Engines compress in processes of their own, which do not say so.
            compressed = sum(test.compressed for test in asked)
            print(
                f"{suite}, budget {budget}: {len(asked)} tests, {with_h2o} reach H2O, "
                f"{compressed} are seen to compress, {len(wrong)} faults",
                flush=True,
            )
            faults += wrong
    print("\n".join(faults) or "no faults")
    return int(bool(faults))


def run(environment: Path, suite: str, mode: str) -> dict[str, Outcome]:
    """How vLLM's tests went, by name; `mode` as `stand_in` has it."""
    outcomes = RESULTS / f"{suite}-{mode}.jsonl"
    outcomes.unlink(missing_ok=True)
    bin_, tests = environment.absolute() / "bin", environment.absolute() / "tests"
    env = os.environ | {
        "H2O_STANDS_IN": mode,
        "H2O_OUTCOMES": str(outcomes),
        "HF_HOME": str(RESULTS / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    command = [str(bin_ / "python"), "-m", "pytest", "-p", "stand_in", "-q"]
    command += ["-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "--tb=short"]
    command += [f"tests/{path}" for path in SUITES[suite]]
    with outcomes.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=log)
    return read(outcomes.read_text().splitlines() if outcomes.exists() else [])


def read(lines: Iterable[str]) -> dict[str, Outcome]:
    """The last word on each test."""
    found = {}
    for line in map(json.loads, lines):
        at, said = line.get("at", ""), line.get("said", "")
        reached, compressed = line["h2o"] > 0, line["transitions"] > 0
        found[line["test"]] = Outcome(line["outcome"], reached, compressed, at, said)
    return found


def in_all(controls: Sequence[Mapping[str, Outcome]]) -> set[str]:
    """Names of the tests that pass everywhere."""
    first, *others = (
        {name for name, test in control.items() if test.outcome == "passed"}
        for control in controls
    )
    return first.intersection(*others)


def differing(passed: set[str], found: Mapping[str, Outcome]) -> list[str]:
    """Tests of stock's that fail, and are not known to."""
    faults = [f"did not run: {name}" for name in sorted(passed - found.keys())]
    for name in sorted(passed & found.keys()):
        test = found[name]
        if test.outcome != "passed" and not is_known(name, DIFFERENT):
            faults.append(told(name, test))
    return faults


def ended(passed: set[str], found: Mapping[str, Outcome]) -> list[str]:
    """Tests in which something else than their own expectations is broken."""
    faults = [f"did not run: {name}" for name in sorted(passed - found.keys())]
    for name in sorted(passed & found.keys()):
        test = found[name]
        expects = "/tests/" in test.at and "Timeout" not in test.said
        if test.outcome != "passed" and not expects and not is_known(name, ENDED):
            faults.append(told(name, test))
    return faults


def is_known(name: str, reasons: Mapping[str, str]) -> bool:
    """Whether a test is listed."""
    return any(known in name for known in reasons)


def told(name: str, test: Outcome) -> str:
    """A line on a failure."""
    return f"{name}: {test.outcome} at {test.at}: {test.said}"


if __name__ == "__main__":
    sys.exit(main())
