"""A whole engine in plain torch: the reference in place of the kernels."""

import pytest

from tests.engine.helpers import engine, outcome, prompts_of

pytestmark = pytest.mark.engine

NUM_TOKENS = 12


def outcomes(prompts):
    """Tokens and survivors, with the budgets by head of SmolLM2's profile."""
    with engine(kv_policy="h2o", h2o_budget=128) as llm:
        return [outcome(llm, prompt, NUM_TOKENS) for prompt in prompts]


def test_the_reference_equals_the_kernels(monkeypatch):
    """Of a prompt beyond the budget, and of one that fills it while it generates."""
    prompts = prompts_of(300, 122)
    expected = outcomes(prompts)
    monkeypatch.setenv("VLLM_H2O_KERNELS", "reference")
    monkeypatch.setattr("vllm_h2o.attention.ops.cpu._library", must_not_be_called)
    assert outcomes(prompts) == expected


def must_not_be_called():
    raise AssertionError("the reference needs no C")


def test_other_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_KERNELS", "fast")
    with (
        pytest.raises(ValueError, match="VLLM_H2O_KERNELS is 'fast': unset it"),
        engine(kv_policy="h2o", h2o_budget=128),
    ):
        pass
