"""A cell: systems that take turns on one workload, and how that is recorded."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.report import ratios, summary
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import STOCK, Job, check_system
from benchmarks.workloads import SOTU, WORKLOADS, Workload, prompt_source

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "enforce_eager": True,
}

Measure = Callable[[Job], list[dict[str, Any]]]
"""Runs a job where it belongs; one measurement per repeat."""


class Contender(NamedTuple):
    """A system in a cell; `budget` is None for what has none."""

    system: str
    budget: str | None = None

    @property
    def label(self) -> str:
        """Name in results, such as `h2o 20%`."""
        return f"{self.system} {self.budget}" if self.budget else self.system


@dataclass(frozen=True)
class Cell:
    """The options of `benchmarks.compare`, by name.

    Attributes:
        workload: A name of `WORKLOADS`.
        budgets: Budgets of every policy; none: the workload's own.
        policies: Of ours, or `kvpress`: systems with a budget.
        baselines: Systems without a budget. Ratios are over the first.
        model: Folder or name; empty for SmolLM2-135M-Instruct.
        dataset_name: `sotu`, or `random` token ids.
        scale: Multiplies all lengths of the workload.
        num_prompts: Requests, instead of the workload's.
        pool_requests: Requests that fit the pool, instead of the workload's.
        rounds: Turns of every system; each turn is a new engine.
        repeats: Measurements per turn.
        together: Whether the systems stay up between their turns.
        restart_every: Turns after which they start anew all the same.
        share: Whether budgets in per cent are of each request's memory, for ours.
        tensor_parallel_size: Ranks of every engine.
        engine_args: vLLM's `EngineArgs`, over `ENGINE_ARGS`.
    """

    workload: str
    budgets: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("h2o",)
    baselines: tuple[str, ...] = (STOCK,)
    model: str = ""
    dataset_name: str = SOTU
    scale: float = 1.0
    num_prompts: int | None = None
    pool_requests: int | None = None
    rounds: int = 2
    repeats: int = 1
    together: bool = False
    restart_every: int | None = None
    share: bool = False
    tensor_parallel_size: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)

    def resolve_workload(self) -> Workload:
        """The workload at this cell's sizes.

        Raises:
            ValueError: There is none of this name.
        """
        if self.workload not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"--workloads {self.workload!r} is unknown: use {known}")
        given = {"num_prompts": self.num_prompts, "pool_requests": self.pool_requests}
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        workload = WORKLOADS[self.workload].scaled(self.scale)
        if self.budgets:
            changes["budgets"] = self.budgets
        return dataclasses.replace(workload, **changes)

    def check(self) -> None:
        """Complain before an engine starts.

        Raises:
            ValueError: An option names something unknown, or sizes are too small.
        """
        workload = self.resolve_workload()
        for contender in self.contenders():
            check_system(contender.system)
        block_size = (ENGINE_ARGS | self.engine_args)["block_size"]
        for budget in workload.budgets:
            if (tokens := workload.budget_tokens(budget)) < block_size:
                raise ValueError(
                    f"--budgets {budget} of {workload.name} at --scale {self.scale:g} "
                    f"is {tokens} tokens, less than a block of {block_size}: use "
                    "a larger one, or a smaller block_size in --engine-args"
                )
        if self.restart_every is not None and not (
            self.together and self.restart_every > 0
        ):
            raise ValueError(
                f"--restart-every {self.restart_every} needs --together and 1 or more: "
                "without it every turn is a new engine"
            )
        if workload.pool_requests < 2:
            raise ValueError("--pool-requests: the pool of ours must fit 2 at least")

    def contenders(self) -> list[Contender]:
        """Who takes turns, in this order."""
        budgets = self.resolve_workload().budgets
        ours = [Contender(p, b) for p in self.policies for b in budgets]
        return [Contender(name) for name in self.baselines] + ours

    def command(self) -> str:
        """The command line that repeats this cell."""
        parts = ["python", "-m", "benchmarks.compare", "--workloads", self.workload]
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            if value in (f.default, {}):
                continue
            parts.append("--" + f.name.replace("_", "-"))
            if value is True:
                continue
            if isinstance(value, tuple):
                parts += value
            else:
                parts.append(
                    json.dumps(value) if isinstance(value, dict) else f"{value}"
                )
        return shlex.join(parts)

    def key(self) -> str:
        """File name of its result; another for any other option."""
        budgets = "-".join(self.budgets).replace("%", "p") or "all"
        digest = hashlib.sha256(self.command().encode()).hexdigest()[:8]
        policies = "-".join(self.policies)
        tp = f"tp{self.tensor_parallel_size}"
        return f"{self.workload}_{policies}_{budgets}_{tp}_{digest}"

    def job(self, contender: Contender, requests: list[dict[str, Any]]) -> Job:
        """What a contender has to do in one turn."""
        workload, budget = self.resolve_workload(), contender.budget
        engine_args: dict[str, Any] = {
            **ENGINE_ARGS,
            "tensor_parallel_size": self.tensor_parallel_size,
            **self.engine_args,
        }
        request_blocks = -(-workload.max_model_len // engine_args["block_size"])
        return Job(
            system=contender.system,
            model=self.model,
            requests=requests,
            max_model_len=workload.max_model_len,
            pool_blocks=workload.pool_requests * request_blocks,
            budget_tokens=workload.budget_tokens(budget) if budget else None,
            share=budget if budget and budget.endswith("%") and self.share else "",
            prefix_caching=workload.prefix_len > 0 or workload.prompts_cached,
            prompts_cached=workload.prompts_cached,
            repeats=self.repeats,
            engine_args=engine_args,
        )


def run_cell(cell: Cell, measure: Measure) -> dict[str, Any]:
    """Let the systems of a cell take turns: A B, A B.

    Returns:
        JSON: the cell, where and when, and per contender its `samples` (in the
        order of the turns), their `summary` and its `ratios` over the first.
    """
    workload, contenders = cell.resolve_workload(), cell.contenders()
    source = prompt_source(cell.dataset_name, *_model(cell.model))
    requests = workload.requests(source)
    samples: dict[str, list[dict[str, Any]]] = {c.label: [] for c in contenders}
    turns = [c for _ in range(cell.rounds) for c in contenders]
    with tqdm(turns, desc=workload.name, unit="turn") as bar:
        for contender in bar:
            bar.set_postfix_str(contender.label)
            samples[contender.label] += measure(cell.job(contender, requests))
    return record(cell, samples)


def record(cell: Cell, samples: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The result of a cell; see `run_cell`."""
    workload, contenders = cell.resolve_workload(), cell.contenders()
    baseline = samples[contenders[0].label]
    return {
        "workload": dataclasses.asdict(workload),
        "scale": cell.scale,
        "share": cell.share,
        "model_id": cell.model or "SmolLM2-135M-Instruct",
        "tensor_parallel_size": cell.tensor_parallel_size,
        "engine_args": ENGINE_ARGS | cell.engine_args,
        "hardware": baseline[0]["hardware"],
        "vllm_version": version("vllm"),
        "date": datetime.date.today().isoformat(),
        "command": cell.command(),
        "systems": [
            {
                "system": contender.system,
                "label": contender.label,
                "budget_fraction": _fraction(workload, contender.budget),
                "summary": summary(samples[contender.label]),
                "ratios": ratios(samples[contender.label], baseline),
                "samples": samples[contender.label],
            }
            for contender in contenders
        ],
    }


def _fraction(workload: Workload, budget: str | None) -> float | None:
    if budget is None:
        return None
    return round(workload.budget_tokens(budget) / workload.max_model_len, 4)


@functools.cache
def _model(name: str) -> tuple[str, int]:
    """Name of the model, and its vocabulary size."""
    from transformers import AutoConfig

    name = name or str(ensure_model())
    return name, AutoConfig.from_pretrained(name).get_text_config().vocab_size
