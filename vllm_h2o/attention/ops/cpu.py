"""The C kernels: built with the system's compiler at first use, cached, by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_h2o.attention.ops import (
    Chosen,
    DecodeParams,
    ResidentRows,
    ScoredLayer,
    reference,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout

_SOURCES = Path(__file__).parents[1] / "csrc"
# Sums may be reordered so that they vectorize; divisions must stay exact, and
# comparisons of infinities defined, so no -ffast-math.
_FLAGS = (
    "-shared -fPIC -O3 -march=native -fopenmp -fno-math-errno "
    "-fno-trapping-math -fassociative-math -fno-signed-zeros"
).split()

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def _fields(pointers: str, integers: str, floats: str = "") -> list[tuple[str, Any]]:
    """Of a structure that has its pointers first and its floats last."""
    kinds = (
        (pointers, ctypes.c_void_p),
        (integers, ctypes.c_int64),
        (floats, ctypes.c_float),
    )
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Args(ctypes.Structure):
    """Mirror of `h2o_decode_args` in decode.c."""

    _fields_ = _fields(
        "query key value output cache block_table positions first_queries "
        "head_layouts head_offsets head_columns",
        "num_rows num_heads num_kv_heads head_size block_size "
        "query_stride key_stride value_stride output_stride "
        "block_table_stride page_stride state_offset "
        "budget heavy_slots pinned_slots head_blocks largest_budget "
        "whole_blocks score_mean num_threads",
        "scale softcap score_decay",
    )


class _CompressArgs(ctypes.Structure):
    """Mirror of `h2o_compress_args` in decode.c."""

    _fields_ = [
        ("target", _Args),
        *_fields("source_blocks positions slots scores", "num_tokens most in_place"),
    ]


class _ChooseArgs(ctypes.Structure):
    """Mirror of `h2o_choose_args` in choose.h."""

    _fields_ = _fields(
        "scores layouts positions slots",
        "num_kv_heads num_tokens scores_stride most "
        "sinks first_query score_mean num_threads",
    )


class _ObserveArgs(ctypes.Structure):
    """Mirror of `h2o_observe_args` in decode.c."""

    _fields_ = _fields(
        "query cache blocks scores output",
        "num_queries num_heads num_kv_heads head_size block_size "
        "query_stride output_stride scores_stride page_stride "
        "first_position first_scoring num_threads",
        "scale softcap score_decay",
    )


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """See `vllm_h2o.attention.ops.decode_resident`."""
    num_rows, num_heads, head_size = query.shape
    layout = params.layout
    check_supported(query.dtype, head_size, layout.block_size)
    assert pages.keys.dtype == query.dtype
    for tensor in (query, key, value, output):
        assert tensor.dtype == query.dtype
        assert tensor.stride(1) == head_size and tensor.stride(2) == 1
    assert rows.block_table.dtype == torch.int32
    assert rows.block_table.stride(1) == 1
    assert rows.positions.is_contiguous() and rows.first_queries.is_contiguous()
    args = _Args(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        output=output.data_ptr(),
        positions=rows.positions.data_ptr(),
        first_queries=rows.first_queries.data_ptr(),
        num_rows=num_rows,
        num_heads=num_heads,
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        output_stride=output.stride(0),
        scale=params.scale,
        softcap=params.softcap,
        score_decay=params.score_decay,
        **_slot_args(pages, rows.block_table, params),
    )
    if _function("decode", query.dtype)(ctypes.byref(args)):
        raise MemoryError("the H2O decode kernel could not allocate its scratch")


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    position: int,
    first_query: int,
    config: H2OConfig,
) -> None:
    """See `vllm_h2o.attention.ops.transition`.

    The heads of all layers share out the threads: heads with budgets of their own
    have very different amounts of work.
    """
    scores = [layer.scores for layer in layers]
    params = [layer.params for layer in layers]
    chosen = choose(scores, position, first_query, config, params)
    compress(layers, source_blocks, target_blocks, position, chosen)


def choose(
    scores: Sequence[torch.Tensor],
    position: int,
    first_query: int,
    config: H2OConfig,
    params: Sequence[DecodeParams],
) -> list[Chosen]:
    """See `reference.choose`, of every layer; whole blocks are chosen in torch."""
    layers = list(zip(scores, params, strict=True))
    if params[0].layout.whole_blocks:
        return [
            reference.choose(mine, position, first_query, config, constants)
            for mine, constants in layers
        ]
    chosen, all_args = [], []
    for mine, constants in layers:
        num_kv_heads, num_tokens = mine.shape
        layout = constants.layout
        layouts = tuple(constants.layouts_at(position, num_kv_heads))
        sizes, largest = _choice_sizes(layouts, layout.budget, config.pooling)
        positions, slots = torch.empty(
            2, num_kv_heads, min(num_tokens, largest), dtype=torch.int64
        )
        assert mine.dtype == torch.float32 and mine.stride(1) == 1
        chosen.append(Chosen(positions, slots))
        all_args.append(
            _ChooseArgs(
                scores=mine.data_ptr(),
                layouts=sizes.data_ptr(),
                positions=positions.data_ptr(),
                slots=slots.data_ptr(),
                num_kv_heads=num_kv_heads,
                num_tokens=num_tokens,
                scores_stride=mine.stride(0),
                most=positions.shape[1],
                sinks=layout.sinks,
                first_query=first_query,
                score_mean=config.score == "mean",
                num_threads=torch.get_num_threads(),
            )
        )
    _run(_library().h2o_choose, "choose", all_args)
    return chosen


@functools.cache
def _choice_sizes(
    layouts: tuple[SlotLayout, ...], budget: int, pooling: int
) -> tuple[torch.Tensor, int]:
    """`[num_kv_heads, 3]` budget, heavy slots and pooling; and the largest budget.

    A head with less than the common `budget` does not pool.
    """
    sizes = [
        (x.budget, x.heavy_slots, pooling if x.budget >= budget else 1) for x in layouts
    ]
    return torch.tensor(sizes), max(x.budget for x in layouts)


def compress(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    position: int,
    chosen: Sequence[Chosen],
) -> None:
    """See `reference.compress`, of every layer."""
    row = torch.tensor([position]), torch.tensor([0])  # its query does not matter
    assert source_blocks.dtype == target_blocks.dtype == torch.int32
    assert source_blocks.stride(0) == target_blocks.stride(0) == 1
    all_args = []
    for layer, mine in zip(layers, chosen, strict=True):
        scores = layer.scores
        assert scores.dtype == torch.float32 and scores.is_contiguous()
        assert mine.positions.is_contiguous() and mine.slots.is_contiguous()
        all_args.append(
            _CompressArgs(
                target=_Args(
                    positions=row[0].data_ptr(),
                    first_queries=row[1].data_ptr(),
                    num_rows=1,
                    **_slot_args(layer.pages, target_blocks[None], layer.params),
                ),
                source_blocks=source_blocks.data_ptr(),
                positions=mine.positions.data_ptr(),
                slots=mine.slots.data_ptr(),
                scores=scores.data_ptr(),
                num_tokens=scores.shape[1],
                most=mine.positions.shape[1],
                in_place=source_blocks.data_ptr() == target_blocks.data_ptr(),
            )
        )
    function = _function("compress", layers[0].pages.keys.dtype)
    _run(function, "compress", all_args)


def _run(function: Any, name: str, all_args: Sequence[ctypes.Structure]) -> None:
    """Call a kernel that takes the arguments of all layers."""
    array = (type(all_args[0]) * len(all_args))(*all_args)
    if function(array, ctypes.c_int64(len(all_args))):
        raise MemoryError(f"the H2O {name} kernel could not allocate its scratch")


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    scores: torch.Tensor,
    params: DecodeParams,
) -> None:
    """See `vllm_h2o.attention.ops.observe`."""
    attend_observed(query, pages, dense_blocks, first_position, 0, scores, params, None)


def attend_observed(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    first_scoring: int,
    scores: torch.Tensor,
    params: DecodeParams,
    output: torch.Tensor | None,
) -> None:
    """See `vllm_h2o.attention.ops.attend_observed`; None: nobody wants the output."""
    num_queries, num_heads, head_size = query.shape
    _, num_kv_heads, _, block_size = pages.keys.shape
    num_tokens = first_position + num_queries
    check_supported(query.dtype, head_size, block_size)
    assert pages.keys.dtype == query.dtype
    for tensor in (query, query if output is None else output):
        assert tensor.dtype == query.dtype
        assert tensor.stride(1) == head_size and tensor.stride(2) == 1
    assert dense_blocks.dtype == torch.int32 and dense_blocks.stride(0) == 1
    assert len(dense_blocks) * block_size >= num_tokens
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    assert scores.shape[0] == num_kv_heads and scores.shape[1] >= num_tokens
    if params.score_decay != 1.0:
        scores.mul_(params.score_decay ** (num_queries - first_scoring))
    args = _ObserveArgs(
        query=query.data_ptr(),
        cache=pages.keys.data_ptr(),
        blocks=dense_blocks.data_ptr(),
        scores=scores.data_ptr(),
        output=None if output is None else output.data_ptr(),
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        query_stride=query.stride(0),
        output_stride=0 if output is None else output.stride(0),
        scores_stride=scores.stride(0),
        page_stride=pages.page_stride,
        first_position=first_position,
        first_scoring=first_scoring,
        num_threads=torch.get_num_threads(),
        scale=params.scale,
        softcap=params.softcap,
        score_decay=params.score_decay,
    )
    if _function("observe", query.dtype)(ctypes.byref(args)):
        raise MemoryError("the H2O observe kernel could not allocate its scratch")


def _slot_args(
    pages: Pages, block_table: torch.Tensor, params: DecodeParams
) -> dict[str, int]:
    """The arguments that say where slots are."""
    layout, heads = params.layout, params.heads
    args = {
        "cache": pages.keys.data_ptr(),
        "num_kv_heads": pages.keys.shape[1],
        "head_size": pages.keys.shape[2],
        "block_size": layout.block_size,
        "block_table": block_table.data_ptr(),
        "block_table_stride": block_table.stride(0),
        "page_stride": pages.page_stride,
        "state_offset": pages.state_offset,
        "budget": layout.budget,
        "largest_budget": params.largest_budget,
        "heavy_slots": layout.heavy_slots,
        "pinned_slots": layout.pinned_slots,
        "whole_blocks": layout.whole_blocks,
        "score_mean": params.mean,
        "num_threads": torch.get_num_threads(),
    }
    if heads is not None:
        assert not layout.whole_blocks
        args |= {
            "head_layouts": heads.sizes.data_ptr(),
            "head_offsets": heads.offsets.data_ptr(),
            "head_columns": heads.columns.data_ptr(),
            "head_blocks": heads.columns.shape[1],
        }
    return args


def _function(name: str, dtype: torch.dtype):
    return getattr(_library(), f"h2o_{name}_{_DTYPES[dtype]}")


def check_supported(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Raise ValueError for what the kernel does not have."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"H2O on CPU has no kernel for dtype {dtype} (--dtype): "
            "use float32, bfloat16 or float16"
        )
    if head_size % 16 or block_size % 16:
        raise ValueError(
            f"H2O on CPU needs a head size ({head_size}) and a --block-size "
            f"({block_size}) that are multiples of 16"
        )


@functools.cache
def _library() -> ctypes.CDLL:
    return load()


def load(*flags: str) -> ctypes.CDLL:
    """Load the kernels, building them when this machine has no copy yet.

    Args:
        flags: More of the compiler's, for variants to measure.
    """
    target = _cache_folder() / f"h2o_decode-{_fingerprint(flags)}.so"
    if not target.exists():
        _build(target, flags)
    # torch has loaded its OpenMP by now; the same soname makes ours resolve to
    # it, so both share one pool of threads.
    return ctypes.CDLL(str(target))


def build(dtype: torch.dtype) -> None:
    """Build (if needed) and load the kernels, so that no request waits for them.

    Raises:
        RuntimeError: There is no compiler, or it failed.
        ValueError: It has no `dtype`.
    """
    if not hasattr(_library(), f"h2o_decode_{_DTYPES[dtype]}"):
        raise ValueError(
            f"H2O's kernels were built without {_DTYPES[dtype]} (--dtype), which "
            f"{_compiler()} does not have: set CC to gcc 12 or newer, or use "
            "--dtype bfloat16"
        )


def _cache_folder() -> Path:
    root = os.environ.get("VLLM_H2O_CACHE", Path.home() / ".cache" / "vllm_h2o")
    return Path(root) / "kernels"


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError(
        "H2O on CPU needs a C compiler to build its kernel and found none: "
        "install gcc or clang, or set CC to one"
    )


def _fingerprint(flags: Sequence[str]) -> str:
    """Identify source, flags, compiler and processor (-march=native)."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(" ".join([*_FLAGS, *flags]).encode())
    digest.update(_compiler().encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "Features")
    return "".join(sorted({line for line in lines if line.startswith(keys)}))


def _build(target: Path, flags: Sequence[str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Workers of one engine may build at the same time: each into a file of its
    # own, the rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = Path(folder) / target.name
        compile_source(_SOURCES / "decode.c", partial, *flags)
        partial.rename(target)


def compile_source(source: Path, target: Path, *flags: str) -> None:
    """Compile one C file to a shared object, with the kernels' flags and more.

    Raises:
        RuntimeError: There is no compiler, or it failed; with what it said.
    """
    command = [_compiler(), *_FLAGS, *flags, str(source), "-o", str(target), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"building the H2O kernel failed: {' '.join(command)}\n{result.stderr}"
        )
