"""In plain torch: the oracle that every kernel is held to.

A whole engine runs on it with `VLLM_H2O_KERNELS=reference`, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_h2o.attention.ops.chunks import compress_chunk, move_keys, read_on
from vllm_h2o.attention.ops.contract import Capability
from vllm_h2o.attention.ops.resident import (
    LogOfDraft,
    Resident,
    quantized,
    rows_of_slots,
    tokens_of,
)
from vllm_h2o.attention.ops.types import (
    DraftLog,
    Held,
    Kept,
    LayerParams,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.merging import NO_THRESHOLD, merged
from vllm_h2o.policy.methods import Queries, State
from vllm_h2o.policy.prompt_attention import tiles
from vllm_h2o.policy.selection import select_residents
from vllm_h2o.policy.softmax import attention_of

__all__ = [
    "CAPABILITIES", "FORMS", "attend_observed", "compress_chunk", "copy_kept",
    "decode_resident", "merge_dropped", "move_keys", "observe", "order_rings",
    "put_merged", "read_on", "score_by_gate", "select", "start", "take_back",
    "transition",
]  # fmt: skip

FORMS = frozenset({"sum", "mean"})
CAPABILITIES = frozenset(Capability)
_START_TILE = 1024
"""Tokens whose keys and values are copied at a time."""


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: LayerParams,
    output: torch.Tensor,
    log: DraftLog | None = None,
) -> None:
    """See `Kernels.decode_resident`."""
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    for row in range(len(rows.positions)):
        tokens = rows.tokens_of(row)
        if rows.positions[row] < 0:
            if not rows.stay_dense:
                output[tokens] = 0
            continue
        for (draft, token), head in product(enumerate(tokens), range(num_kv_heads)):
            resident = Resident(pages, rows, row, head, params, draft)
            of_draft = None
            if log is not None and draft and resident.scores_now:
                of_draft = LogOfDraft(log, row, draft, head)
            lost = resident.graduate(of_draft)
            resident.write(key[token, head], value[token, head])
            heads = slice(head * group, (head + 1) * group)
            output[token, heads] = resident.attend(query[token, heads]).to(output.dtype)
            if lost is not None:
                resident.merge(*lost)


def take_back(
    layers: Sequence[LoggedLayer], rows: ResidentRows, refused: torch.Tensor
) -> None:
    """See `Kernels.take_back`."""
    for layer, row in product(layers, refused.nonzero().flatten().tolist()):
        pages, params, log = layer
        of_row = pages, rows, row
        end = len(rows.tokens_of(row))
        drafts = range(end - int(refused[row]), end)
        assert drafts.start > 0, "a row's first token is certain"
        for head in range(pages.keys.shape[1]):
            undone = [
                (Resident(*of_row, head, params, j), LogOfDraft(log, row, j, head))
                for j in drafts
            ]
            resident, of_draft = undone[0]
            if not resident.scores_now:
                continue
            for later, of_later in reversed(undone):
                later.take_back(of_later)
            held = torch.arange(min(resident.place, resident.layout.budget))
            resident.put("attention", held, of_draft.attention[: len(held)])


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    held: Held,
    first_query: int,
    config: H2OConfig,
) -> None:
    """See `Kernels.transition`: its two halves, layer by layer."""
    for layer in layers:
        kept = select(layer.state, held.placement, first_query, config, layer.params)
        copy_kept(layer, source_blocks, held.pages, held.placement, kept)


def select(
    state: State,
    placement: int,
    first_query: int,
    config: H2OConfig,
    params: LayerParams,
) -> Kept:
    """Select the tokens that each KV head keeps, as `select_residents` says.

    A head with less than the request has on average has no room for spans: it picks
    tokens without pooling. NaN counts as infinite.

    Args:
        state: See `ScoredLayer`.
        placement: See `Kernels.transition`.
        first_query: Position of the first query that scored.
        config: The policy.
        params: The layer's constants.
    """
    num_kv_heads, num_tokens = state["attention"].shape
    heads_of: dict[SlotLayout, list[int]] = {}
    for head, layout in enumerate(params.layouts_of(placement, num_kv_heads)):
        heads_of.setdefault(layout, []).append(head)
    budget = params.budget_of(placement)
    queries = Queries(torch.arange(num_tokens), first_query, num_tokens, params.group)
    method = params.method
    # A request that fills its budget only while it generates has lost the prompt's
    # fields: the score of generated tokens decides.
    of_prompt = {*method.prompt_fields} <= {*state}
    scores = (method.score_prompt if of_prompt else method.score)(state, queries)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layout, heads in heads_of.items():
        poor = layout.budget < budget
        mine = scores if len(heads) == num_kv_heads else scores[heads]
        pooling = config.prompt_pooling if of_prompt and not poor else 1
        positions, slots = select_residents(mine, pooling, layout, method.pool)
        kept |= {h: (positions[i], slots) for i, h in enumerate(heads)}
    by_head = zip(*(kept[head] for head in range(num_kv_heads)), strict=True)
    return Kept(*(pad_sequence([*rows], True, padding_value=-1) for rows in by_head))


def copy_kept(
    layer: ScoredLayer,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    placement: int,
    kept: Kept,
) -> None:
    """Copy each KV head's kept tokens into the slots of a request.

    Args:
        layer: The layer; targets may lie in pages of others.
        source_blocks: See `Kernels.transition`, and so are the next two.
        target_blocks: Of the slots.
        placement: Of the request.
        kept: What to copy, and where to.
    """
    pages, state, params = layer.pages, layer.state, layer.params
    blocks = source_blocks.long()
    rows = rows_of_slots(target_blocks, placement)
    merges = None
    if params.merge:
        merges = merge_dropped(layer.source, blocks, kept, state)
    for head, held in enumerate(kept.positions >= 0):
        positions, slots = kept.positions[head, held], kept.slots[head, held]
        tokens = tokens_of(layer.source, blocks, head, positions)
        if pages.quantized and not layer.source.quantized:
            tokens = quantized(tokens["keys"], tokens["values"])
        tokens["births"] = positions.int()
        tokens |= {name: state[name][head, positions] for name in pages.state}
        target = Resident(pages, rows, 0, head, params)
        for what, content in tokens.items():
            target.put(what, slots, content)
    if merges is not None:
        put_merged(pages, target_blocks, placement, kept, merges, params)


def order_rings(layers: Sequence[ScoredLayer], held: Held) -> None:
    """See `Kernels.order_rings`."""
    counts = held.num_tokens, 0, held.placement, held.grown_at
    position, first_query, index, grown = (torch.tensor([n]) for n in counts)
    rows = ResidentRows(
        held.pages[None], position, first_query, placements=index, grown_at=grown
    )
    for layer in layers:
        for head in range(layer.pages.keys.shape[1]):
            Resident(layer.pages, rows, 0, head, layer.params).order_ring()


def merge_dropped(
    pages: Pages, source_blocks: torch.Tensor, kept: Kept, state: State
) -> list[tuple[torch.Tensor | None, float]]:
    """What each KV head makes of the values it keeps and of those it drops.

    Args:
        pages: The layer's pages that the tokens are in.
        source_blocks: See `Kernels.transition`.
        kept: What is kept.
        state: See `ScoredLayer`; says how many tokens there are.

    Returns:
        By head the new values `[n, head_size]` of its n kept tokens, None where it
        drops none, and its threshold, see `vllm_h2o.policy.merging`.
    """
    blocks, everyone = source_blocks.long(), torch.arange(state["attention"].shape[1])
    merges: list[tuple[torch.Tensor | None, float]] = []
    for head, positions in enumerate(kept.positions):
        held = positions[positions >= 0]
        if len(held) == len(everyone):
            merges.append((None, NO_THRESHOLD))
            continue
        dropped = everyone[~torch.isin(everyone, held)]
        tokens = [
            part.float()
            for which in (held, dropped)
            for part in tokens_of(pages, blocks, head, which).values()
        ]
        keys, values, lost_keys, lost_values = tokens
        merges.append(merged(keys, values, lost_keys, lost_values, threshold=None))
    return merges


def put_merged(
    pages: Pages,
    target_blocks: torch.Tensor,
    placement: int,
    kept: Kept,
    merges: list[tuple[torch.Tensor | None, float]],
    params: LayerParams,
) -> None:
    """Overwrite the values of what was kept; arguments as of `copy_kept`."""
    rows = rows_of_slots(target_blocks, placement)
    for head, (values, threshold) in enumerate(merges):
        target = Resident(pages, rows, 0, head, params)
        if values is not None:
            slots = kept.slots[head]
            target.put("values", slots[slots >= 0], values.to(pages.values.dtype))
        thresholds, at = target.threshold()
        thresholds[at] = threshold


def start(
    pages: Pages,
    dense_blocks: torch.Tensor,
    first: int,
    end: int,
    state: State,
    params: LayerParams,
) -> None:
    """See `Kernels.start`."""
    size = pages.block_size
    for begin in range(first, end, _START_TILE):
        positions = torch.arange(begin, min(begin + _START_TILE, end))
        blocks, i = dense_blocks.long()[positions // size], positions % size
        keys = pages.keys[blocks, :, :, i].transpose(0, 1)
        values = pages.values[blocks, :, i].transpose(0, 1)
        started = params.method.start(keys, values, positions)
        for name, mine in started.items():
            state[name][:, positions] = mine


def score_by_gate(
    layers: Sequence[ScoredLayer], dense_blocks: torch.Tensor, first_query: int
) -> None:
    """See `Kernels.score_by_gate`."""
    for layer in layers:
        gate = layer.params.gate
        assert gate is not None
        gate.fill(layer.state["attention"], layer.source, dense_blocks, first_query)


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: LayerParams,
) -> None:
    """See `Kernels.observe`."""
    end = first_position + len(query)
    keys = pages.keys[dense_blocks.long()].permute(1, 2, 0, 3).flatten(2)
    for probs in tiles(
        query, keys[:, :, :end], first_position,
        scale=params.scale, softcap=params.softcap, sink_logits=params.sink_logits,
    ):  # fmt: skip
        visible = probs.shape[-1]
        seen = {name: mine[:, :visible] for name, mine in state.items()}
        params.method.observe_prompt(seen, probs)


def attend_observed(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    first_scoring: int,
    state: State,
    params: LayerParams,
    output: torch.Tensor,
) -> None:
    """See `Kernels.attend_observed`."""
    scoring = query[first_scoring:]
    first_scored = first_position + first_scoring
    observe(scoring, pages, dense_blocks, first_scored, state, params)
    end = first_position + len(query)
    blocks, group = dense_blocks.long(), query.shape[1] // pages.keys.shape[1]
    keys = pages.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :end].float()
    values = pages.values[blocks].transpose(0, 1).flatten(1, 2)[:, :end].float()
    queries = query.float().unflatten(1, (-1, group))
    logits = torch.einsum("qghd,gtd->ghqt", queries, keys) * params.scale
    unseen = torch.ones(len(query), end, dtype=torch.bool).triu(first_position + 1)
    sink = params.sink_logits
    if sink is not None:
        sink = sink.view(-1, group, 1)
    probs = attention_of(logits, unseen, softcap=params.softcap, sink=sink)
    attended = torch.einsum("ghqt,gtd->qghd", probs, values)
    output.copy_(attended.flatten(1, 2))
