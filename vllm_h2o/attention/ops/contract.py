"""What kernels have to be: the operations on resident rows, for every platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_h2o.attention.ops.types import (
    Chunk,
    DraftLog,
    Held,
    LayerParams,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import State
from vllm_h2o.policy.rules import Capability


class Kernels(Protocol):
    """The operations of a platform; a module is one.

    What a platform has no kernel for, and is refused beforehand, it takes from the
    reference.
    """

    FORMS: frozenset[str]
    """The methods that the kernels have, by `Method.fused_form`."""
    CAPABILITIES: frozenset[Capability]
    """What they have beside; `READ` and `MERGE` one at a time."""

    def decode_resident(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: Pages,
        rows: ResidentRows,
        params: LayerParams,
        output: torch.Tensor,
        log: DraftLog | None = None,
    ) -> None:
        """Graduate, write, attend and score, for every row and KV head.

        A row's tokens go in turn, each as it would go in a step of its own.

        Args:
            query: `[num_tokens, num_heads, head_size]`, float32, bfloat16 or float16;
                a token for each row, or those that `rows` says.
            key: `[num_tokens, num_kv_heads, head_size]` of the new tokens, after RoPE.
            value: `[num_tokens, num_kv_heads, head_size]`.
            pages: The layer's pages, updated in place; int8 ones hold rounded keys and
                values (`policy.quantization`), also of the new token.
            rows: Which pages and positions.
            params: The layer's constants.
            output: `[num_tokens, num_heads, head_size]`, written; of a row of position
                -1 zeros, unless the rows stay dense: see `ResidentRows`. Their pages
                have no state.
            log: Of this layer, for these rows; what drafts change is noted in it. None:
                no row has more than one token, or nothing will be taken back. Only
                with `Capability.DRAFTS`.

        Raises:
            ValueError: A dtype or head size that no kernel has.
        """
        ...

    def take_back(
        self, layers: Sequence[LoggedLayer], rows: ResidentRows, refused: torch.Tensor
    ) -> None:
        """Undo what drafts have changed: afterwards pages are as if they had not been.

        But for keys and values of slots that no token is in. Only with
        `Capability.DRAFTS`, and by methods that keep nothing but attention.

        Args:
            layers: The layers, with what `decode_resident` has noted.
            rows: Those that it decoded.
            refused: `[num_rows]` int32, less than `rows.counts`: so many of the last
                tokens of each row.
        """
        ...

    def transition(
        self,
        layers: Sequence[ScoredLayer],
        source_blocks: torch.Tensor,
        held: Held,
        first_query: int,
        config: H2OConfig,
    ) -> None:
        """Select what each KV head of each layer keeps, and copy it into its slots.

        The two halves are `reference.select` and `reference.copy_kept`, in any order of
        the layers. Sources may be overwritten: all of a head is read before anything of
        it is written.

        Args:
            layers: The layers, each with what the request's tokens have got in it.
                Where pages are int8, what comes from others is rounded.
            source_blocks: int32 pages of `ScoredLayer.source`, the token at position p
                in page `p // block_size`, offset `p % block_size`.
            held: Where it goes: `[>= cdiv(min(tokens, budget), block_size)]` pages of
                `ScoredLayer.pages`. Pass the same object as `source_blocks` to
                rearrange a request in place; else no page may be in both.
            first_query: Position of the first query that scored.
            config: The policy.
        """
        ...

    def order_rings(self, layers: Sequence[ScoredLayer], held: Held) -> None:
        """Put the ring's tokens into its slots in the order of their births.

        For a request whose budget is about to grow, in each KV head: what it holds then
        has the places that `policy.layout.place_of` says.

        Args:
            layers: The layers; their state is not used.
            held: What the request holds, by its placement until now.
        """
        ...

    def start(
        self,
        pages: Pages,
        dense_blocks: torch.Tensor,
        first: int,
        end: int,
        state: State,
        params: LayerParams,
    ) -> None:
        """Give prompt tokens the state that the method starts them with, if not 0.

        Args:
            pages: The layer's pages, read only.
            dense_blocks: `[>= cdiv(end, block_size)]` int32 blocks of the prompt.
            first: Position of the first of the tokens.
            end: Behind the last.
            state: `[num_kv_heads, >= end]` float32 for each of the method's fields, of
                which `first .. end - 1` are written.
            params: The layer's constants.
        """
        ...

    def score_by_gate(
        self,
        layers: Sequence[ScoredLayer],
        dense_blocks: torch.Tensor,
        first_query: int,
    ) -> None:
        """Write the attention that a prompt's tokens are expected to get.

        The formula is that of `vllm_h2o.attention.gate`.

        Args:
            layers: Layers with a gate, of one prompt; the attention is written. Of
                their pages only `ScoredLayer.source` is used.
            dense_blocks: `[>= cdiv(num_tokens, block_size)]` int32 blocks of the
                prompt.
            first_query: Position of the first query that the expectation stands for.

        Raises:
            ValueError: A dtype or head size that no kernel has.
        """
        ...

    def observe(
        self,
        query: torch.Tensor,
        pages: Pages,
        dense_blocks: torch.Tensor,
        first_position: int,
        state: State,
        params: LayerParams,
    ) -> None:
        """Add the attention of consecutive prompt queries to the prompt's state.

        The formula is the method's (`vllm_h2o.policy.methods`).

        Args:
            query: `[m, num_heads, head_size]`, queries at positions
                `first_position ..+ m`, after RoPE.
            pages: The layer's pages, read only.
            dense_blocks: `[>= cdiv(first_position + m, block_size)]` int32 blocks of
                the prompt.
            first_position: Position of `query[0]`.
            state: `[num_kv_heads, >= first_position + m]` float32 for each of the
                method's fields, of earlier queries; what none of them saw is as it was
                started (see `start`; 0 for what has a kernel). Updated in place.
            params: The layer's constants.

        Raises:
            ValueError: A dtype or head size that no kernel has.
        """
        ...

    def attend_observed(
        self,
        query: torch.Tensor,
        pages: Pages,
        dense_blocks: torch.Tensor,
        first_position: int,
        first_scoring: int,
        state: State,
        params: LayerParams,
        output: torch.Tensor,
    ) -> None:
        """`observe`, and the attention's output from the same pass over the keys.

        For steps in which most queries score, which the stock kernel and `observe`
        would both compute the logits of. Called on CPU only.

        Args:
            query: `[m, num_heads, head_size]`, see `observe`.
            pages: The layer's pages, read only.
            dense_blocks: See `observe`.
            first_position: Position of `query[0]`.
            first_scoring: Index of the first query that scores; those before it attend.
            state: See `observe`.
            params: The layer's constants.
            output: `[m, num_heads, head_size]`, written.

        Raises:
            ValueError: A dtype or head size that no kernel has.
        """
        ...

    def read_on(
        self,
        query: torch.Tensor,
        first_position: int,
        dense: Pages,
        pages: Pages,
        chunk: Chunk,
        state: State,
        params: LayerParams,
        output: torch.Tensor,
    ) -> None:
        """Attend to what is held and, causally, to the chunk; score both.

        Where nothing has been evicted this is attention to the whole prompt.

        Args:
            query: `[m, num_heads, head_size]`, queries at positions
                `first_position ..+ m` of the chunk, after RoPE.
            first_position: Position of `query[0]`; chunks may be read in steps.
            dense: The layer's pages that the chunk's tokens are in, up to the last
                query's, read only.
            pages: Those of resident blocks, read only.
            chunk: The chunk.
            state: What the chunk's steps so far have made of it; empty in its first.
                Afterwards `[num_kv_heads, held + chunk.end - chunk.start]` for each of
                the method's fields: of slots, as many as the head with the most holds,
                then of the chunk's tokens.
            params: The layer's constants.
            output: `[m, num_heads, head_size]`, written.
        """
        ...

    def compress_chunk(
        self, layers: Sequence[ScoredLayer], chunk: Chunk, config: H2OConfig
    ) -> None:
        """Select what each KV head keeps of its tokens and the chunk's, into its slots.

        Slots are laid out as if the prompt ended with the chunk and the head had lost
        all that it does not hold: recent tokens by position in the ring, the others by
        score. Only the chunk's own tokens are pooled.

        Args:
            layers: The layers, each with the state that `read_on` has left. What the
                gate expects of the chunk's tokens, if there is one, counts beside what
                they have got.
            chunk: The chunk, all of which has been read.
            config: The policy.
        """
        ...

    def move_keys(self, layers: Sequence[ScoredLayer], held: Held) -> None:
        """Move the keys up that get out of reach (`policy.reach`), where they are.

        Args:
            layers: The layers; their state is not used. Of those whose keys are not
                rotated none moves.
            held: What the request holds of the tokens that have been read.
        """
        ...
