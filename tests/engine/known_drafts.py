"""A drafter that knows the answers, and is wrong now and then (`custom_class`)."""

import json
import os
import random
from pathlib import Path

import torch

KNOWN = "H2O_TESTS_KNOWN"
"""Environment variable: a file with the tokens of prompts and answers."""


class KnownDrafts:
    """Drafts of every number, right up to any of them."""

    def __init__(self, vllm_config):
        self._most = vllm_config.num_speculative_tokens
        self._texts = json.loads(Path(os.environ[KNOWN]).read_text())
        self._draw = random.Random(5)

    def load_model(self, *args, **kwargs):
        """There is none."""

    def propose(self, sampled_token_ids, num_tokens, token_ids, **kwargs):
        """Of each row of the batch."""
        return [
            self._drafts(token_ids[i, : num_tokens[i]].tolist()) if sampled else []
            for i, sampled in enumerate(sampled_token_ids)
        ]

    def of_states(self, requests, states):
        """`[n, most]` int64 of requests of runner V2, which fills up with any."""
        drafts = torch.full((len(requests), self._most), 3)
        for row, request in enumerate(requests.tolist()):
            length = int(states.total_len.gpu[request])
            tokens = states.all_token_ids.gpu[request, :length].tolist()
            for i, token in enumerate(self._drafts(tokens)):
                drafts[row, i] = token
        return drafts

    def _drafts(self, tokens):
        at, count = len(tokens), self._draw.randint(0, self._most)
        known = (text[at : at + count] for text in self._texts if text[:at] == tokens)
        right = self._draw.randint(0, count)
        drafts = next(known, [])
        return [token if i < right else token ^ 1 for i, token in enumerate(drafts)]


def speculating(texts, file, monkeypatch, most_drafts=4):
    """Options of an engine whose drafts are of these texts, written to a file."""
    file.write_text(json.dumps(texts))
    monkeypatch.setenv(KNOWN, str(file))
    drafter = f"{__name__}.{KnownDrafts.__name__}"
    speculation = {"method": "custom_class", "model": drafter}
    speculation["num_speculative_tokens"] = most_drafts
    # In this process no engine would start after it: vLLM's fault.
    return {
        "speculative_config": speculation,
        "distributed_executor_backend": "mp",
    }
