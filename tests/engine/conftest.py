"""Fixtures of several modules."""

import logging

import pytest
import vllm.logger


@pytest.fixture
def logged(caplog):
    """What vLLM's loggers say, also once more."""
    for each in ("info", "warning"):
        getattr(vllm.logger, f"_print_{each}_once").cache_clear()
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield lambda: [(r.levelname, r.getMessage()) for r in caplog.records]
    logger.removeHandler(caplog.handler)
