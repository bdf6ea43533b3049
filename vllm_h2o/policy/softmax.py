"""The softmax of attention in plain torch: cap, mask, and a sink."""

from __future__ import annotations

import torch


def attention_of(
    logits: torch.Tensor,
    hidden: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn logits into attention.

        z'[t] = softcap * tanh(z[t] / softcap), or z[t] without a cap
        A[t]  = exp(z'[t]) / (sum over what is not hidden of exp(z') + exp(sink))

    Args:
        logits: `[..., n]` float32 of a query and its keys, times the softmax scale;
            overwritten.
        hidden: `[..., m]` bool, of the last m keys: what a query does not see; None:
            nothing.
        softcap: Logit soft cap (Gemma 2), 0 for none.
        sink: `[...]` float32 logit of a token that takes attention and gives nothing
            (gpt-oss), not capped; None: there is none.

    Returns:
        `[..., n]` float32, 0 where it is hidden.
    """
    return attention_and_sink(logits, hidden, softcap=softcap, sink=sink)[0]


def attention_and_sink(
    logits: torch.Tensor,
    hidden: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention_of`, with what the sink takes: `[..., 1]`, or 0 without one."""
    if softcap > 0.0:
        logits = softcap * torch.tanh(logits / softcap)
    if hidden is not None:
        logits[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    if sink is None:
        return logits.softmax(dim=-1), logits.new_zeros(())
    with_sink = torch.cat([logits, sink.expand(logits.shape[:-1])[..., None]], dim=-1)
    attention = with_sink.softmax(dim=-1)
    return attention[..., :-1], attention[..., -1:]
