"""Several layers in one launch: how far their tensors are from those of the first.

A kernel has the tensors of one layer as arguments, and adds to each pointer the
distance of the layer that its program is for. Layers that differ in more than where
their tensors are have launches of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import SCRATCH_BYTES, LayerParams, ScoredLayer
from vllm_h2o.attention.pages import Pages

NUM_DISTANCES = tl.constexpr(8)
"""Of a layer, in elements of what is addressed."""
KV, STATE, SOURCE, SIZES, COLUMNS, KV_OFFSETS, STATE_OFFSETS, WEIGHTS = map(
    tl.constexpr, range(NUM_DISTANCES.value)
)


@triton.jit
def of_layer(first, distances, WHICH: tl.constexpr):
    """Pointer to a tensor of the program's layer, the third number of its grid."""
    return first + tl.load(distances + NUM_DISTANCES * tl.program_id(2) + WHICH)


@triton.jit
def pages_of_layer(first, distances, WHICH: tl.constexpr):
    """The same of keys or values, which lie multiples of 16 elements apart.

    Said here, or the compiler would read them element by element.
    """
    distance = tl.load(distances + NUM_DISTANCES * tl.program_id(2) + WHICH)
    return first + distance // 16 * 16


@triton.jit
def lists_of_layer(first, distances):
    """The same of `PageLists`."""
    return (
        of_layer(first[0], distances, COLUMNS),
        of_layer(first[1], distances, KV_OFFSETS),
        of_layer(first[2], distances, STATE_OFFSETS),
    )


@triton.jit
def pages_and_state_of_layer(keys, values, attention, births, distances):
    """The same of resident pages."""
    return (
        pages_of_layer(keys, distances, KV),
        pages_of_layer(values, distances, KV),
        of_layer(attention, distances, STATE),
        of_layer(births, distances, STATE),
    )


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """Layers that differ in where their tensors are.

    Attributes:
        first: The layer that the distances are from.
        layers: The layers.
        distances: `[num_layers, NUM_DISTANCES]` int64, on their device.
    """

    first: ScoredLayer
    layers: list[ScoredLayer]
    distances: torch.Tensor

    def parts(self, layer_bytes: int) -> Iterator[LayerBatch]:
        """So few at a time that they need little memory, `layer_bytes` each."""
        count = max(1, SCRATCH_BYTES // layer_bytes)
        for start in range(0, len(self.layers), count):
            some = slice(start, start + count)
            yield LayerBatch(self.first, self.layers[some], self.distances[some])

    def largest_of(self, placement: int) -> int:
        """Slots of the KV head with the largest budget, of all layers."""
        heads = self.first.pages.keys.shape[1]
        return max(each.params.largest_of(placement, heads) for each in self.layers)


@dataclass(frozen=True, eq=False)
class Budgets:
    """What KV heads have room for: `[num_layers, num_kv_heads, 1]` int64 each.

    Attributes:
        slots: Of a head.
        heavy: Of these, for the heaviest.
        before: That it had before its request's budget grew.
    """

    slots: torch.Tensor
    heavy: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, batch: LayerBatch, placement: int) -> Budgets:
        """Those of a placement."""
        keys, layout = batch.first.pages.keys, batch.first.params.layout
        tables = [layer.params.device_tables for layer in batch.layers]
        if tables[0] is None:
            shape = len(tables), keys.shape[1], 1
            counts = layout.budget, layout.heavy_slots, layout.budget
            return cls(*(torch.full(shape, n, device=keys.device) for n in counts))
        entries = slice(placement * keys.shape[1], (placement + 1) * keys.shape[1])
        sizes = torch.stack([x.sizes[entries] for x in tables if x is not None])
        return cls(*sizes[..., :3].long().split(1, dim=-1))

    def places(self, num_tokens: int, grown_at: int) -> torch.Tensor:
        """Tokens of a head that have had a place, see `policy.layout.place_of`."""
        if not grown_at:
            return torch.full_like(self.slots, num_tokens)
        return num_tokens - grown_at + self.before.clamp(max=grown_at)


_Made = list[tuple[list[int], torch.Tensor]]
_made: weakref.WeakKeyDictionary[LayerParams, dict[Any, _Made]] = (
    weakref.WeakKeyDictionary()
)
"""By the first layer's constants, with which they go, and `_place_of` of all layers."""


def batches(layers: Sequence[ScoredLayer]) -> Iterator[LayerBatch]:
    """Layers in as few batches as there are kinds of them.

    Distances are copied to the device once, and no step waits for the copy.
    """
    made = _made.setdefault(layers[0].params, {})
    key = tuple(_place_of(layer) for layer in layers)
    if key not in made:
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(layers):
            kinds.setdefault(_kind_of(layer), []).append(i)
        made[key] = [
            (indices, _distances([layers[i] for i in indices]))
            for indices in kinds.values()
        ]
    for indices, distances in made[key]:
        mine = [layers[i] for i in indices]
        yield LayerBatch(mine[0], mine, distances)


def stacked(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """`[num_tensors, ...]` of tensors of a shape, and whether it is a view of them."""
    first, *others = tensors
    if not others:
        return first.unsqueeze(0), True
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    apart = others[0].storage_offset() - offset
    if apart >= first.numel() and all(
        each.untyped_storage().data_ptr() == storage
        and each.storage_offset() == offset + i * apart
        for i, each in enumerate(tensors)
    ):
        size = len(tensors), *first.shape
        return first.as_strided(size, (apart, *first.stride())), True
    return torch.stack(list(tensors)), False


def _place_of(layer: ScoredLayer) -> tuple[Any, ...]:
    """A layer's constants and where its pages are: what its distances depend on."""
    pages, source = layer.pages, layer.source
    return (
        id(layer.params),
        pages.keys.data_ptr(),
        pages.births.data_ptr(),
        pages.keys.dtype,
        source.keys.data_ptr(),
        source.keys.dtype,
        source.keys.stride(0),
    )


def _kind_of(layer: ScoredLayer) -> tuple[Any, ...]:
    """What layers have to have in common to share launches."""
    params, tables = layer.params, layer.params.device_tables
    gate = params.gate
    rotation = gate.rotation if gate else None
    angles = rotation.angles if rotation else None
    # Layers of a kind are multiples of 16 elements apart, see `pages_of_layer`.
    vectors = (
        (
            each.keys.dtype,
            each.keys.stride(),
            each.values.stride(),
            each.keys.data_ptr() % (16 * each.keys.element_size()),
        )
        for each in (layer.pages, layer.source)
    )
    return (
        params.layout,
        params.fused_form,
        tables is None or tables.pages is None,
        tables is None,
        gate and gate.group,
        rotation and (angles is None or angles.data_ptr(), rotation.neox),
        layer.pages.births.stride(),
        *vectors,
    )


def _distances(layers: list[ScoredLayer]) -> torch.Tensor:
    first, rows = _addresses(layers[0]), []
    for layer in layers:
        row = []
        for (address, item), (start, _) in zip(_addresses(layer), first, strict=True):
            assert (address - start) % item == 0, "tensors of layers start anywhere"
            row.append((address - start) // item)
        assert _within(layer.pages) == _within(layers[0].pages)
        rows.append(row)
    device = layers[0].pages.keys.device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def _within(pages: Pages) -> list[int]:
    """Where values and state are in memory, in bytes behind what they move with."""
    vectors = pages.values.data_ptr() - pages.keys.data_ptr()
    state = [*pages.state.values(), pages.key_scales, pages.value_scales, pages.bounds]
    births = pages.births.data_ptr()
    return [vectors, *(x.data_ptr() - births for x in state if x is not None)]


def _addresses(layer: ScoredLayer) -> list[tuple[int, int]]:
    """`(bytes, bytes of an element)` of what distances are between, in their order."""
    tables, gate = layer.params.device_tables, layer.params.gate
    lists = tables.pages if tables else None
    tensors = [
        layer.pages.keys,
        layer.pages.births,
        layer.source.keys,
        tables.sizes if tables else None,
        *(lists or (None, None, None)),
        gate.weights if gate else None,
    ]
    return [(0, 1) if x is None else (x.data_ptr(), x.element_size()) for x in tensors]
