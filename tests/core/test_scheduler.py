"""What the scheduler says when it starts."""

import logging

import pytest

from tests.core.helpers import MAX_MODEL_LEN, Driver


@pytest.mark.parametrize("budget", [64, MAX_MODEL_LEN])
def test_a_budget_that_evicts_nothing_is_warned_of(caplog, budget):
    logger = logging.getLogger("vllm.vllm_h2o.core.scheduler")
    logger.addHandler(caplog.handler)
    try:
        Driver(num_blocks=64, budget=budget)
    finally:
        logger.removeHandler(caplog.handler)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    evicts_nothing = any("--h2o-budget" in text for text in warnings)
    assert evicts_nothing == (budget == MAX_MODEL_LEN), warnings


@pytest.mark.parametrize(
    ("hybrid", "resident", "full"),
    [(False, 63 // 4, 63 // 16), (True, 63 // 8, 63 // 20)],
)
def test_summary_counts_what_a_request_takes(hybrid, resident, full):
    """Windowed layers take blocks of the same pool: 40 tokens 3, or parts of 4."""
    summary = Driver(64, budget=64, hybrid=hybrid).scheduler._summary()
    assert f"fits {resident} such requests, or {full} full-length ones" in summary
