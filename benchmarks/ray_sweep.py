"""The cells of `benchmarks.compare` as Ray tasks, on this machine or a cluster.

    python -m benchmarks.ray_sweep --workloads paper --tensor-parallel-sizes 1 2
    python -m benchmarks.ray_sweep --address ray://head:10001 --model MODEL

A cell is one workload, budget, policy and number of ranks, with the baselines in
turns. Every turn is an engine in an actor of its own, in the cell's placement group
of one bundle per rank. A cell whose result file exists is skipped; one that fails
leaves `<cell>.failed.json`, with the error, and is tried again by the next sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tqdm import tqdm

from benchmarks.cells import Cell, run_cell
from benchmarks.compare import add_cell_args, cells_of, result_path, save
from benchmarks.machine import engine_env
from benchmarks.process import ENGINE_ENV
from benchmarks.systems import Job

ROOT = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> None:
    """Run what is missing; exit status 1 if a cell failed."""
    args = parse_args(argv)
    cells = sweep_cells(args)
    start_ray(args.address, args.num_cpus)
    counts = sweep(cells, args.output_dir, args.max_concurrent_cells)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    sys.exit(1 if counts["failed"] else 0)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_cell_args(parser)
    parser.add_argument("--tensor-parallel-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--address", help="of a running Ray; default: start one here")
    parser.add_argument("--num-cpus", type=int, help="of the Ray started here")
    parser.add_argument(
        "--max-concurrent-cells",
        type=int,
        help="default: 1 on CPUs, where cells would share cores; else the GPUs",
    )
    return parser.parse_args(argv)


def sweep_cells(args: argparse.Namespace) -> list[Cell]:
    """One cell per workload, budget, policy and number of ranks."""
    return [
        dataclasses.replace(
            cell, budgets=(budget,), policies=(policy,), tensor_parallel_size=ranks
        )
        for cell in cells_of(args)
        for budget in cell.resolve_workload().budgets
        for policy in cell.policies
        for ranks in args.tensor_parallel_sizes
    ]


def start_ray(address: str | None = None, num_cpus: int | None = None) -> None:
    """Connect to a cluster, or start Ray here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers give way to others (niceness 15): what is measured must not.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None:
        ray.init(num_cpus=num_cpus, include_dashboard=False)
        return
    # Its nodes have vllm_h2o installed, but not the benchmarks.
    excludes = [".git", ".venv", "benchmarks/results"]
    ray.init(address, runtime_env={"working_dir": str(ROOT), "excludes": excludes})


def sweep(
    cells: list[Cell], folder: Path, max_concurrent_cells: int | None = None
) -> Counter[str]:
    """Run the cells that have no result yet.

    Args:
        cells: What to run.
        folder: Gets the results; see `compare.save`.
        max_concurrent_cells: More than one at a time only where they do not share
            what is measured.

    Returns:
        How many cells are `done`, `failed` and `skipped`.
    """
    resource = rank_resource()
    limit = max_concurrent_cells or int(ray.cluster_resources().get("GPU", 1))
    pending = [c for c in cells if not result_path(c, folder).exists()]
    counts = Counter(done=0, failed=0, skipped=len(cells) - len(pending))
    running: dict[Any, Cell] = {}
    with tqdm(total=len(pending), unit="cell", desc="sweep") as bar:
        while pending or running:
            while pending and len(running) < limit:
                cell = pending.pop(0)
                running[cell_task.remote(cell, resource)] = cell
            (task,), _ = ray.wait(list(running))
            counts[_finish(task, running.pop(task), folder)] += 1
            bar.update()
    return counts


def _finish(task: Any, cell: Cell, folder: Path) -> str:
    """Write what became of a cell."""
    path = result_path(cell, folder)
    failure = path.with_suffix(".failed.json")
    try:
        result = ray.get(task)
    except ray.exceptions.RayError as error:
        failure.parent.mkdir(parents=True, exist_ok=True)
        record = {"command": cell.command(), "error": str(error)}
        failure.write_text(json.dumps(record, indent=1))
        return "failed"
    save(result, cell, folder)
    failure.unlink(missing_ok=True)
    return "done"


def rank_resource() -> str:
    """What a rank runs on in this cluster: `GPU` where there are any, or `CPU`."""
    return "GPU" if ray.cluster_resources().get("GPU") else "CPU"


@ray.remote(num_cpus=0, max_retries=0)
def cell_task(cell: Cell, resource: str) -> dict[str, Any]:
    """Run a cell in a placement group of its own; see `run_cell`.

    Raises:
        ValueError: The cluster never has room for the ranks.
    """
    ranks = cell.tensor_parallel_size
    if ranks > (room := _room(resource)):
        raise ValueError(
            f"--tensor-parallel-sizes {ranks} needs {ranks} {resource}s, the cluster "
            f"has {room:g}: use fewer ranks"
        )
    bundle = {"CPU": 1.0} | {resource: 1.0}
    # Ranks of vLLM's "mp" executor are processes of one machine.
    strategy = "PACK" if resource == "GPU" else "STRICT_PACK"
    group = placement_group([bundle] * ranks, strategy=strategy)
    try:
        ray.get(group.ready())
        return run_cell(cell, lambda job: measure_in_actor(job, group, resource))
    finally:
        remove_placement_group(group)


def _room(resource: str) -> float:
    """Most ranks of one engine: of one machine on CPUs."""
    totals = [node["Resources"].get(resource, 0.0) for node in ray.nodes()]
    return sum(totals) if resource == "GPU" else max(totals)


def measure_in_actor(job: Job, group: Any, resource: str) -> list[dict[str, Any]]:
    """One turn: an engine in a new actor, with its ranks in the group's bundles."""
    # vLLM's CPU platform refuses the Ray executor.
    executor = "ray" if resource == "GPU" else "mp"
    engine_args = job.engine_args | {"distributed_executor_backend": executor}
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    env = {name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()}
    actor = EngineActor.options(
        scheduling_strategy=strategy, runtime_env={"env_vars": env}
    ).remote()
    try:
        job = dataclasses.replace(job, engine_args=engine_args)
        return ray.get(actor.measure.remote(dataclasses.asdict(job)))
    finally:
        ray.kill(actor)


@ray.remote(num_cpus=1, max_restarts=0)
class EngineActor:
    """A process for one engine."""

    def measure(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """See `systems.measure`."""
        # Ray hides the GPUs from an actor that asks for none; its ranks do.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        # Ray's own, of the CPUs asked for: vLLM counts its threads itself.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(engine_env(job["engine_args"]["tensor_parallel_size"]))
        from benchmarks.systems import measure

        return measure(job)


if __name__ == "__main__":
    main()
