"""The machine that measures: what it is, and how ranks share its cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
SPIN_COUNT = "GOMP_SPINCOUNT"
THREADS = os.environ.get("OMP_NUM_THREADS")
"""Engines in this process obey it, whatever cores they have.

As it was given, since vLLM sets it too."""


def hardware() -> str:
    """Cores that this process may use, CPU model, OpenMP's limit of threads, GPUs."""
    import torch

    gpus = [
        torch.cuda.get_device_name(i)
        for i in range(torch.cuda.device_count())  # 0 without CUDA
    ]
    cores = f"{len(os.sched_getaffinity(0))} cores of {_cpu_name()}"
    if THREADS:
        cores += f", OMP_NUM_THREADS={THREADS}"
    return " + ".join([cores, *gpus])


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def engine_env(tensor_parallel_size: int) -> dict[str, str]:
    """Variables that an engine with so many ranks runs best with on this machine.

    Stock vLLM's best here, for all systems; a variable that is set already stays:

    * vLLM's CPU platform gives every rank a NUMA node less one core. All cores are
      dealt out by hand instead, since stock makes half as many tokens again on both of
      two cores than on one, and there may be fewer nodes than ranks.
    * GNU's OpenMP threads, which vLLM's CPU build runs on, spin for milliseconds after
      a parallel part (300000 turns), on the cores that vLLM's engine process needs
      between two steps. They stop sooner: stock's steps are a tenth shorter. No sooner
      than this: with 10000 turns eight cached prompts took H2O a third longer, probably
      since threads sleep while Python is between two kernels of a step. To Intel's
      OpenMP vLLM says so itself (`KMP_BLOCKTIME`).
    """
    env = {
        THREADS_BIND: threads_bind(
            sorted(os.sched_getaffinity(0)), tensor_parallel_size
        ),
        SPIN_COUNT: "50000",
    }
    return {name: value for name, value in env.items() if name not in os.environ}


def threads_bind(cores: list[int], ranks: int) -> str:
    """Equal shares of the cores, such as `0,1|2,3`.

    Raises:
        ValueError: There are fewer cores than ranks.
    """
    share = len(cores) // ranks
    if not share:
        raise ValueError(
            f"--tensor-parallel-size {ranks} needs as many cores, this machine has "
            f"{len(cores)}: use fewer ranks"
        )
    parts = (cores[i * share : (i + 1) * share] for i in range(ranks))
    return "|".join(",".join(map(str, part)) for part in parts)
