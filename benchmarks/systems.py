"""The systems under measurement, and what one of them is asked to do.

A system is a class with three methods; to add one, write it in a module of its
own and name it in `SYSTEMS`:

    __init__(job: Job)                  load the model
    run(requests) -> dict               serve the requests, all waiting at the start;
                                        `vllm bench` names, and those of `metrics.py`
    close()                             let go of everything
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.machine import hardware
from benchmarks.smollm2 import ensure_model
from vllm_h2o.policy.presets import PRESETS

STOCK = "stock"
TRANSFORMERS, KVPRESS = "transformers", "kvpress"

OURS: dict[str, dict[str, Any]] = {name: {"kv_policy": name} for name in PRESETS}
OURS |= {
    f"h2o-{dtype}": {"kv_policy": "h2o", "h2o_resident_dtype": dtype}
    for dtype in ("int8", "model")
}
"""Engine arguments by system."""

_VLLM = "benchmarks.vllm_system:VllmSystem"
SYSTEMS = {
    STOCK: _VLLM,
    **dict.fromkeys(OURS, _VLLM),
    TRANSFORMERS: "benchmarks.transformers_system:TransformersSystem",
    KVPRESS: "benchmarks.kvpress_system:KvpressSystem",
}
"""Where each system is; a policy of ours goes by its own name."""

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """One system serving one workload; JSON by `dataclasses.asdict`.

    Attributes:
        system: A name of `SYSTEMS`.
        model: Folder or name of the model; empty for SmolLM2.
        requests: See `Workload.requests`.
        max_model_len: Tokens of the longest finished request.
        pool_blocks: KV blocks of stock's pool; every system gets as many bytes.
        budget_tokens: Token slots per request, for what evicts.
        share: Of a request's memory in stock's cache (`"20%"`), for ours instead.
        prefix_caching: Whether prompts may share KV blocks.
        prompts_cached: Whether they have been read before, and are in the cache.
        repeats: How often to serve the workload with one engine.
        engine_args: vLLM's `EngineArgs` for every system; at least `dtype` and
            `block_size`.
    """

    system: str
    model: str
    requests: list[dict[str, Any]]
    max_model_len: int
    pool_blocks: int
    budget_tokens: int | None = None
    share: str = ""
    prefix_caching: bool = False
    prompts_cached: bool = False
    repeats: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """See the module's docstring."""

    def __init__(self, job: Job) -> None: ...
    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]: ...
    def close(self) -> None: ...


def check_system(name: str) -> None:
    """Raise ValueError if there is no system of this name."""
    if name not in SYSTEMS:
        raise ValueError(
            f"--baselines, --policies: {name!r} is unknown: use {', '.join(SYSTEMS)}"
        )


def system_class(name: str) -> type[System]:
    """Import a system."""
    module, attribute = SYSTEMS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def start(given: Job) -> System:
    """Load a job's system and warm it up."""
    given = dataclasses.replace(given, model=given.model or str(ensure_model()))
    system = system_class(given.system)(given)
    warm_up(system, given.requests)
    return system


def warm_up(system: System, requests: list[dict[str, Any]]) -> None:
    """Run a prompt and a few tokens: kernels are built and loaded by then."""
    output_len = min(requests[0]["output_len"], _WARM_UP_TOKENS)
    system.run([requests[0] | {"output_len": output_len}])


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the system of a job, warm it up, and serve the workload `repeats` times.

    Args:
        job: A `Job` as a dictionary.

    Returns:
        One measurement per repeat.
    """
    given = Job(**job)
    system = start(given)
    try:
        return samples(system, given)
    finally:
        system.close()


def samples(system: System, job: Job) -> list[dict[str, Any]]:
    """Serve the workload of a job `repeats` times."""
    return [
        system.run(job.requests) | {"hardware": hardware()} for _ in range(job.repeats)
    ]
