"""The resident kernel against stock's CPU op and the memory's bandwidth.

    python -m benchmarks.kernel
    python -m benchmarks.kernel --dtypes float32 bfloat16 --threads 1 2

All read the same pages, far more than the last-level cache holds, in turns:
a plain streaming loop, vLLM's op over a full-length context, our kernel over a
budget of that length (every step graduates and scores), ours with budgets by head,
ours reading a part of the pages as the preset `mpcache` does (in GB of what is held),
ours merging what it drops, ours with as many tokens in int8 (in GB of what they take in
the model's type), and ours built without scores and graduation. Prints GB of
KV per second and the ratios turn by turn, and writes JSON. Wants a machine with nothing
else on it: threads of both wait for each other.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from vllm import _custom_ops as ops

from benchmarks.heads import placements_of
from benchmarks.report import spread, write_json
from vllm_h2o.attention.ops import LayerParams, ResidentRows, cpu
from vllm_h2o.attention.ops.cpu import library as c_library
from vllm_h2o.attention.pages import FIELDS, Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import SlotLayout, state_bytes
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.options import share_of
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.profile import HeadProfile, allocate
from vllm_h2o.policy.quantization import NUM_SCALES

STREAM, STOCK, OURS, HEADS, BARE = "stream", "stock", "h2o", "h2o by head", "bare"
PART, MERGING, ROUNDED = "mpcache", "h2o merging", "h2o int8"
SYSTEMS = (STREAM, STOCK, OURS, HEADS, PART, MERGING, ROUNDED, BARE)
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64  # SmolLM2-135M


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table per cell, write JSON."""
    args = parse_args(argv)
    cells = []
    for dtype in args.dtypes:
        state = State(getattr(torch, dtype), args)
        for threads in args.threads:
            torch.set_num_threads(threads)
            cells.append(measure(state, args.rounds) | {"dtype": dtype})
            print(table(cells[-1]), flush=True)
    write_json(args, cells=cells)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Sizes in rows, tokens and layers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8, help="requests")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each")
    parser.add_argument("--layers", type=int, default=4, help="caches, an even number")
    parser.add_argument(
        "--profile", type=Path, help="a head profile says who gets how many pages"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=8192, help="of --profile's requests"
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=100, help="turns of each")
    default = Path("benchmarks/results/kernel.json")
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args(argv)
    if args.layers % 2:
        parser.error(f"--layers is {args.layers}: heads lend between pairs, use even")
    if args.profile and args.layers != HeadProfile.load(args.profile).num_layers:
        parser.error(f"--layers is {args.layers}: give as many as {args.profile} has")
    return args


@dataclass
class Step:
    """One decoded token per row."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


class State:
    """Caches of some layers whose pages are full, and one pass over them each."""

    def __init__(self, dtype: torch.dtype, args: argparse.Namespace) -> None:
        self.dtype, self.rows = dtype, args.rows
        size, columns = args.block_size, args.context // args.block_size
        self.context = columns * size
        self.caches = [
            _full_cache(1 + args.rows * columns, size, dtype)
            for _ in range(args.layers)
        ]
        order = torch.randperm(args.rows * columns) + 1
        self.block_table = order.view(args.rows, columns).int()
        self.layers = [Pages.view(cache, FIELDS, True, True) for cache in self.caches]
        self.rounded = [
            _rounded_pages(1 + args.rows * columns, size) for _ in range(args.layers)
        ]
        for pages in self.layers + self.rounded:
            pages.attention.uniform_()
            pages.births.zero_()
        config = H2OConfig(budget=self.context)
        layout = SlotLayout.of_blocks(config, size, columns)
        self.params = LayerParams(layout, HEAD_SIZE**-0.5, 0.0, Mean())
        part = PRESETS["mpcache"]
        self.part = LayerParams(
            SlotLayout.of_blocks(part, size, columns), HEAD_SIZE**-0.5, 0.0, Mean(),
            read=share_of(part.read),
        )  # fmt: skip
        self.merging = replace(self.params, merge=True)
        blocks = _uneven_blocks(args, columns)
        parts = placements_of(self.layers, blocks, columns, config)
        self.by_head = [replace(self.params, placements=part) for part in parts]
        self.uniform = [self.params] * len(self.layers)
        # Late enough that the head with the largest budget has filled it too.
        self.position = max(2 * self.context, args.max_model_len)
        self.bytes = 2 * self.context * args.rows * NUM_KV_HEADS * HEAD_SIZE
        self.bytes *= dtype.itemsize * args.layers
        self.step = self._step()
        self.bare = c_library.load("-DH2O_BARE")
        self._stream = _stream_library()

    def _step(self) -> Step:
        query = torch.randn(self.rows, NUM_HEADS, HEAD_SIZE).to(self.dtype)
        kv = torch.randn(2, self.rows, NUM_KV_HEADS, HEAD_SIZE).to(self.dtype)
        return Step(query, kv[0], kv[1], torch.empty_like(query))

    def run(self, system: str) -> None:
        """Read every page once."""
        passes: dict[str, Callable[[], None]] = {
            STREAM: self.run_stream,
            STOCK: self.run_stock,
            OURS: lambda: self.run_ours(self.uniform),
            HEADS: lambda: self.run_ours(self.by_head),
            PART: lambda: self.run_ours([self.part] * len(self.layers)),
            MERGING: lambda: self.run_ours([self.merging] * len(self.layers)),
            ROUNDED: lambda: self.run_ours(self.uniform, self.rounded),
            BARE: self.run_bare,
        }
        passes[system]()

    def run_stream(self) -> None:
        """The plain loop, over as many bytes."""
        share = self.bytes // len(self.caches) // 64
        for cache in self.caches:
            self._stream(cache.data_ptr(), share, torch.get_num_threads())

    def run_stock(self) -> None:
        """vLLM's op over the whole context."""
        starts = torch.arange(self.rows + 1, dtype=torch.int32)
        lengths = torch.full((self.rows,), self.context, dtype=torch.int32)
        isa = "vec" if self.params.layout.block_size % 32 == 0 else "vec16"
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.rows, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_SIZE, seq_lens=lengths, dtype=self.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
            enable_kv_split=True,
        )  # fmt: skip
        for cache in self.caches:
            num_blocks, heads, size, _ = cache.shape
            keys, values = cache.view(num_blocks, heads, 2 * size, -1).chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(
                self.step.query, keys, values, self.step.output, starts, lengths,
                self.params.scale, True, None, -1, self.block_table, 0.0, metadata,
                None,
            )  # fmt: skip

    def run_ours(
        self, params: Sequence[LayerParams], layers: Sequence[Pages] | None = None
    ) -> None:
        """Our kernel, one step of every layer."""
        placement = BY_HEAD if params[0].placements else UNIFORM
        rows = ResidentRows(
            self.block_table,
            torch.full((self.rows,), self.position),
            torch.zeros(self.rows, dtype=torch.int64),
            placements=torch.full((self.rows,), placement, dtype=torch.int32),
        )
        self.position += 1
        step = self.step
        for pages, mine in zip(layers or self.layers, params, strict=True):
            cpu.decode_resident(
                step.query, step.key, step.value, pages, rows, mine, step.output
            )

    def run_bare(self) -> None:
        """Our kernel without scores and graduation."""
        with patch.object(cpu, "_library", lambda quantized=False: self.bare):
            self.run_ours(self.uniform)


def _full_cache(num_blocks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    page = NUM_KV_HEADS * size * 2 * HEAD_SIZE
    floats = HEAD_SIZE + size + 16  # bounds, lengths of keys, a threshold
    state = state_bytes(NUM_KV_HEADS, size, page_floats=floats)
    stride = page + state // dtype.itemsize
    raw = torch.randn(num_blocks * stride, dtype=torch.float32).to(dtype)
    raw.view(num_blocks, stride)[:, page:] = 0
    shape = (num_blocks, NUM_KV_HEADS, size, 2 * HEAD_SIZE)
    return raw.as_strided(shape, (stride, size * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1))


def _rounded_pages(num_blocks: int, size: int) -> Pages:
    page = NUM_KV_HEADS * size * 2 * HEAD_SIZE
    stride = page + state_bytes(NUM_KV_HEADS, size, len(FIELDS) + NUM_SCALES)
    raw = torch.randint(-127, 128, (num_blocks * stride,), dtype=torch.int8)
    shape = (num_blocks, NUM_KV_HEADS, size, 2 * HEAD_SIZE)
    cache = raw.as_strided(shape, (stride, size * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1))
    pages = Pages.view_cut(cache, size, BlockCut(1, 1, 1, stride), quantized=True)
    for scales in (pages.key_scales, pages.value_scales):
        assert scales is not None
        scales.fill_(1 / 40)
    return pages


def _uneven_blocks(args: argparse.Namespace, columns: int) -> list[list[int]]:
    """`[layers][NUM_KV_HEADS]` blocks by the profile, or, without one:

    Half, all and one and a half of the pages; the other way round next door.
    """
    if args.profile:
        size, longest = args.block_size, args.max_model_len // args.block_size
        profile = HeadProfile.load(args.profile)
        profile = profile.stretched(longest * size, columns * size)
        return allocate(profile, size, columns, longest, 1)
    few = max(columns // 2, 2)
    blocks = [[few, columns, 2 * columns - few], [2 * columns - few, columns, few]]
    return blocks * (args.layers // 2)


def _stream_library() -> Callable[..., int]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "stream.so"
        c_library.compile_source(Path(__file__).with_name("stream.c"), target)
        function = ctypes.CDLL(str(target)).h2o_stream
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return function


def measure(state: State, rounds: int) -> dict[str, Any]:
    """GB of KV per second, in turns, and what follows.

    Each turn has an order of its own. In one order, in which ours always came after
    stock's op, its scores seemed to cost 9 to 18 % (bfloat16, two threads), not 3.
    """
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for name in SYSTEMS:
        state.run(name)
    orders = random.Random(0)
    for _ in tqdm(range(rounds), unit="round"):
        for name in orders.sample(SYSTEMS, len(SYSTEMS)):
            start = time.perf_counter()
            state.run(name)
            rates[name].append(state.bytes / (time.perf_counter() - start) / 1e9)
    return {
        "threads": torch.get_num_threads(),
        "kv_bytes": state.bytes,
        "flop_per_byte": 2 * NUM_HEADS // NUM_KV_HEADS / state.dtype.itemsize,
        "gb_per_s": {name: spread(values) for name, values in rates.items()},
        "ratios": _ratios(rates),
    }


def _ratios(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Turn by turn."""

    def over(ours: str, theirs: str) -> dict[str, float]:
        pairs = zip(rates[ours], rates[theirs], strict=True)
        return spread(a / b for a, b in pairs)

    pairs = zip(rates[OURS], rates[BARE], strict=True)
    return {
        "h2o_over_stock": over(OURS, STOCK),
        "h2o_over_stream": over(OURS, STREAM),
        "stock_over_stream": over(STOCK, STREAM),
        "by_head_over_h2o": over(HEADS, OURS),
        "mpcache_over_h2o": over(PART, OURS),
        "merging_over_h2o": over(MERGING, OURS),
        "int8_over_h2o": over(ROUNDED, OURS),
        "share_of_scores_and_graduation": spread(1 - a / b for a, b in pairs),
    }


def table(cell: dict[str, Any]) -> str:
    """Medians, then [lowest, highest]; and the roofline."""
    lines = [
        "",
        f"{cell['dtype']}, {cell['threads']} threads, {cell['kv_bytes'] / 1e6:.0f} MB "
        "of KV a pass; GB per second",
    ]
    for kind in ("gb_per_s", "ratios"):
        for name, value in cell[kind].items():
            low, high = value["min"], value["max"]
            lines.append(f"{name:32}{value['median']:8.3f} [{low:.3f}, {high:.3f}]")
    bandwidth = cell["gb_per_s"][STREAM]["median"]
    intensity = cell["flop_per_byte"]
    lines.append(
        f"roofline: a KV byte needs {intensity:g} FLOP (2 per element and query head, "
        f"{NUM_HEADS // NUM_KV_HEADS} query heads a KV head); at {bandwidth:.1f} GB/s "
        f"that is {bandwidth * intensity:.1f} GFLOP/s, far below the cores' peak: "
        "memory is the limit"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
