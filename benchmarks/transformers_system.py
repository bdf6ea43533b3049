"""Systems on transformers, which serve static batches; its `generate` is one."""

from __future__ import annotations

import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.metrics import RequestTimes, serving_metrics
from benchmarks.systems import Job


class StaticBatches:
    """Batches of as many requests as stock's pool fits, one after the other.

    Args:
        job: What to serve.
        held_tokens: The most that a request holds.
    """

    def __init__(self, job: Job, held_tokens: int) -> None:
        pool_tokens = job.pool_blocks * job.engine_args["block_size"]
        self.batch_size = pool_tokens // held_tokens

    def generate(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Generate `steps` tokens for each; returns when each step ended."""
        raise NotImplementedError

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve the requests greedily, one batch after the other."""
        start = time.perf_counter()
        times: list[RequestTimes] = []
        steps = 0
        with tqdm(total=len(requests), unit="request") as bar:
            for i in range(0, len(requests), self.batch_size):
                batch = requests[i : i + self.batch_size]
                times += self._run_batch(batch, start)
                steps += max(request["output_len"] for request in batch)
                bar.update(len(batch))
        result = serving_metrics(times, time.perf_counter() - start)
        return result | {
            "preemptions": 0,
            "max_running_requests": min(self.batch_size, len(requests)),
            "mean_running_requests": result["total_output_tokens"] / steps,
        }

    def _run_batch(
        self, batch: list[dict[str, Any]], start: float
    ) -> list[RequestTimes]:
        """A batch runs as long as its longest request; others end earlier."""
        prompts = [request["prompt_token_ids"] for request in batch]
        times = self.generate(prompts, max(r["output_len"] for r in batch))
        return [
            RequestTimes(
                prompt_len=len(request["prompt_token_ids"]),
                output_tokens=request["output_len"],
                ttft=times[0] - start,
                latency=times[request["output_len"] - 1] - start,
            )
            for request in batch
        ]


class TransformersSystem(StaticBatches):
    """`generate` with its full cache."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.max_model_len)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = job.engine_args["dtype"]
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
        self.model = model.to(device).eval()

    def generate(self, prompts: list[list[int]], steps: int) -> list[float]:
        """See `StaticBatches`; shorter prompts are padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        clock = _Clock()
        self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.times

    def close(self) -> None:
        """Drop the model."""
        del self.model


class _Clock(StoppingCriteria):
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
