"""What the scheduler says when it starts."""

import logging

import pytest
import vllm.logger
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.core.helpers import MAX_MODEL_LEN, Driver, spec_beside
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.core.summary import summary


@pytest.mark.parametrize("budget", [64, MAX_MODEL_LEN])
def test_a_budget_that_evicts_nothing_is_warned_of(caplog, budget):
    # An engine before in this process may have said the same.
    vllm.logger._print_warning_once.cache_clear()
    logger = logging.getLogger("vllm.vllm_h2o.core.scheduler")
    logger.addHandler(caplog.handler)
    try:
        Driver(num_blocks=64, budget=budget)
    finally:
        logger.removeHandler(caplog.handler)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    evicts_nothing = any("--h2o-budget" in text for text in warnings)
    assert evicts_nothing == (budget == MAX_MODEL_LEN), warnings


@pytest.mark.parametrize("beside", ["window", "align"])
def test_what_can_not_be_kept_is_refused(beside):
    with pytest.raises(ValueError, match="--h2o-keep='end'.*use 'none'"):
        Driver(64, budget=64, beside=beside, keep="end")


def test_a_model_without_full_attention_is_refused(monkeypatch):
    monkeypatch.setattr(H2OAttentionSpec, "of", lambda *_: spec_beside("window"))
    monkeypatch.setattr(SlidingWindowSpec, "block_slots", 16, raising=False)
    with pytest.raises(ValueError, match="no layer of this model has full attention"):
        Driver(64, budget=64)


@pytest.mark.parametrize(
    ("beside", "others"), [("", 0), ("window", 4), ("align", 2), ("none", 1)]
)
def test_summary_counts_what_a_request_takes(beside, others):
    """Other layers take blocks of the same pool: windows of 40 tokens 3, or parts of 4,
    a state 1, and where it is kept for the prefix cache another."""
    scheduler = Driver(64, budget=64, beside=beside).scheduler
    said = summary(
        scheduler.vllm_config,
        scheduler.kv_cache_config,
        scheduler._spec,
        scheduler._limits,
    )
    resident, full = 63 // (4 + others), 63 // (16 + others)
    assert f"fits {resident} such requests, or {full} full-length ones" in said
