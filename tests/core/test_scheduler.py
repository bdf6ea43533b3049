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
