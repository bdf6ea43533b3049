"""What holds for all tests.

Without a GPU Triton's kernels are interpreted. Triton decides when its own library is
imported, and vLLM imports triton, so no test module is early enough.

docs/testing.md says what the markers and profiles are for; `python -m tests.run` runs
the tiers.
"""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import prices
from tests.prices import (  # noqa: F401  pytest finds them here
    pytest_runtest_setup,
    pytest_runtest_teardown,
)
from tests.watch import (  # noqa: F401  pytest finds them here
    nothing_is_left,
    nothing_is_left_of_a_module,
    pytest_runtest_protocol,
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Engines take head profiles from files only, so that a test does not depend on what is
# in the cache; test_calibration is about the others.
os.environ["VLLM_H2O_CALIBRATE"] = "0"

for tier, examples in {"check": 5, "test": 20, "all": 100}.items():
    settings.register_profile(tier, max_examples=examples, deadline=None)
settings.load_profile("test")

TESTS = Path(__file__).parent.as_posix()
CHECK = tuple(
    f"{TESTS}/{path}"
    for path in (
        "policy/",
        "core/",
        "calibration/",
        "plugin/",
        "attention/test_metadata",
        "attention/test_observe",
        "attention/test_transition",
        "test_rooms",
    )
)
"""What `make check` runs, but for what starts a process; others say so themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make check` by where they are; the dearest files first."""
    for item in items:
        process = item.get_closest_marker("process")
        if item.path.as_posix().startswith(CHECK) and not process:
            item.add_marker(pytest.mark.check)
    prices.dearest_first(items)
