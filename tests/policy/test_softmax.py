"""The softmax of attention, against its formula."""

import pytest
import torch

from vllm_h2o.policy.softmax import attention_of


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_attention_is_as_the_formula_says(softcap, has_sink, hides):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator).mul(3)
    sink = torch.randn(3, 1, generator=generator) if has_sink else None
    hidden = torch.ones(4, 7, dtype=torch.bool).triu(2) if hides else None
    capped = logits.double()
    if softcap:
        capped = softcap * (capped / softcap).tanh()
    weights = capped.exp()
    if hides:
        weights[:, hidden] = 0.0
    total = weights.sum(dim=-1, keepdim=True)
    if has_sink:
        total = total + sink.double().exp()[..., None]
    actual = attention_of(logits, hidden, softcap=softcap, sink=sink)
    torch.testing.assert_close(actual.double(), weights / total, rtol=1e-5, atol=1e-7)
    if hides:
        assert not actual[:, hidden].any()
