"""Time on a device."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from benchmarks.gpu.sizes import Sizes

_REPEATS = 20
_WARM_MS, _SAMPLE_MS = 200.0, 5.0
"""Of replays before anything is timed, since an idle GPU's clock is slow; and of each
sample, beside which the launch of its first replay is nothing."""


def device(tiny: bool) -> torch.device:
    """The GPU, or the CPU for --tiny.

    Raises:
        SystemExit: There is no GPU.
    """
    if tiny:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: --tiny runs the code paths on the CPU")
    return torch.device("cuda")


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on."""
    name = "interpreter"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def microseconds(
    call: Callable[[], Any], device: torch.device, launched: bool = False
) -> float:
    """Median time of a call, warm: replayed as a CUDA graph, or `launched` each time.

    Prompts run outside of graphs: the host may take longer than their kernels.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    repeat = call if launched else _captured(call)
    repeat()
    once = _elapsed_ms(repeat, 3) / 3
    _elapsed_ms(repeat, int(_WARM_MS / once) + 1)
    count = int(_SAMPLE_MS / once) + 1
    times = [_elapsed_ms(repeat, count) / count for _ in range(_REPEATS)]
    return statistics.median(times) * 1e3


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a call, after it has compiled and allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _elapsed_ms(repeat: Callable[[], Any], times: int) -> float:
    """Milliseconds of so many calls, one after another."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        repeat()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def copy_bandwidth(device: torch.device, sizes: Sizes) -> float:
    """GB/s of a large copy, bytes read plus bytes written."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    duration = microseconds(lambda: target.copy_(source), device)
    return 2 * sizes.copy_bytes / duration / 1e3
