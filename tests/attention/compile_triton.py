"""Compile every Triton kernel to machine code, for a GPU that need not be there.

    python -m tests.attention.compile_triton 90

With another triton than the installed one, such as 3.6 of the GPU benchmark:
`pip install --no-deps --target DIR triton==3.6.0`, and DIR first in PYTHONPATH.

The interpreter runs what the compiler refuses (a loop variable that changes its
type, say), so both are needed. Prints a JSON object: shared memory in bytes by
kernel, how often each was compiled for layers, batches and prompts that differ
only in their sizes, and how many loads of 1 or 2 bytes at a time are left in the
attention over bfloat16 K and V, and over int8.
"""

import dataclasses
import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.attention.triton_state import empty_pages
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import (
    Chunk,
    Held,
    LayerParams,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.ops.chunks import most_held
from vllm_h2o.attention.ops.triton import (
    DecodeScratch,
    Tuning,
    compress_chunk,
    decode_resident,
    draft_log,
    observe,
    order_rings,
    read_on,
    score_by_gate,
    take_back,
    transition,
)
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.placement import Placement, lend
from vllm_h2o.policy.rotation import Rotation

SPARSE = "rank_kernel", "bound_kernel"
"""Kernels of queries that read a part of the pages."""


class NoDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_only(capability):
    """Make launches compile and not run; return what they compile, filled later."""
    driver.set_active(NoDevice(capability))
    compiled, run = [], JITFunction.run

    def compile_(self, *args, warmup, **kwargs):
        kernel = run(self, *args, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        compiled.append((self.__name__, kernel))

    JITFunction.run = compile_
    return compiled


def launch_all(dtype, head_size, group, block_size, softcap, kind, reads=False):
    """Launch every kernel once; those that read later chunks only if asked to."""
    whole_blocks, by_head = kind == "blocks", kind in ("by head", "int8")
    layout = SlotLayout(block_size, 1024, 1024, 0, whole_blocks)
    pages = dense = empty_pages(4, 2, head_size, block_size, dtype)
    if kind == "int8":
        pages = empty_pages(4, 2, head_size, block_size, torch.int8)
    query = torch.empty(3, 2 * group, head_size, dtype=dtype)
    key = torch.empty(3, 2, head_size, dtype=dtype)
    table = torch.empty(3, layout.budget_blocks, dtype=torch.int32)
    zeros = torch.zeros(3, dtype=torch.long)
    index = zeros.int() if by_head else None
    grown_at = zeros if by_head else None
    rows = ResidentRows(table, zeros, zeros, placements=index, grown_at=grown_at)
    params = LayerParams(layout, 0.1, softcap, Mean(0.9))
    if softcap:  # Sinks too, of the model's type.
        sinks = torch.zeros(2 * group, dtype=dtype)
        params = dataclasses.replace(params, sink_logits=sinks)
    if by_head:
        params = dataclasses.replace(
            params, placements=placements_of(pages, [512, 1024])
        )
    decode_resident(query, key, key, pages, rows, params, query)
    if not whole_blocks:
        decode_drafts(query, key, pages, rows, params)
    if kind == "int8":
        stays = ResidentRows(table, zeros, zeros, stay_dense=True)
        own, alike = (
            dataclasses.replace(dense, state={}, births=dense.births[:0]),
            dataclasses.replace(params, placements=None),
        )
        decode_resident(query, key, key, own, stays, alike, query)
    blocks, state = torch.arange(4), {"attention": torch.zeros(2, block_size)}
    observe(query, dense, blocks, 7, state, params)
    layer, config = ScoredLayer(pages, state, params, dense), H2OConfig()
    transition([layer], blocks.int(), Held(table[0]), 0, config)
    held = Held(table[0])
    transition([ScoredLayer(pages, state, params)], held.pages, held, 0, config)
    gated = dataclasses.replace(params, gate=gate_of(2, head_size, 64, dtype))
    score_by_gate([ScoredLayer(dense, state, gated)], blocks.int(), 0)
    order_rings([layer], Held(table[0], UNIFORM, 9))
    if not whole_blocks:
        end_chunk(ScoredLayer(pages, state, params, dense), table[0], UNIFORM, 9)
    if reads:
        read(query, dense, pages, table[0], params, UNIFORM, 9)


def launch_sparse(dtype, head_size, group, block_size, kind):
    """Decode by queries that read a part, and make the bounds of what is compressed."""
    layout = SlotLayout(block_size, 1024, 1024, 4, kind == "blocks")
    of = torch.int8 if kind == "int8" else dtype
    pages = empty_pages(4, 2, head_size, block_size, of, reads_part=True)
    dense = empty_pages(4, 2, head_size, block_size, dtype)
    own = placements_of(pages, [512, 1024]) if kind == "by head" else None
    params = LayerParams(layout, 0.1, 0.0, Mean(), own, read=0.2)
    query = torch.empty(3, 2 * group, head_size, dtype=dtype)
    key = torch.empty(3, 2, head_size, dtype=dtype)
    table = torch.empty(3, layout.budget_blocks, dtype=torch.int32)
    zeros = torch.zeros(3, dtype=torch.long)
    by_head = {"placements": zeros.int(), "grown_at": zeros} if own else {}
    rows = ResidentRows(table, zeros, zeros, **by_head)
    decode_resident(query, key, key, pages, rows, params, query)
    layer = ScoredLayer(pages, {"attention": torch.zeros(2, 48)}, params, dense)
    held = Held(table[0], BY_HEAD if own else UNIFORM)
    transition([layer], torch.zeros(3).int(), held, 0, H2OConfig())


def decode_drafts(query, key, pages, rows, params):
    """Two tokens of some row, and one taken back."""
    num_rows, num_kv_heads = key.shape[:2]
    ones = torch.ones(num_rows, dtype=torch.int32)
    rows = dataclasses.replace(rows, counts=ones, starts=ones, most_tokens=2)
    slots = num_rows * num_kv_heads * params.largest_budget
    log = draft_log(pages, num_rows, 1, slots)
    decode_resident(query, key, key, pages, rows, params, query, log)
    take_back([LoggedLayer(pages, params, log)], rows, ones)


def end_chunk(layer, table, placement, num_tokens):
    """Compress what is held and a chunk of 9 tokens."""
    held, end = Held(table, placement, num_tokens), num_tokens + 9
    num_kv_heads = layer.pages.keys.shape[1]
    most = most_held(held, num_kv_heads, layer.params)
    state = {"attention": torch.zeros(num_kv_heads, most + 9)}
    chunk = Chunk(end, num_tokens, 0, num_tokens, table, held)
    layer = dataclasses.replace(layer, state=state)
    compress_chunk([layer], chunk, H2OConfig())


def read(query, dense, pages, table, params, placement, num_tokens):
    """Read a chunk beside what is held, in two steps."""
    middle, end = num_tokens + len(query), num_tokens + 2 * len(query)
    held = Held(table, placement, num_tokens)
    chunk, state = Chunk(end, num_tokens, 0, num_tokens, table, held), {}
    for first in (num_tokens, middle):
        read_on(query, first, dense, pages, chunk, state, params, query)


def gate_of(num_kv_heads, head_size, rotary_dim, dtype):
    """Of keys that are rotated in part, if need be."""
    weights = torch.zeros(num_kv_heads, num_features(head_size, head_size))
    angles = torch.zeros(8192, rotary_dim, dtype=dtype)
    return LayerGate(weights, Rotation(angles), group=1)


def placements_of(pages, heavy):
    """Budgets by head, of twice as many slots as are heavy."""
    layouts = [SlotLayout(pages.keys.shape[3], n, n, 0, False) for n in heavy]
    blocks = [layout.budget_blocks for layout in layouts]
    size = layouts[0].block_size
    placement = Placement(max(blocks) * size, [layouts], lend([blocks], max(blocks)))
    layout = max(layouts, key=lambda layout: layout.budget)
    return PlacementTable.of([pages], layout, placement).parts()[0]


def launch_decodes():
    """Decode in layers and batches that differ only in their sizes."""
    layout = SlotLayout(16, 512, 512, 0, False)
    pages = empty_pages(4, 2, 128, 16, torch.bfloat16)
    sizes = ((1, 1, [512, 1024]), (6, 3, [512, 512]), (5, 16, [256, 768]))
    for num_rows, num_splits, heavy in sizes:
        own = placements_of(pages, heavy)
        params = LayerParams(layout, 0.1, 0.0, Mean(0.9), own)
        query = torch.empty(num_rows, 8, 128, dtype=torch.bfloat16)
        key = torch.empty(num_rows, 2, 128, dtype=torch.bfloat16)
        table = torch.empty(num_rows, layout.budget_blocks, dtype=torch.int32)
        scratch = DecodeScratch.allocate(
            num_rows, 8, 2, 128, params.layout.budget, params.largest_budget,
            query.device, Tuning(num_splits=num_splits),
        )  # fmt: skip
        zeros = torch.zeros(num_rows, dtype=torch.long)
        rows = ResidentRows(table, zeros, zeros, scratch, zeros.int(), grown_at=zeros)
        decode_resident(query, key, key, pages, rows, params, query)
        decode_drafts(query, key, pages, rows, params)


def launch_prompts():
    """Score and compress prompts that differ in sizes and in where their blocks are.

    The blocks of a row of vLLM's block table begin anywhere, for the compiler: at an
    address that 16 divides, or not. The first is what a worker warms up with.
    """
    layout = SlotLayout(16, 512, 512, 0, False)
    pages = empty_pages(4, 3, 128, 16, torch.bfloat16)
    own = placements_of(pages, [256, 768, 512])
    params = LayerParams(layout, 0.1, 0.0, Mean(), own)
    gated = dataclasses.replace(params, gate=gate_of(3, 128, 128, torch.bfloat16))
    sizes = ((1025, 1, 0), (4096, 32, 1), (48, 16, 3), (1023, 32, 2))
    for num_tokens, num_queries, first in sizes:
        table = torch.zeros(2, 512, dtype=torch.int32)[1, first:]
        query = torch.empty(num_queries, 6, 128, dtype=torch.bfloat16)
        state, start = (
            {"attention": torch.zeros(3, num_tokens)},
            num_tokens - num_queries,
        )
        observe(query, pages, table, start, state, params)
        # What a gate writes lies behind another layer's, so that it begins anywhere.
        state = {"attention": torch.zeros(2, 3, num_tokens)[1]}
        placement = BY_HEAD if num_tokens > layout.budget else UNIFORM
        layer, held = ScoredLayer(pages, state, params), Held(table, placement)
        for source in (table, table.clone()[first % 2 :]):
            transition([layer], source, held, start, H2OConfig())
        score_by_gate([ScoredLayer(pages, state, gated)], table, start)
        order_rings([layer], Held(table, placement, num_tokens, first))
        end_chunk(layer, table, BY_HEAD, num_tokens)
        read(query, pages, pages, table, params, placement, num_tokens)


if __name__ == "__main__":
    compiled = compile_only(int(sys.argv[1]))
    launch_all(torch.bfloat16, 128, 4, 16, softcap=0.0, kind="tokens")
    launch_all(torch.bfloat16, 128, 4, 16, softcap=0.0, kind="by head", reads=True)
    launch_all(torch.bfloat16, 128, 4, 32, softcap=0.0, kind="int8")
    short_loads = [
        len(re.findall(r"ld\.global\.b(?:8|16)\b", kernel.asm["ptx"]))
        for name, kernel in compiled
        if name == "attend_kernel"
    ]
    launch_all(torch.float32, 80, 1, 48, softcap=30.0, kind="blocks", reads=True)
    launch_all(torch.bfloat16, 512, 16, 32, softcap=0.0, kind="int8", reads=True)
    launch_all(torch.bfloat16, 256, 32, 32, softcap=0.0, kind="by head")
    launch_sparse(torch.bfloat16, 128, 4, 16, "by head")
    launch_sparse(torch.bfloat16, 512, 16, 64, "by head")
    launch_sparse(torch.float16, 64, 4, 48, "int8")
    launch_sparse(torch.float32, 64, 1, 32, "blocks")
    launch_sparse(torch.bfloat16, 64, 7, 16, "tokens")
    shared = {}
    for name, kernel in compiled:
        shared[name] = max(shared.get(name, 0), kernel.metadata.shared)
    compiled.clear()
    launch_decodes()
    launch_prompts()
    variants = {name: set() for name in shared if name not in SPARSE}
    for name, kernel in compiled:
        variants[name].add(kernel.hash)
    counts = {name: len(hashes) for name, hashes in variants.items()}
    found = {"shared_bytes": shared, "variants": counts, "short_loads": short_loads}
    print(json.dumps(found))
