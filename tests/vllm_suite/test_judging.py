"""What counts as a fault when vLLM's tests run with H2O in stock's place."""

import json

from tests.vllm_suite.known import DIFFERENT
from tests.vllm_suite.run import differing, ended, in_all, read


def outcomes(**tests):
    """By name, of `(outcome, where it crashed, what was said)`."""
    return read(
        json.dumps(
            {
                "test": name,
                "outcome": how,
                "h2o": 1,
                "transitions": 0,
                "at": at,
                "said": said,
            }
        )
        for name, (how, at, said) in tests.items()
    )


PASSED = ("passed", "", "")
EXPECTED = ("failed", "/venv/tests/tests/v1/core/test_scheduler.py", "assert 3 == 4")
RAISED = ("failed", "/site-packages/vllm_h2o/core/manager.py", "AssertionError")


def test_what_passes_in_all_controls_is_asked_for():
    stock = outcomes(a=PASSED, b=PASSED, c=EXPECTED)
    assert in_all([stock, outcomes(a=PASSED, b=EXPECTED, c=PASSED)]) == {"a"}


def test_a_budget_that_never_binds_is_as_stock():
    found = outcomes(a=PASSED, b=EXPECTED, c=EXPECTED)
    (fault,) = differing({"a", "b"}, found)
    assert fault.startswith("b: failed") and "assert 3 == 4" in fault
    (fault,) = differing({"a", "d"}, found)
    assert fault == "did not run: d"
    known = f"tests/v1/core/{next(iter(DIFFERENT))}[1]"
    assert not differing({known}, outcomes(**{known: EXPECTED}))


def test_a_small_budget_may_miss_expectations_but_raises_nothing():
    found = outcomes(a=EXPECTED, b=RAISED, d=(*EXPECTED[:2], "Failed: Timeout (>9s)"))
    raised, hung = ended({"a", "b", "d"}, found)
    assert raised.startswith("b: failed") and "manager.py" in raised
    assert hung.startswith("d: failed") and "Timeout" in hung
    assert ended({"c"}, found) == ["did not run: c"]
