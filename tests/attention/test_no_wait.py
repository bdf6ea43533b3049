"""Nothing on CUDA's path waits for the device: neither a decode step nor a transition.

Builder, backend and launches are real, on the meta device; only the kernels are not
run. What a wait would need fails there: to read a value, or a copy that blocks.
(Copies that do not block come from pinned memory, `async_tensor_h2d` sees to that.)
"""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config

from tests.attention.cuda_meta import DECODES, DEVICE, PROMPT, build, make_builder
from tests.attention.triton_state import empty_pages
from vllm_h2o.attention import prompts
from vllm_h2o.attention.cuda_backend import H2OTritonAttentionImpl
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.metadata import H2OMetadata
from vllm_h2o.attention.ops import ScoredLayer, triton
from vllm_h2o.attention.ops.triton import decode
from vllm_h2o.attention.placements import (
    BY_HEAD,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.methods import Sum
from vllm_h2o.policy.methods.cake import Cake
from vllm_h2o.policy.placement import Placement, layouts_of, lend_by_budget
from vllm_h2o.policy.reach import MovingKeys, Reach
from vllm_h2o.policy.rotation import Rotation

DECODE = ["attend_kernel", "combine_kernel"]
SELECTION = ["image_kernel", "select_kernel"]
TRANSITION, SWITCH = (
    [*SELECTION, "move_kernel"],
    [*SELECTION, "gather_kernel", "scatter_kernel"],
)
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


def devices_of(*values):
    leaves = tree_leaves(values)
    return {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}


class _Operations(TorchDispatchMode):
    """Host and device meet in copies that do not block, and nowhere else."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if len(devices_of(args, kwargs, result)) > 1:
            assert func in COPIES, f"{func} of host and device"
            blocking = not ((kwargs or {}).get("non_blocking") or args[2:] == (True,))
            assert not blocking, f"{func} that blocks"
        return result


class _Factories(TorchFunctionMode):
    """Data go to the device by a copy, which `_Operations` sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func not in FROM_DATA or result.device.type == "cpu", func
        return result


@contextlib.contextmanager
def no_waiting():
    """Fails where what runs inside would wait for the device."""
    with _Operations(), _Factories():
        yield


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched, by name; they do not run."""
    names = []

    def launch(kernel, *args, grid, warmup, **kwargs):
        assert devices_of(args, kwargs, grid) == {"meta"}
        names.append(kernel.__name__)

    monkeypatch.setattr(type(decode.attend_kernel), "run", launch)
    return names


def make_cache(num_blocks=40, reads_part=False):
    pages = empty_pages(num_blocks, 3, 64, 16, torch.float32, DEVICE, reads_part)
    shape = (num_blocks, 3, 16, 128)
    return pages.values.as_strided(shape, (pages.page_stride // 4, 128, 384, 1), 0)


def make_layers(config, blocks=()):
    """Two layers of the real backend, and how requests have their slots.

    `blocks` of each head, where these differ: of the engine's budget, and before it the
    one that grows to it.
    """
    with set_current_vllm_config(config):
        layers = [
            SimpleNamespace(
                impl=H2OTritonAttentionImpl(9, 64, 0.125, 3, None, None, "auto"),
                kv_cache=make_cache(reads_part=h2o_config(config).reads_part),
                layer_name=f"layer {i}",
            )
            for i in range(2)
        ]
    if not blocks:
        return layers, None
    config = layers[0].impl.h2o
    layout = SlotLayout.of_blocks(config, 16, 4)
    budgets = (2, 4)[-len(blocks) :]
    pages = lend_by_budget(blocks, budgets)
    by_blocks, before = {}, None
    for budget, wanted in zip(budgets, blocks, strict=True):
        own = [
            [mine[:count] for mine, count in zip(*heads, strict=True)]
            for heads in zip(pages, wanted, strict=True)
        ]
        layouts = layouts_of(wanted, config, 16)
        before = by_blocks[budget] = Placement(budget * 16, layouts, own, before)
    caches = [layer.impl.view(layer.kv_cache) for layer in layers]
    table = PlacementTable(caches, layout, [6, 6], 2 * len(budgets))
    table.put(BY_HEAD, by_blocks[4])
    for layer, part in zip(layers, table.parts(), strict=True):
        layer.impl.placements = part
    if len(budgets) == 1:
        return layers, RowPlacements(True)
    ladder = Ladder(16, budgets, (150, 256), 0.25)
    by_budget = BudgetPlacements(
        table, config, ladder, table.capacity, lambda blocks, *_: by_blocks[blocks]
    )
    by_budget.make_all(1, fixed=False)
    return layers, RowPlacements(True, by_budget)


def tokens(num_tokens, num_heads=3):
    return torch.empty(num_tokens, num_heads, 64, device=DEVICE)


def forward(layers, metadata, num_tokens):
    query, key = tokens(num_tokens, 9), tokens(num_tokens)
    for layer in layers:
        output = torch.empty_like(query)
        layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, output)


@pytest.fixture(scope="module")
def engine():
    return make_builder()


LARGE, SMALL = [[2, 6, 4], [6, 2, 4]], [[1, 3, 2], [3, 1, 2]]


@pytest.fixture(
    params=[[], [LARGE], [SMALL, LARGE]], ids=["uniform", "by head", "by share"]
)
def layers(request, engine, launched):
    """After a first step of any kind: it copies what never changes to the device."""
    builder, config = engine
    layers, placements = make_layers(config, request.param)
    builder.bind(builder.step, layers, placements)
    forward(layers, H2OMetadata(builder.spec), 1)
    assert not launched
    return layers


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.rule("R7")
def test_decode(engine, layers, launched, padding):
    """Also in a step in which heads switch to their own budgets, or these grow."""
    builder, _ = engine
    rows = {**DECODES, "fills": RowPlan(64, 1, 33, 0, 64)}
    growth, placements = [], layers[0].impl.placements
    if placements is not None and placements.grows:
        rows["small"] = RowPlan(149, 1, 33, 0, 32)
        rows["grows"] = RowPlan(150, 1, 33, 0, 64, 150, 32)
        rows["grown"] = RowPlan(170, 1, 33, 0, 64, 150, 32)
        growth = ["ring_kernel", "ring_kernel"]
    metadata, _ = build(builder, rows, padding, guard=no_waiting)
    with no_waiting():
        forward(layers, metadata, len(rows) + padding)
    switch = SWITCH * builder.placements.by_head
    assert launched == growth + switch + DECODE * len(layers)


def test_the_warm_up_launches_what_prompts_and_switches_do(engine, layers, launched):
    """Or a kernel would be compiled while requests wait."""
    builder, _ = engine
    layer = layers[0]
    layer.impl.warm_up(layer.kv_cache, builder.spec, ())
    switch = SWITCH if builder.placements.by_head else []
    assert {*TRANSITION, *switch} <= set(launched)


def test_rows_that_stay_dense_beside_int8(launched):
    builder, config = make_builder(h2o_resident_dtype="int8")
    layers, placements = make_layers(config)
    step = builder.spec.page_size_bytes // 4
    for layer in layers:
        cache = torch.empty(40 * step, device=DEVICE)
        shape = (40, 3, 16, 128), (step, 128, 384, 1)
        layer.kv_cache = cache.as_strided(*shape)
    builder.bind(builder.step, layers, placements)
    forward(layers, H2OMetadata(builder.spec), 1)
    rows = {**DECODES, "whole": RowPlan(40, 1, 30, 64, 64)}
    metadata, _ = build(builder, rows, 1, guard=no_waiting)
    with no_waiting():
        forward(layers, metadata, len(rows) + 1)
    assert launched == 2 * DECODE * len(layers)


def test_drafts(launched):
    """Decoded in turn, noted, and taken back by what the device has sampled."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    builder, config = make_builder(speculative_config=ngram)
    layers, placements = make_layers(config, [LARGE])
    builder.bind(builder.step, layers, placements)
    forward(layers, H2OMetadata(builder.spec), 1)
    rows = {"a": RowPlan(40, 4, 33, 0, 64), "b": RowPlan(200, 2, 64, 0, 64)}
    metadata, _ = build(builder, rows, 1, guard=no_waiting)
    sampled = torch.empty(2, dtype=torch.int32, device=DEVICE)
    with no_waiting():
        forward(layers, metadata, 7)
        builder.step.settle(sampled)
    first, *others = DECODE
    noted = [first, "note_kernel", *others] * 3
    assert launched == (DECODE + noted) * len(layers) + ["take_back_kernel"] * 2


def on(layer, device):
    """A layer whose state lies there, without values, which meta tensors have not."""
    state = {
        name: torch.empty(x.shape, device=device) for name, x in layer.state.items()
    }
    return replace(layer, state=state)


@pytest.mark.parametrize(("together", "scratch"), [(2, 2**26), (1, 0)])
def test_requests_that_split_their_slots(monkeypatch, launched, together, scratch):
    """Only what says how they are split waits, and states of layers that would take too
    much memory: these are put aside, and come back a layer at a time."""
    monkeypatch.setattr(prompts, "SCRATCH_BYTES", scratch)
    moved = []
    monkeypatch.setattr(
        prompts, "_moved", lambda *at: moved.append(at[1].type) or on(*at)
    )
    builder, config = make_builder(kv_policy="cake")
    layers, _ = make_layers(config)
    h2o, caches = h2o_config(config), [x.impl.view(x.kv_cache) for x in layers]
    layout = SlotLayout.of_blocks(h2o, 16, 4)
    table = PlacementTable(caches, layout, [6, 6], capacity=4)
    table.put(BY_HEAD, Placement.alike((2, 3), [4], h2o, 16))
    for layer, part in zip(layers, table.parts(), strict=True):
        layer.impl.placements = part
    requests = RequestPlacements(table, h2o, layout, first=2)
    builder.bind(builder.step, layers, RowPlacements(True, None, requests))
    forward(layers, H2OMetadata(builder.spec), 1)
    monkeypatch.setattr(Cake, "split", lambda *_: LARGE)
    metadata, _ = build(builder, PROMPT, guard=no_waiting)
    (prompt,) = metadata.prompts
    query = tokens(prompt.tokens.stop, 9)[prompt.tokens]
    bound = [with_params(layer, layer.impl.h2o) for layer in layers]
    with no_waiting():
        for layer, mine in zip(layers, bound, strict=True):
            assert not launched
            prompt.attend(layer.layer_name, mine, query, torch.empty_like(query))
    assert launched == TRANSITION * (2 // together) and not prompt.layers
    assert moved == ([] if scratch else ["cpu"] * (1 + 2) + ["meta"] * 2)
    assert not prompt.transitions._state_bytes
    assert requests.index(prompt.request_id) == 2
    launched.clear()
    rows = {
        prompt.request_id: RowPlan(90, 1, 26, 0, 64),
        "a": RowPlan(40, 1, 33, 0, 64),
    }
    metadata, _ = build(builder, rows, 1, guard=no_waiting)
    with no_waiting():
        forward(layers, metadata, 3)
    assert launched == DECODE * len(layers)


def test_queries_that_read_a_part(launched):
    """The pages are listed before, and bounds are made of what a prompt leaves."""
    builder, config = make_builder(h2o_read="40%")
    layers, _ = make_layers(config)
    builder.bind(builder.step, layers)
    forward(layers, H2OMetadata(builder.spec), 1)
    metadata, _ = build(builder, DECODES, guard=no_waiting)
    with no_waiting():
        forward(layers, metadata, 2)
    assert launched == ["rank_kernel", *DECODE] * len(layers)
    launched.clear()
    metadata, _ = build(builder, PROMPT, guard=no_waiting)
    (prompt,) = metadata.prompts
    query = tokens(prompt.tokens.stop, 9)[prompt.tokens]
    bound = [with_params(layer, layer.impl.h2o) for layer in layers]
    with no_waiting():
        for layer, mine in zip(layers, bound, strict=True):
            prompt.attend(layer.layer_name, mine, query, torch.empty_like(query))
    scored = ["lse_kernel", "observe_kernel", *TRANSITION, "bound_kernel"]
    assert launched == scored * len(layers)


def test_decode_beside_prompts(engine, layers, launched):
    """All but the prompts' attention itself, which is stock vLLM's."""
    builder, _ = engine
    metadata, _ = build(builder, {**PROMPT, **DECODES}, guard=no_waiting)
    mine = replace(metadata, stock=None, prompts=[])
    with no_waiting():
        forward(layers, mine, 8)
    assert launched == DECODE * len(layers)


def with_params(layer, config, **own):
    """A layer as it is bound, but for some constants."""
    bound = layer.impl._layer
    params = replace(bound.params, **own)
    params.device_tables  # noqa: B018  What never changes goes to the device now.
    return replace(bound, config=config, params=params)


@pytest.mark.parametrize("gate", [None, "by the gate"])
def test_transition(engine, layers, launched, gate):
    builder, _ = engine
    metadata, _ = build(builder, PROMPT, guard=no_waiting)
    (prompt,) = metadata.prompts
    query = tokens(prompt.tokens.stop, 9)[prompt.tokens]
    if gate:
        weights = torch.empty(3, 2 * 64 + 4, device=DEVICE)
        gate = LayerGate(weights, Rotation(torch.empty(1024, 64, device=DEVICE)), 3)
    config = layers[0].impl.h2o
    if gate:
        config = replace(config, prompt_score="gate", head_budgets="auto")
    bound = [with_params(layer, config, gate=gate) for layer in layers]
    with no_waiting():
        for layer, mine in zip(layers, bound, strict=True):
            prompt.attend(layer.layer_name, mine, query, torch.empty_like(query))
    prompt.transitions.run()  # on a device all has been done in the step
    expected = ["lse_kernel", "observe_kernel", *TRANSITION] * len(layers)
    if gate:  # all layers at once
        expected = ["gate_kernel", *TRANSITION]
    assert launched == expected and not prompt.layers


def test_a_layer_that_has_not_run_is_told(engine, layers, launched):
    """Its request would go on with pages that nobody has written."""
    builder, _ = engine
    metadata, _ = build(builder, PROMPT, guard=no_waiting)
    (prompt,) = metadata.prompts
    gate = LayerGate(torch.empty(3, 2 * 64 + 4, device=DEVICE), None, 3)
    config = replace(layers[0].impl.h2o, prompt_score="gate", head_budgets="auto")
    query = tokens(prompt.tokens.stop, 9)[prompt.tokens]
    bound = with_params(layers[0], config, gate=gate)
    prompt.attend("layer 0", bound, query, torch.empty_like(query))
    with pytest.raises(AssertionError, match="a layer has not run"):
        prompt.transitions.run()
    prompt.transitions.clear()
    assert not launched


@pytest.mark.parametrize(("together", "scratch"), [(2, 2**26), (1, 0)])
def test_reading_on(monkeypatch, engine, layers, launched, together, scratch):
    """The last step of a later chunk, and its compression: of all layers, or of one at
    once where states of more would take too much memory."""
    monkeypatch.setattr(prompts, "SCRATCH_BYTES", scratch)
    builder, _ = engine
    rows = {"reads": RowPlan(100, 5, 105, 73, 64, chunk_start=90, scored_from=58)}
    metadata, _ = build(builder, rows, guard=no_waiting)
    (row,) = metadata.prompts
    weights = torch.empty(3, 2 * 64 + 4, device=DEVICE)
    gate = LayerGate(weights, Rotation(torch.empty(1024, 64, device=DEVICE)), 3)
    frequencies = torch.empty(32, dtype=torch.float64, device=DEVICE)
    moving = MovingKeys(Reach(limit=40, step=20, chunk=20), frequencies, True)
    own = {"gate": gate, "method": Sum(0.9), "moving": moving}
    config = replace(layers[0].impl.h2o, prompt_score="gate", head_budgets="auto")
    bound, query = [with_params(layer, config, **own) for layer in layers], tokens(5, 9)
    with no_waiting():
        for layer, mine in zip(layers, bound, strict=True):
            row.attend(layer.layer_name, mine, query, torch.empty_like(query))
        moved = [ScoredLayer(mine.pages, {}, mine.params) for mine in bound]
        triton.move_keys(moved, row.chunk.held)
    reads = ["stage_kernel", "read_kernel", "observe_kernel"]
    # At the chunk's end out of the slots, and into them.
    end = ["held_kernel", "gate_kernel", "held_kernel", "move_kernel"]
    moves = ["held_kernel"] * 2
    parts = len(layers) // together
    expected = (reads * together + end) * parts + moves
    assert launched == expected and not row.layers
    row.transitions.run()
    assert not row.transitions._state_bytes


@pytest.mark.parametrize(
    "wait",
    [
        lambda rows: rows[0].item(),
        lambda rows: rows.tolist(),
        lambda rows: bool(rows[0]),
        lambda rows: rows[rows > 0],
        lambda rows: rows.cpu(),
        lambda rows: torch.arange(3).to(DEVICE),
        lambda rows: rows.copy_(torch.arange(3)),
        lambda rows: rows[torch.arange(3)],
        lambda rows: torch.tensor([1, 2], device=DEVICE),
    ],
    ids=range(9),
)
def test_waits_are_seen(wait):
    rows = torch.arange(3, device=DEVICE)
    wait_for_nothing = torch.arange(3).to(DEVICE, non_blocking=True)
    with no_waiting():
        rows.copy_(torch.arange(3), non_blocking=True)
        rows += wait_for_nothing[rows] + 1
    seen = (AssertionError, RuntimeError, NotImplementedError)
    with pytest.raises(seen), no_waiting():
        wait(rows)
