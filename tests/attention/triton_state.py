"""Random state of a layer's pages, for the tests of the Triton kernels.

The interpreter takes milliseconds per program, so a test sets up a state as it
is somewhere in a request's life and does one step, instead of decoding to it.
States are made on the CPU, where the reference runs, and copied to DEVICE.
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from vllm_h2o.attention.ops import LayerParams, ResidentRows
from vllm_h2o.attention.ops.triton import DecodeScratch, Tuning
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import SlotLayout, floats_of_page, state_bytes
from vllm_h2o.policy.methods import Mean, Sum
from vllm_h2o.policy.quantization import quantize
from vllm_h2o.policy.sparse_read import HIGHEST_SHARE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dot_of_bfloat16(builder, a, b, *rest, dot=InterpreterBuilder.create_dot):
    """The interpreter's dot multiplies bfloat16 as the integers it stores them as."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = builder.cast_impl(a, tl.float32), builder.cast_impl(b, tl.float32)
    return dot(builder, a, b, *rest)


# Only the interpreter uses it; compiled kernels have a builder of their own.
InterpreterBuilder.create_dot = _dot_of_bfloat16


def params_of(
    unit="token", mean=False, decay=1.0, softcap=0.0, sinks=4, read=1.0, **slots
):
    slots = {"block_size": 16, "heavy_slots": 32, "recent_slots": 16} | slots
    layout = SlotLayout(sinks=sinks, whole_blocks=unit == "block", **slots)
    method = Mean(decay) if mean else Sum(decay)
    return LayerParams(layout, 0.17, softcap, method, read=read)


def empty_int8_pages(
    num_blocks, num_kv_heads, head_size, block_size, device="cpu", reads_part=False
):
    """Pages of int8 that nobody has written: scales and state are NaN."""
    page = num_kv_heads * block_size * 2 * head_size
    floats = floats_of_page(head_size, block_size, reads_part, False)
    page += state_bytes(num_kv_heads, block_size, 1 + 2, floats)
    page += 64  # longer than need be
    raw = torch.full((num_blocks * page,), 255, dtype=torch.uint8, device=device)
    shape = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    strides = (page, block_size * 2 * head_size, 2 * head_size, 1)
    cache = raw.view(torch.int8).as_strided(shape, strides)
    cut = BlockCut(1, 1, 1, page)
    return Pages.view_rows_cut(cache, block_size, cut, reads_part=reads_part)


def empty_pages(
    num_blocks,
    num_kv_heads,
    head_size,
    block_size,
    dtype,
    device="cpu",
    reads_part=False,
):
    """Pages full of NaN, rows of K beside rows of V as vLLM has them on CUDA."""
    if dtype == torch.int8:
        size = num_blocks, num_kv_heads, head_size, block_size
        return empty_int8_pages(*size, device, reads_part)
    item = torch.empty(0, dtype=dtype).element_size()
    page = num_kv_heads * block_size * 2 * head_size * item
    floats = floats_of_page(head_size, block_size, reads_part, False)
    page += state_bytes(num_kv_heads, block_size, 1, floats)
    raw = torch.full(
        (num_blocks * page // item,), float("nan"), dtype=dtype, device=device
    )
    # NHD: all heads of a token lie together.
    strides = (page // item, 2 * head_size, num_kv_heads * 2 * head_size, 1)
    shape = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    return Pages.view_rows(raw.as_strided(shape, strides), reads_part=reads_part)


def packed(positions, first_queries, heads, most):
    """Where the logits of rows begin, in slots of KV heads, and where the last end."""
    slots = (heads * (positions + 1)).clamp(max=most)
    slots = torch.where(positions >= first_queries, slots, 0)
    return slots.cumsum(dim=0) - slots, int(slots.sum())


def clone(pages, device=None):
    """The same pages in memory of their own, on another device if given."""
    device = device or pages.keys.device
    raw = content(pages).to(device, copy=True).untyped_storage()
    own = {}
    scales = ("key_scales", "value_scales") * pages.quantized
    whole = ("bounds",) * (pages.bounds is not None)
    for name in ("keys", "values", "attention", "births", *scales, *whole):
        view = getattr(pages, name)
        tensor = torch.empty(0, dtype=view.dtype, device=device)
        own[name] = tensor.set_(raw, view.storage_offset(), view.shape, view.stride())
    bounds = own.pop("bounds", None)
    keys, values, scores, births, *both = own.values()
    sizes = pages.page_stride, pages.page_bytes, pages.state_offset
    state = {"attention": scores}
    return Pages(keys, values, state, births, *sizes, None, *both, bounds=bounds)


def content(pages):
    """The bytes of the pages, to compare them NaN for NaN."""
    keys = pages.keys
    raw = torch.empty(0, dtype=torch.uint8, device=keys.device)
    return raw.set_(keys.untyped_storage())


def rows_to(rows, device):
    """The same rows on another device, without scratch."""
    tensors = (rows.block_table, rows.positions, rows.first_queries)
    moved = (tensor.to(device) for tensor in tensors)
    return ResidentRows(*moved, stay_dense=rows.stay_dense)


@dataclass
class Step:
    """The arguments of one decode step, whose rows hold tokens already."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: Pages
    rows: ResidentRows
    params: LayerParams

    def to(self, device):
        """The same step, with pages of its own, on `device`."""
        return Step(
            self.query.to(device), self.key.to(device), self.value.to(device),
            clone(self.pages, device),
            rows_to(self.rows, device),
            self.params,
        )  # fmt: skip

    def run(self, op, device=DEVICE, scratch=None, **options):
        """Run `op` on a copy of the pages, into a poisoned output.

        Returns:
            `(output, pages)`, on the CPU.
        """
        step = self.to(device)
        output = torch.full_like(step.query, float("nan"))
        rows = replace(step.rows, scratch=scratch)
        if scratch is not None:
            rows = replace(rows, logit_starts=self.logit_starts()[0].to(device))
        op(
            step.query, step.key, step.value, step.pages, rows, step.params,
            output, **options,
        )  # fmt: skip
        if scratch is not None:
            assert scratch.logits[-1].isnan(), "logits of other rows were written"
        return output.cpu(), clone(step.pages, "cpu")

    def logit_starts(self):
        """Where logits begin that lie without a gap, and where the last end."""
        heads = self.key.shape[1]
        most = heads * self.params.layout.budget
        return packed(self.rows.positions, self.rows.first_queries, heads, most)

    def scratch(self, num_splits, tile_slots):
        """Scratch that holds NaN and slots nobody has."""
        num_rows, num_heads, head_size = self.query.shape
        scratch = DecodeScratch.allocate(
            num_rows, num_heads, self.key.shape[1], head_size,
            self.params.layout.budget, self.params.largest_budget,
            DEVICE, Tuning(num_splits, tile_slots), self.logit_starts()[1] + 1,
            page_slots=self.params.layout.block_size * (self.params.read < 1.0),
        )  # fmt: skip
        for tensor in (scratch.logits, scratch.outputs, scratch.maxima, scratch.sums):
            tensor.fill_(float("nan"))
        scratch.leaving_attention.fill_(float("nan"))
        scratch.losers.fill_(1)
        return scratch


def make_step(
    params,
    positions,
    dtype=torch.float32,
    heads=(2, 1),
    head_size=64,
    seed=0,
    quantized=False,
):
    """Rows that are about to write `positions`, in a state a decode may reach."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    layout = params.layout
    num_rows, width = len(positions), layout.budget_blocks
    num_blocks = num_rows * width + 2
    of = torch.int8 if quantized else dtype
    reads_part = params.read < 1.0
    size = num_blocks, num_kv_heads, head_size, layout.block_size
    pages = empty_pages(*size, of, reads_part=reads_part)
    blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
    table = blocks[: num_rows * width].view(num_rows, width).int()

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    for row, position in enumerate(positions):
        for head in range(num_kv_heads):
            tokens = _tokens(layout, position, generator)
            slots = torch.tensor([slot for slot, _ in tokens], dtype=torch.long)
            births = torch.tensor([birth for _, birth in tokens], dtype=torch.int32)
            block = table[row].long()[slots // layout.block_size]
            offset = slots % layout.block_size
            keys, values = random(len(slots), head_size), random(len(slots), head_size)
            if quantized:
                keys, pages.key_scales[block, head, offset] = quantize(keys)
                values, pages.value_scales[block, head, offset] = quantize(values)
            pages.keys[block, head, :, offset] = keys
            pages.values[block, head, offset] = values
            # Few distinct scores, so that equal ones meet.
            scores = torch.randint(1, 9, (len(slots),), generator=generator) / 4
            pages.attention[block, head, offset] = scores
            pages.births[block, head, offset] = births
    rows = ResidentRows(
        table,
        torch.tensor(positions),
        torch.tensor([2 * position // 3 for position in positions]),
    )
    if reads_part:
        for row, position in enumerate(positions):
            pages.bounds[:] = bounds_of(
                pages, table[row], layout, position, pages.bounds
            )
    query = random(num_rows, num_heads, head_size) * 2
    key = random(num_rows, num_kv_heads, head_size)
    value = random(num_rows, num_kv_heads, head_size)
    return Step(query, key, value, pages, rows, params)


def bounds_of(pages, blocks, layout, position, bounds):
    """`bounds`, but for those of a row's heavy pages, of the keys in them.

    Of pages that the tokens before `position` fill.
    """
    bounds, size = bounds.clone(), layout.block_size
    full = min(layout.heavy_slots, position) // size
    mine = blocks[:full].long()
    keys = pages.keys[mine].float()
    if pages.quantized:
        keys = keys * pages.key_scales[mine][:, :, None]
    highest, lowest = keys.amax(dim=3), keys.amin(dim=3)
    bounds[mine] = HIGHEST_SHARE * highest + (1 - HIGHEST_SHARE) * lowest
    return bounds


def _tokens(layout, position, generator):
    """`(slot, birth)` of what a head holds before `position` is written."""
    ring_end = position
    if layout.whole_blocks:
        ring_end += -position % layout.block_size
    if position < layout.budget:
        return [(p, p) for p in range(position)]
    ring_start = ring_end - layout.recent_slots
    ring = [(layout.slot(p), p) for p in range(ring_start, position)]
    older = torch.randperm(ring_start - layout.sinks, generator=generator)
    kept = older[: layout.heavy_slots - layout.sinks] + layout.sinks
    if layout.whole_blocks:
        kept = kept.sort().values
    births = [*range(layout.sinks), *kept.tolist()]
    return [*enumerate(births), *ring]
