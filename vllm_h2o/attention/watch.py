"""Which tokens KV heads hold of a request: for tests, and for `vllm_h2o.inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import UNIFORM, Budget
from vllm_h2o.attention.step import StepRows
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.policy.layout import place_of
from vllm_h2o.policy.placement import Placement


@dataclass
class HeldSlots:
    """Where one KV head of one layer holds a request's tokens.

    Attributes:
        layer: Index among the layers that evict.
        head: Index among this rank's KV heads.
        pages: Of each of the head's pages, those of a layer and its number there.
        slots: Those that hold a token.
    """

    layer: int
    head: int
    pages: list[tuple[Pages, int]]
    slots: list[int]

    def gather(self, field_of: Callable[[Pages], torch.Tensor]) -> torch.Tensor:
        """`[tokens held, ..]` of a field of the pages, by slot."""
        held = [field_of(pages)[number, self.head] for pages, number in self.pages]
        return torch.cat(held)[self.slots]

    def positions(self) -> torch.Tensor:
        """`[tokens held]` int32 positions of the tokens, by slot."""
        return self.gather(lambda pages: pages.births)


@dataclass
class WatchedRequest:
    """A compressed request after its last step.

    Attributes:
        end: Tokens of its sequence that have been computed.
        budget: Slots of a KV head on average.
        is_transition: Whether the step has read the end of its prompt.
        placement: By head, if it has one and the step knew it; else None.
        grown_at: See `RowPlan`.
        grown_from: Likewise.
        pages: `[pages of the engine's budget]` of its resident blocks, by layer name.
    """

    end: int
    budget: int
    is_transition: bool
    placement: Placement | None
    grown_at: int = 0
    grown_from: int = 0
    pages: dict[str, torch.Tensor] = field(default_factory=dict)


class Watch:
    """Follows the steps of a worker; costs them time."""

    def __init__(self, step: StepRows, layers: Callable[[], Mapping[str, Any]]) -> None:
        """Follow all requests from now on.

        Args:
            step: The worker's steps.
            layers: Returns vLLM's attention modules that evict, by name, in order.
                They are not kept: with them the KV cache would outlive its engine.
        """
        self.requests: dict[str, WatchedRequest] = {}
        self._step, self._layers = step, layers
        step.watchers.append(self._note)
        step.settle_watchers.append(self._take_back)

    def stop(self) -> None:
        """Follow no longer."""
        if self._note in self._step.watchers:
            self._step.watchers.remove(self._note)
            self._step.settle_watchers.remove(self._take_back)

    def _note(
        self, builder: H2OMetadataBuilder, table: torch.Tensor, rows: ResidencyPlan
    ) -> None:
        for i, request_id in enumerate(rows.request_ids):
            row = rows.row(i)
            if row.stays_dense or not (row.decodes or row.is_transition):
                continue
            end = row.num_computed_tokens + row.num_scheduled_tokens
            request = self.requests.get(request_id)
            known = request and (request.end, request.is_transition)
            if request is None or known != (end, row.is_transition):
                placement = self._placement(builder, request_id, Budget.of(row))
                request = WatchedRequest(
                    end, row.budget, row.is_transition, placement,
                    row.grown_at, row.grown_from,
                )  # fmt: skip
                self.requests[request_id] = request
            pages = builder.spec.resident_pages(table[i], builder.layout.budget)
            request.pages |= dict.fromkeys(builder.layer_names, pages.cpu().long())

    def _take_back(self, refused: dict[str, int]) -> None:
        for request_id, count in refused.items():
            if request_id in self.requests:
                self.requests[request_id].end -= count

    def _placement(
        self, builder: H2OMetadataBuilder, request_id: str, budget: Budget
    ) -> Placement | None:
        """That which the request has once it fills its budget, if there is one yet."""
        if builder.placements.splits_each_request:
            return builder.placements.own(request_id)
        index = builder.placements.index(request_id, budget, True)
        if index == UNIFORM:
            return None
        impl = self._layers()[builder.layer_names[0]].impl
        return impl.placements.table.placement(index)

    def _own_placement(self, request_id: str) -> Placement | None:
        own = (group.own(request_id) for group in self._step.groups)
        return next(filter(None, own), None)

    def held(self, request_id: str) -> Iterator[HeldSlots]:
        """What each KV head of each layer holds of a request.

        Valid while the blocks of a request that has finished are not another's.
        """
        self._step.transitions.run()  # what the next step would begin with
        request = self.requests[request_id]
        if request.placement is None:
            request.placement = self._own_placement(request_id)
        for number, (name, layer) in enumerate(self._layers().items()):
            pages = request.pages[name].tolist()
            for head in range(layer.impl.pages.keys.shape[1]):
                yield _held(layer.impl, request, pages, number, head)


def _held(
    impl: Any, request: WatchedRequest, pages: list[int], number: int, head: int
) -> HeldSlots:
    layout, table, placement = impl.layout, impl.placements, request.placement
    places, end = [(impl.pages, page) for page in pages], request.end
    before = request.grown_from
    if placement is not None and (end > request.budget or request.grown_at):
        layout = placement.layouts[table.layer][head]
        if placement.grown_from is not None:
            before = placement.grown_from.layouts[table.layer][head].budget
        pages_of_head = placement.pages[table.layer][head]
        places = [(table.layers[p.layer], pages[p.column]) for p in pages_of_head]
    size, last = layout.block_size, layout.slot(end - 1)
    held = place_of(end, request.grown_at, before)
    slots = list(range(min(held, layout.budget)))
    if layout.whole_blocks and end > layout.budget:
        # The block of the ring that is being written holds its new tokens only.
        slots = [s for s in slots if s // size != last // size or s <= last]
    return HeldSlots(number, head, places, slots)


@dataclass
class Losses:
    """When each KV head has lost which tokens of a request.

    Attributes:
        ends: Tokens of the sequence at each look; at the first, those of the prompt.
        lost_at: `{(layer, head): [tokens]}` int64 index of the first look at which the
            head did not hold the token, or -1.
    """

    ends: list[int] = field(default_factory=list)
    lost_at: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def look(self, end: int, held: Iterator[HeldSlots]) -> None:
        """Take in what is held of a sequence of `end` tokens."""
        for slots in held:
            known = self.lost_at.get((slots.layer, slots.head), torch.empty(0).long())
            lost_at = torch.full((end,), -1)
            lost_at[: len(known)] = known
            gone = torch.ones(end, dtype=torch.bool)
            gone[slots.positions().long().cpu()] = False
            lost_at[gone & (lost_at < 0)] = len(self.ends)
            self.lost_at[slots.layer, slots.head] = lost_at
        self.ends.append(end)


class Recorder:
    """Records what requests lose step by step, from their transition on."""

    def __init__(self, watch: Watch) -> None:
        """Record what a new watch sees."""
        self.losses: dict[str, Losses] = {}
        self._watch = watch

    def look(self) -> None:
        """Take in the last step, before the next one begins."""
        for request_id, request in self._watch.requests.items():
            if request.is_transition:
                self.losses[request_id] = Losses()
            if request_id in self.losses:
                losses, held = self.losses[request_id], self._watch.held(request_id)
                losses.look(request.end, held)
        self._watch.requests.clear()

    def stop(self) -> dict[str, Losses]:
        """Take in the last step, and record no longer.

        Returns:
            The losses by request id.
        """
        self._watch.stop()
        self.look()
        return self.losses
