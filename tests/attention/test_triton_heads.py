"""Budgets by head in Triton against the torch reference, borrowed pages and all."""

from dataclasses import replace

import pytest
import torch

from tests.attention.triton_checks import TOLERANCE, check_selection, copy_kept_alone
from tests.attention.triton_heads import (
    CONFIG,
    SMALL,
    check_heads,
    make_layers,
    params_of,
)
from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from vllm_h2o.attention.ops import Held, ScoredLayer, reference
from vllm_h2o.attention.ops.chunks import held_heads
from vllm_h2o.attention.ops.triton import launch, order_rings, scoring, transition
from vllm_h2o.attention.ops.triton import layers as batching
from vllm_h2o.attention.ops.triton import observe as triton_observe
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM
from vllm_h2o.policy.methods import Mean, Sum
from vllm_h2o.policy.methods.cake import Cake
from vllm_h2o.policy.sparse_read import HIGHEST_SHARE


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_step_equals_reference(layer):
    """Before heads part, in the step that they do, and long after; padding too.

    A poor head then competes for one block, a rich one still appends until 80.
    """
    positions = [5, 47, 48, 60, 79, 80, 137, -1]
    layers, after = check_heads(layer, positions)
    lenders = [i for i in range(3) if i != layer]
    borrowed = any(
        not torch.equal(content(layers[i]), content(after[i])) for i in lenders
    )
    assert borrowed == (layer != 2)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rows_whose_budget_has_grown(layer):
    """In the step after that, while heads fill what they have got, and long after."""
    positions, grown_at = [60, 61, 75, 92, 93, 140, 400, -1], [60, 60, 60, 60, 60, 99]
    check_heads(layer, positions, grown_at=[*grown_at, 60, 60])


@pytest.mark.parametrize("layer", [0, 2])
def test_rows_of_several_budgets(layer):
    """In one batch; three splits cut the richest head of each, in tiles of 16."""
    positions = [20, 31, 32, 33, 60, 137, 47, 48, 90, 200, -1]
    check_heads(layer, positions, small=range(6))
    check_heads(layer, [40, 99, 100], grown_at=[0, 60, 0], small=[0])


def test_rows_in_int8():
    """In borrowed pages, whose scales are borrowed too."""
    check_heads(0, [5, 47, 48, 60, 80, 137, -1], torch.bfloat16, quantized=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(("num_tokens", "grown_at"), [(60, 0), (61, 40), (100, 60)])
def test_rings_are_put_in_order(num_tokens, grown_at, dtype):
    """Of heads that have filled theirs; the others' are."""
    layers, table = make_layers(dtype, 64, 16, 1)
    results = []
    for op, device in ((reference.order_rings, "cpu"), (order_rings, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        scored = [ScoredLayer(own[i], {}, params_of(own, i, 16)) for i in range(3)]
        op(scored, Held(table[0].to(device), BY_HEAD, num_tokens, grown_at))
        results.append([content(clone(pages, "cpu")) for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert any(
        not torch.equal(mine, content(before))
        for mine, before in zip(results[1], layers, strict=True)
    )


@pytest.mark.parametrize(
    ("head_size", "size", "dtype"),
    [(80, 16, torch.bfloat16), (64, 48, torch.float32), (128, 32, torch.float16)],
)
def test_shapes_and_dtypes(head_size, size, dtype):
    positions = [3 * size - 1, 3 * size, 6 * size + 5]
    check_heads(0, positions, dtype, head_size, size, group=2)


@pytest.mark.parametrize(
    "how", [{"method": Sum()}, {"method": Mean(0.9)}, {"softcap": 5.0}], ids=str
)
def test_scores(how):
    check_heads(1, [48, 100], **how)


def test_tiles_of_scores(monkeypatch):
    monkeypatch.setattr(launch, "SCORE_TILE", 16)
    check_heads(0, [48, 90])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_switch_to_head_budgets_in_place(layer, dtype):
    """Slots are sources and targets at once; nothing is overwritten unread."""
    layers, table = make_layers(dtype, 64, 16, 1)
    results = []
    for copy, device in ((reference.copy_kept, "cpu"), (copy_kept_alone, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, layer, 16)
        blocks = table[0].to(device)
        scores = own[layer].attention[blocks.long()].transpose(0, 1).flatten(1)
        kept = check_selection(scores, BY_HEAD, 9, CONFIG, params)
        assert {*(kept.slots >= 0).sum(dim=1).tolist()} <= {16, 32, 48}
        state = {"attention": scores}
        copy(ScoredLayer(own[layer], state, params), blocks, blocks, BY_HEAD, kept)
        results.append([clone(pages, "cpu") for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(content(actual), content(expected))
    assert not torch.equal(content(results[0][layer]), content(layers[layer]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_transition_into_borrowed_pages(dtype):
    """A prompt of 77 tokens: one head keeps 16 of them, the other all."""
    layers, table = make_layers(dtype, 80, 16, 3)
    dense, resident = table[:2].flatten()[:5], table[2]
    scores = torch.rand(2, 77, generator=torch.Generator().manual_seed(2))
    results = []
    for copy, device in ((reference.copy_kept, "cpu"), (copy_kept_alone, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, 0, 16)
        state = {"attention": scores.to(device)}
        kept = check_selection(state["attention"], BY_HEAD, 60, CONFIG, params)
        assert (kept.slots >= 0).sum(dim=1).tolist() == [16, 77]
        layer = ScoredLayer(own[0], state, params)
        copy(layer, dense.to(device), resident.to(device), BY_HEAD, kept)
        results.append([clone(pages, "cpu") for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(content(actual), content(expected))
    assert not torch.equal(content(results[0][1]), content(layers[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("num_tokens", [20, 77])
@pytest.mark.parametrize("scratch", [batching.SCRATCH_BYTES, 1])
def test_layers_share_launches(monkeypatch, dtype, num_tokens, scratch):
    """Of a prompt that fits and one that does not; also where scratch is for one."""
    monkeypatch.setattr(batching, "SCRATCH_BYTES", scratch)
    pages, table = make_layers(dtype, 64, 16, 2)
    dense = empty_pages(9, 2, 64, 16, torch.float16)
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(3, 2, num_tokens, generator=generator)
    own_dense = []
    for _ in pages:
        for part in (dense.keys, dense.values):
            part.copy_(torch.randn(part.shape, generator=generator))
        own_dense.append(clone(dense))
    blocks, resident = torch.tensor([8, 1, 5, 3, 7]).int(), table[0]
    placement, results = BY_HEAD if num_tokens > 48 else UNIFORM, []
    for op, device in ((reference.transition, "cpu"), (transition, DEVICE)):
        own = [clone(mine, device) for mine in pages]
        scored = [
            ScoredLayer(
                own[i],
                {"attention": scores.to(device)[i]},
                params_of(own, i, 16),
                clone(own_dense[i], device),
            )
            for i in range(3)
        ]
        held = Held(resident.to(device), placement, num_tokens)
        op(scored, blocks.to(device), held, num_tokens // 2, CONFIG)
        results.append([content(clone(mine, "cpu")) for mine in own])
    for before, expected, actual in zip(pages, *results, strict=True):
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, content(before))


@pytest.mark.parametrize("scratch", [batching.SCRATCH_BYTES, 1])
def test_a_method_with_prompt_rules_of_its_own(monkeypatch, scratch):
    """Prompts are scored in two steps; heads with less than the average do not pool."""
    monkeypatch.setattr(batching, "SCRATCH_BYTES", scratch)
    if scratch == 1:  # three queries of three heads at a time
        monkeypatch.setattr(scoring, "_MOST_LOGITS", 3 * 3 * 77)
    pages, table = make_layers(torch.float16, 64, 16, 1)
    generator = torch.Generator().manual_seed(4)
    dense = [empty_pages(9, 2, 64, 16, torch.float16) for _ in pages]
    for part in (part for each in dense for part in (each.keys, each.values)):
        part.copy_(torch.randn(part.shape, generator=generator))
    queries = torch.randn(3, 20, 6, 64, generator=generator).half() * 3
    blocks, sinks = torch.tensor([8, 1, 5, 3, 7]).int(), torch.linspace(-2, 6, 6)
    method, results = Cake(), []
    fields, seen = ("attention", *method.prompt_fields), []
    for op, observe, device in (
        (reference.transition, reference.observe, "cpu"),
        (transition, triton_observe, DEVICE),
    ):
        own, scored = [clone(mine, device) for mine in pages], []
        for i, query in enumerate(queries.to(device)):
            of = {"method": method, "sink_logits": sinks.to(device), "group": 3}
            params = params_of(own, i, 16, **of)
            state = {name: torch.zeros(2, 77, device=device) for name in fields}
            of_layer, at = clone(dense[i], device), blocks.to(device)
            observe(query[:12], of_layer, at, 57, state, params)
            observe(query[12:], of_layer, at, 69, state, params)
            scored.append(ScoredLayer(own[i], state, params, of_layer))
        seen.append([layer.state for layer in scored])
        # Of the same state, since rounding decides between scores that tie.
        for layer, state in zip(scored, seen[0], strict=True):
            layer.state.update({name: x.to(device) for name, x in state.items()})
        held = Held(table[0].to(device), BY_HEAD, 77)
        op(scored, blocks.to(device), held, 57, CONFIG)
        results.append([content(clone(mine, "cpu")) for mine in own])
    for expected, actual in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, check_device=False)
    for before, expected, actual in zip(pages, *results, strict=True):
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, content(before))


def test_distances_are_of_the_type_that_is_read():
    """Also where dense pages begin with the int8 ones, as many elements apart."""
    pages, _ = make_layers(torch.int8, 64, 16, 1)
    quantized, dense = [], []
    for i, mine in enumerate(pages):
        storage, shape = mine.keys.untyped_storage(), (1, *mine.keys.shape[1:])
        keys = torch.empty(0, dtype=torch.float16)
        keys.set_(storage, 0, shape, mine.keys.stride())
        assert keys.data_ptr() == mine.keys.data_ptr()
        own = replace(mine, keys=keys, values=keys.transpose(2, 3))
        params = params_of(pages, i, 16)
        quantized.append(ScoredLayer(mine, {}, params))
        dense.append(ScoredLayer(mine, {}, params, own))
    first, *others = (mine.keys.data_ptr() for mine in pages)
    for layers, item in ((dense, 2), (quantized, 1)):
        (batch,) = batching.batches(layers)
        found = batch.distances[:, batching.SOURCE.value].tolist()
        assert found == [0, *((other - first) // item for other in others)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("method", [Mean(), Cake()], ids=["mean", "cake"])
def test_layers_switch_in_the_same_launches(dtype, method):
    """Of the smallest budget, whose heads have their own pages until then.

    The layers' states are tensors of their own. Prompt rules of a method's own say
    nothing of who fills its budget later.
    """
    pages, table = make_layers(dtype, 64, 16, 1)
    results = []
    for op, device in ((reference.transition, "cpu"), (transition, DEVICE)):
        own = [clone(mine, device) for mine in pages]
        blocks, scored = table[0, :2].to(device), []
        for i, mine in enumerate(own):
            state = mine.attention[blocks.long()].transpose(0, 1).flatten(1)
            params = params_of(own, i, 16, method=method)
            scored.append(ScoredLayer(mine, {"attention": state}, params))
        op(scored, blocks, Held(blocks, SMALL + BY_HEAD, 32), 9, CONFIG)
        results.append([content(clone(mine, "cpu")) for mine in own])
    for before, expected, actual in zip(pages, *results, strict=True):
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, content(before))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("dense_size", [16, 48, 64])
def test_tokens_come_from_pages_of_another_size(dense_size, dtype):
    """Those that vLLM has laid out, in its type."""
    layers, table = make_layers(dtype, 64, 16, 2)
    generator = torch.Generator().manual_seed(3)
    dense = empty_pages(9, 2, 64, dense_size, torch.float16)
    for part in (dense.keys, dense.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    blocks, resident = torch.tensor([8, 1, 5, 3, 7]).int(), table[0]
    scores = torch.rand(2, 75, generator=generator)
    results = []
    for op, device in ((reference.transition, "cpu"), (transition, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        state = {"attention": scores.to(device)}
        layer = ScoredLayer(own[0], state, params_of(own, 0, 16), clone(dense, device))
        held = Held(resident.to(device), BY_HEAD, 75)
        op([layer], blocks.to(device), held, 60, CONFIG)
        results.append([content(clone(pages, "cpu")) for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert not torch.equal(results[1][0], content(layers[0]))


@pytest.mark.parametrize(("layer", "quantized"), [(0, False), (1, True), (2, False)])
def test_queries_that_read_a_part(layer, quantized):
    """In pages of other layers, of rows that append, graduate and have grown."""
    positions, grown_at = [5, 47, 48, 64, 80, 137, -1], [0, 0, 0, 60, 0, 60, 0]
    check_heads(layer, positions, grown_at=grown_at, quantized=quantized, read=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("what", ["prompt", "short prompt", "in place", "rings"])
def test_bounds_are_made_where_tokens_move(what, dtype):
    """Of all layers, in pages of others, also of a page that is not full."""
    layers, table = make_layers(dtype, 64, 16, 2, reads_part=True)
    own = [clone(pages, DEVICE) for pages in layers]
    params = [replace(params_of(own, i, 16), read=0.3) for i in range(3)]
    resident = table[0].to(DEVICE)
    held = {
        "prompt": Held(resident, BY_HEAD, 77),
        "short prompt": Held(resident, UNIFORM, 37),
        "in place": Held(resident, BY_HEAD, 48),
        "rings": Held(resident, BY_HEAD, 90),
    }[what]
    if what == "rings":
        order_rings([ScoredLayer(own[i], {}, params[i]) for i in range(3)], held)
    else:
        dense, blocks = None, resident
        if what != "in place":
            dense = empty_pages(9, 2, 64, 16, torch.float16, DEVICE)
            for part in (dense.keys, dense.values):
                part.copy_(torch.randn(part.shape))
            blocks = torch.tensor([8, 1, 5, 3, 7]).int().to(DEVICE)
        scores = torch.rand(3, 2, held.num_tokens, device=DEVICE)
        scored = [
            ScoredLayer(own[i], {"attention": scores[i]}, params[i], dense)
            for i in range(3)
        ]
        transition(scored, blocks, held, 9, CONFIG)
    on_cpu = [clone(pages, "cpu") for pages in own]
    held = replace(held, pages=resident.cpu())
    for i, pages in enumerate(on_cpu):
        params = replace(params_of(on_cpu, i, 16), read=0.3)
        for head in held_heads(pages, held, held.num_tokens, params):
            check_bounds_of(head)


def check_bounds_of(head):
    """All pages that a KV head holds have the bound of the keys in them."""
    assert head.count
    for first in range(0, head.count, 16):
        slots = torch.arange(first, min(first + 16, head.count))
        keys = head.content.vectors("keys", slots)
        expected = HIGHEST_SHARE * keys.amax(0) + (1 - HIGHEST_SHARE) * keys.amin(0)
        pages, block = head.content.places[first // 16]
        actual = pages.bounds[block, head.head]
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
