"""Teacher forcing through vLLM: the next token is given, its probability recorded.

    LLM(MODEL, logits_processors=["benchmarks.forcing:ForcedTokens"])
    SamplingParams(temperature=0, logprobs=1, extra_args={"forced_token_ids": [...]})

vLLM records raw log-probabilities before logits processors run, so those of the
sampled tokens are the model's own, under whatever the KV cache still holds.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED_TOKEN_IDS = "forced_token_ids"


class ForcedTokens(AdapterLogitsProcessor):
    """Makes each request sample the tokens that its parameters name."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError unless the forced tokens last for the whole output."""
        forced = (params.extra_args or {}).get(FORCED_TOKEN_IDS)
        if forced is not None and len(forced) < (params.max_tokens or 0):
            raise ValueError(
                f"{FORCED_TOKEN_IDS} has {len(forced)} tokens, max_tokens is "
                f"{params.max_tokens}: give at least as many"
            )

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        forced = (params.extra_args or {}).get(FORCED_TOKEN_IDS)
        return None if forced is None else _Force(forced)


class _Force:
    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        token = self._token_ids[len(output_ids)]
        logits.fill_(float("-inf"))
        logits[token] = 0.0
        return logits


def forced(token_ids: list[int]) -> SamplingParams:
    """Sampling parameters that read `token_ids` out of the model."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(token_ids),
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        extra_args={FORCED_TOKEN_IDS: token_ids},
    )
