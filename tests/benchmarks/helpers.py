"""A cell small enough for a test, and results without an engine."""

from __future__ import annotations

from typing import Any

from benchmarks.cells import Cell, record

ENGINE_ARGS = {"skip_tokenizer_init": True}


def tiny_cell(model: Any, **options: Any) -> Cell:
    """64 + 64 tokens of a random model; half of them is the budget."""
    defaults: dict[str, Any] = {
        "workload": "512+512",
        "budgets": ("50%",),
        "model": str(model),
        "dataset_name": "random",
        "scale": 0.125,
        "num_prompts": 6,
        "pool_requests": 2,
        "rounds": 1,
        "engine_args": ENGINE_ARGS,
    }
    return Cell(**(defaults | options))


def sample(output_throughput: float, tpot_ms: float, ttft_ms: float) -> dict[str, Any]:
    """A made-up measurement."""
    return {
        "output_throughput": output_throughput,
        "median_tpot_ms": tpot_ms,
        "p99_tpot_ms": 2 * tpot_ms,
        "median_itl_ms": 0.8 * tpot_ms,
        "median_ttft_ms": ttft_ms,
        "p99_ttft_ms": 2 * ttft_ms,
        "preemptions": 1,
        "peak_kv_blocks": 40,
        "max_running_requests": 6,
        "mean_running_requests": 4.5,
        "hardware": "two cores",
    }


def made_up_result(cell: Cell) -> dict[str, Any]:
    """A result whose stock takes 100 ms a token, and ours 50 and 40."""
    stock = [sample(10.0, 100.0, 1000.0), sample(8.0, 100.0, 1000.0)]
    ours = [sample(20.0, 50.0, 1010.0), sample(20.0, 40.0, 1030.0)]
    samples = {
        contender.label: ours if contender.budget else stock
        for contender in cell.contenders()
    }
    return record(cell, samples)
