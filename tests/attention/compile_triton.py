"""Compile every Triton kernel to machine code, for a GPU that need not be there.

    python -m tests.attention.compile_triton 90

The interpreter runs what the compiler refuses (a loop variable that changes its
type, say), so both are needed. Prints a JSON object, shared memory in bytes by
kernel.
"""

import dataclasses
import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.attention.triton_state import empty_pages
from vllm_h2o.attention.ops import DecodeParams, HeadSlots, ResidentRows
from vllm_h2o.attention.ops.triton import choose, compress, decode_resident, observe
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.lending import lend


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


def launch_all(dtype, head_size, group, block_size, softcap, kind):
    """Launch every kernel once."""
    whole_blocks, by_head = kind == "blocks", kind == "by head"
    layout = SlotLayout(block_size, 1024, 1024, 0, whole_blocks)
    pages = empty_pages(4, 2, head_size, block_size, dtype)
    query = torch.empty(3, 2 * group, head_size, dtype=dtype)
    key = torch.empty(3, 2, head_size, dtype=dtype)
    table = torch.empty(3, layout.budget_blocks, dtype=torch.int32)
    rows = ResidentRows(table, torch.empty(3).long(), torch.empty(3).long())
    params = DecodeParams(layout, 0.1, softcap, 0.9, mean=True)
    if by_head:
        layouts = [SlotLayout(block_size, 512, 512, 0, False), layout]
        blocks = [x.budget_blocks for x in layouts]
        heads = HeadSlots(layouts, lend([blocks], max(blocks))[0], [pages], 0)
        params = dataclasses.replace(params, heads=heads)
    decode_resident(query, key, key, pages, rows, params, query)
    blocks, scores = torch.arange(4), torch.zeros(2, block_size)
    observe(query, pages, blocks, 7, scores, params)
    chosen = choose(scores, 0, 0, H2OConfig(), params)
    compress(pages, blocks, table[0], 0, chosen, scores, params)


if __name__ == "__main__":
    compiled = compile_only(int(sys.argv[1]))
    launch_all(torch.bfloat16, 128, 4, 16, softcap=0.0, kind="tokens")
    launch_all(torch.bfloat16, 128, 4, 16, softcap=0.0, kind="by head")
    launch_all(torch.float32, 80, 1, 48, softcap=30.0, kind="blocks")
    shared = {}
    for name, kernel in compiled:
        shared[name] = max(shared.get(name, 0), kernel.metadata.shared)
    print(json.dumps(shared))
