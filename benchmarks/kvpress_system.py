"""kvpress with its decoding wrapper on transformers, in static batches."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.quality.peers import INTERVAL_TOKENS, PeerRunner
from benchmarks.systems import Job
from benchmarks.transformers_system import StaticBatches

PRESS = "tova"
"""The best of kvpress's on loss at 20 % (see the quality table)."""


class KvpressSystem(StaticBatches):
    """Batches of as many requests as stock's pool fits in what kvpress holds.

    That is the whole prompts while they are read, then the budget and the interval
    at whose end kvpress compresses again.
    """

    def __init__(self, job: Job) -> None:
        assert job.budget_tokens is not None
        if job.engine_args["dtype"] != "float32":
            raise ValueError(
                f"dtype {job.engine_args['dtype']!r}: kvpress runs in float32 here"
            )
        held = job.budget_tokens + INTERVAL_TOKENS
        longest = max(len(r["prompt_token_ids"]) for r in job.requests)
        super().__init__(job, max(held, longest))
        self.budget_tokens = job.budget_tokens
        self.runner = PeerRunner(Path(job.model))

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], steps: int) -> list[float]:
        """See `StaticBatches`."""
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1:
            raise ValueError(
                f"prompts have {min(lengths)} to {max(lengths)} tokens: kvpress cannot "
                "tell padding from text, use a workload with prompts of one length"
            )
        times = []
        with self.runner.reader(PRESS, self.budget_tokens, max(lengths)) as reader:
            tokens = torch.tensor(prompts)
            for _ in range(steps):
                tokens = reader.read(tokens).argmax(dim=-1, keepdim=True)
                times.append(time.perf_counter())
        return times

    def close(self) -> None:
        """Drop the model."""
        del self.runner
