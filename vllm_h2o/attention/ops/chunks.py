"""Reading on in plain torch: chunks of a prompt, beside what is held of those before.

The oracle, and what runs on CPU, where torch's products take most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_h2o.attention.ops.resident import (
    Resident,
    quantized,
    rows_of_slots,
    scales_of,
    tokens_of,
)
from vllm_h2o.attention.ops.types import Chunk, Held, LayerParams, ScoredLayer
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout, place_of
from vllm_h2o.policy.methods import Method, Queries, State, has_prompt_rules
from vllm_h2o.policy.quantization import dequantize
from vllm_h2o.policy.selection import select_residents
from vllm_h2o.policy.softmax import attention_of

_QUERY_TILE, _MOST_LOGITS = 256, 1 << 22
"""Queries of a tile, and logits of their heads: bound the memory of probabilities."""
_CACHED_TILE = 64
"""Queries of a tile on a CPU, whose caches then hold the probabilities."""


def read_on(
    query: torch.Tensor,
    first_position: int,
    dense: Pages,
    pages: Pages,
    chunk: Chunk,
    state: State,
    params: LayerParams,
    output: torch.Tensor,
) -> None:
    """See `Kernels.read_on`."""
    heads = held_heads(pages, chunk.held, chunk.end, params)
    most = most_held(chunk.held, len(heads), params)
    end = first_position + len(query)
    if not state:
        _begin(state, heads, most, chunk, params.method)
    read = torch.arange(chunk.start, end, device=query.device)
    blocks = chunk.blocks.long()
    group = query.shape[1] // len(heads)
    for held in heads:
        tokens = tokens_of(dense, blocks, held.head, read)
        _start(state, held, tokens, first_position, most, chunk, params.method)
        keys, values = (
            torch.cat([held.vectors(what), tokens[what].float()])
            for what in ("keys", "values")
        )
        seen = held.columns(most, len(read))
        mine = {name: whole[held.head, seen] for name, whole in state.items()}
        part = slice(held.head * group, (held.head + 1) * group)
        sink = params.sink_logits
        output[:, part] = _attend(
            query[:, part].float().transpose(0, 1),
            keys,
            values,
            max(chunk.first_scoring - first_position, 0),
            mine,
            params,
            None if sink is None else sink[part, None],
        ).to(output.dtype)
        for name, whole in state.items():
            whole[held.head, seen] = mine[name]


def compress_chunk(
    layers: Sequence[ScoredLayer], chunk: Chunk, config: H2OConfig
) -> None:
    """See `Kernels.compress_chunk`."""
    for layer in layers:
        params, device = layer.params, layer.pages.keys.device
        fresh = torch.arange(chunk.start, chunk.end, device=device)
        heads = held_heads(layer.pages, chunk.held, chunk.end, params)
        most = most_held(chunk.held, len(heads), params)
        expected = _expected(layer, chunk)
        for held in heads:
            seen = held.columns(most, len(fresh))
            state = {name: mine[held.head, seen] for name, mine in layer.state.items()}
            positions = torch.cat([held.births, fresh])
            looked = _looked(positions, held.count, chunk, params.method)
            if expected is not None:
                state["attention"][held.count :] += expected[held.head]
                window = chunk.end - fresh.clamp(min=chunk.first_query)
                looked[held.count :] += window
            kept = _select(state, positions, looked, held, chunk, config, params)
            _move(layer, chunk, held, fresh, *kept)


def move_keys(layers: Sequence[ScoredLayer], held: Held) -> None:
    """See `Kernels.move_keys`."""
    for layer in layers:
        pages, moving = layer.pages, layer.params.moving
        if moving is None:
            continue
        end = held.num_tokens
        for head in held_heads(pages, held, end, layer.params):
            keys = head.get("keys", head.slots)
            head.put("keys", head.slots, moving.moved(keys, head.births, end, end + 1))


def most_held(held: Held, num_kv_heads: int, params: LayerParams) -> int:
    """Tokens that the KV head with the most holds."""
    layouts = params.layouts_of(held.placement, num_kv_heads)
    return max(
        min(_places(held, held.num_tokens, head, layout, params), layout.budget)
        for head, layout in enumerate(layouts)
    )


def _places(
    held: Held, num_tokens: int, head: int, layout: SlotLayout, params: LayerParams
) -> int:
    """Tokens of a KV head that have had a place, of so many of the request."""
    before = layout.budget
    if held.grown_at:
        assert params.placements is not None
        before = params.placements.held(held.placement, head)
    return place_of(num_tokens, held.grown_at, before)


class HeldHead:
    """What a KV head holds, in the order of its tokens' births.

    Attributes:
        head: The KV head.
        content: What is in its slots.
        layout: Its slots.
        count: Tokens that it holds.
        most_places: Tokens that have had a place before the chunk's end.
        slots: `[count]` int64 where they are.
        births: `[count]` int64 their positions.
    """

    def __init__(
        self,
        pages: Pages,
        held: Held,
        end: int,
        head: int,
        params: LayerParams,
        content: Resident,
    ) -> None:
        """Look at a head before tokens up to `end`; `content` has what is in its
        slots."""
        self.head, self.content, self._quantized = head, content, pages.quantized
        placement, num_kv_heads = held.placement, pages.keys.shape[1]
        self.layout = params.layouts_of(placement, num_kv_heads)[head]
        places = _places(held, held.num_tokens, head, self.layout, params)
        self.count = min(places, self.layout.budget)
        self.most_places = _places(held, end, head, self.layout, params)
        slots = torch.arange(self.count, device=pages.keys.device)
        births = self.get("births", slots)
        self.slots = births.argsort(stable=True)
        self.births = births[self.slots].long()

    def get(self, what: str, slots: torch.Tensor) -> torch.Tensor:
        """Copy of the slots' content, `[n, ...]`: `keys`, `values`, `births`, scales,
        or a field."""
        return self.content.get(what, slots)

    def put(self, what: str, slots: torch.Tensor, content: torch.Tensor) -> None:
        """Overwrite the slots' content."""
        self.content.put(what, slots, content)

    def vectors(self, what: str) -> torch.Tensor:
        """All held `keys` or `values`, `[count, head_size]` float32."""
        content = self.get(what, self.slots)
        if not self._quantized:
            return content.float()
        return dequantize(content, self.get(f"{what[:-1]}_scales", self.slots))

    def columns(self, most_held: int, num_fresh: int) -> torch.Tensor:
        """Where a chunk's state has what is held, and so many of the chunk's tokens."""
        fresh = torch.arange(num_fresh, device=self.slots.device)
        return torch.cat([self.slots, most_held + fresh])


def held_heads(
    pages: Pages, held: Held, end: int, params: LayerParams
) -> list[HeldHead]:
    """What the KV heads of a layer hold, before tokens up to `end`."""
    rows = rows_of_slots(held.pages, held.placement)
    return [
        HeldHead(pages, held, end, head, params, Resident(pages, rows, 0, head, params))
        for head in range(pages.keys.shape[1])
    ]


def _begin(
    state: State, heads: list[HeldHead], most_held: int, chunk: Chunk, method: Method
) -> None:
    """Make the state of a chunk: what is held has its own, if prompts keep no more."""
    shape = len(heads), most_held + chunk.end - chunk.start
    for name in (*method.fields, *method.prompt_fields):
        state[name] = torch.zeros(shape, device=chunk.blocks.device)
    for held in heads:
        slots = torch.arange(held.count, device=chunk.blocks.device)
        for name in () if has_prompt_rules(method) else method.fields:
            state[name][held.head, : held.count] = held.get(name, slots)


def _start(
    state: State,
    held: HeldHead,
    tokens: dict[str, torch.Tensor],
    first_position: int,
    most_held: int,
    chunk: Chunk,
    method: Method,
) -> None:
    """Write the state of a step's new tokens, which no query has looked at."""
    new = slice(first_position - chunk.start, None)
    last, device = chunk.start + len(tokens["keys"]), chunk.blocks.device
    positions = torch.arange(first_position, last, device=device)
    keys, values = (tokens[what][None, new] for what in ("keys", "values"))
    columns = most_held + positions - chunk.start
    for name, mine in method.start(keys, values, positions).items():
        state[name][held.head, columns] = mine[0]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_scoring: int,
    state: State,
    params: LayerParams,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a KV head's queries, the last of which is the last token's.

    Args:
        query: `[group, m, head_size]` float32.
        keys: `[n, head_size]` float32 of what they see.
        values: The same.
        first_scoring: Index of the first query that scores.
        state: `[n]` for each field, updated in place.
        params: The layer's constants.
        sink: `[group, 1]` logits, if there are sinks.

    Returns:
        `[m, group, head_size]`.
    """
    num_queries, before = query.shape[1], len(keys) - query.shape[1]
    attended = torch.empty_like(query)
    observe = params.method.observe
    if has_prompt_rules(params.method):
        observe = params.method.observe_prompt
    most = _CACHED_TILE if query.device.type == "cpu" else _QUERY_TILE
    tile = max(min(most, _MOST_LOGITS // (len(query) * len(keys))), 1)
    query = query * params.scale
    for first in range(0, num_queries, tile):
        last = min(first + tile, num_queries)
        seen = before + last
        logits = query[:, first:last] @ keys[:seen].T
        later = torch.arange(last - first, device=query.device)
        hidden = later > later[:, None]
        probs = attention_of(logits, hidden, softcap=params.softcap, sink=sink)
        attended[:, first:last] = probs @ values[:seen]
        if last > first_scoring:
            mine = {name: whole[:seen] for name, whole in state.items()}
            observe(mine, probs[:, max(first_scoring - first, 0) :])
    return attended.transpose(0, 1)


def _expected(layer: ScoredLayer, chunk: Chunk) -> torch.Tensor | None:
    """`[num_kv_heads, tokens]` what the gate expects of the chunk's tokens."""
    gate = layer.params.gate
    if gate is None:
        return None
    num_kv_heads = layer.pages.keys.shape[1]
    shape = num_kv_heads, chunk.end - chunk.start
    expected = torch.empty(shape, device=chunk.blocks.device)
    gate.fill(expected, layer.source, chunk.blocks, chunk.first_query, chunk.start)
    return expected


def _looked(
    positions: torch.Tensor, num_held: int, chunk: Chunk, method: Method
) -> torch.Tensor:
    """`[n]` how many queries have looked at what is held and at the chunk's tokens."""
    looked = chunk.end - positions.clamp(min=chunk.first_scoring)
    if not has_prompt_rules(method):
        before = Queries(positions[:num_held], chunk.scored_from, chunk.start)
        looked[:num_held] += before.count()
    return looked


def _select(
    state: State,
    positions: torch.Tensor,
    looked: torch.Tensor,
    held: HeldHead,
    chunk: Chunk,
    config: H2OConfig,
    params: LayerParams,
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Indices of the tokens that a head keeps, their slots, and their state."""
    method, layout = params.method, held.layout
    score, first = method.score_prompt, chunk.first_scoring
    if not has_prompt_rules(method):
        score, first = method.score, chunk.first_query
        now = Queries(positions, first, chunk.end).count()
        state = method.recounted(state, looked, now)
    queries = Queries(positions, first, chunk.end, params.group)
    scores = score(state, queries)[None].clone()  # of some methods it is their state
    has_room = layout.budget >= params.budget_of(chunk.held.placement)
    if config.prompt_pooling > 1 and has_room:
        fresh = scores[:, held.count :]
        scores[:, held.count :] = method.pool(fresh, config.prompt_pooling)
    gone = held.most_places - len(positions)
    (kept,), slots = select_residents(scores, 1, layout, gone=gone)
    fields = method.fields
    return kept, slots, {name: state[name][kept] for name in fields}


def _move(
    layer: ScoredLayer,
    chunk: Chunk,
    held: HeldHead,
    fresh: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    state: State,
) -> None:
    """Put what a head keeps into its slots."""
    pages = layer.pages
    tokens = tokens_of(layer.source, chunk.blocks.long(), held.head, fresh)
    if pages.quantized:
        tokens = quantized(tokens["keys"], tokens["values"])
    tokens["births"] = fresh.int()
    # All is read before anything is written: slots are both.
    before = _content(held, pages)
    if (moving := layer.params.moving) is not None:  # the chunk's own are within reach
        before["keys"] = moving.moved(
            before["keys"], held.births, chunk.start, chunk.end
        )
    moved = {what: torch.cat([before[what], tokens[what]])[kept] for what in before}
    for what, content in (moved | state).items():
        held.put(what, slots, content)


def _content(held: HeldHead, pages: Pages) -> dict[str, torch.Tensor]:
    """What a head holds, but for its state."""
    parts = ("keys", "values", "births", *scales_of(pages))
    return {what: held.get(what, held.slots) for what in parts}
