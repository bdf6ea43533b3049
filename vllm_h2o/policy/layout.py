"""The resident slots of one request: a heavy set and a ring of recent tokens.

    slots [0, sinks)                 the first tokens, never evicted
    slots [sinks, heavy_slots)       heavy hitters, won by score
    slots [heavy_slots, budget)      a ring over the last recent_slots tokens

`budget`, `heavy_slots` and `recent_slots` are multiples of the block size, except
that a policy without a heavy set has just its sinks there, and that a single block is
split.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.gate import NUM_QUERIES
from vllm_h2o.policy.options import ALL_QUERIES, part_of, shown

_CACHE_LINE_FLOATS = 16


@dataclass(frozen=True)
class SlotLayout:
    """Where the tokens of a resident request live, in token slots.

    Attributes:
        block_size: Token slots per block.
        heavy_slots: Slots before the ring, sinks included.
        recent_slots: Slots of the ring.
        sinks: Leading heavy slots that are never overwritten.
        whole_blocks: Whether blocks compete instead of tokens.
    """

    block_size: int
    heavy_slots: int
    recent_slots: int
    sinks: int
    whole_blocks: bool

    @classmethod
    def from_config(
        cls, config: H2OConfig, block_size: int, max_model_len: int
    ) -> SlotLayout:
        """Round a config to blocks.

        Raises:
            ValueError: The budget leaves no heavy or no recent block where blocks
                compete, or the sinks do not fit.
        """
        # Slots past the longest sequence would never be used.
        asked = min(config.budget_tokens(max_model_len), max_model_len)
        blocks = -(-asked // block_size)
        layout = cls.of_blocks(config, block_size, blocks)
        fewest = cls.fewest_of_request(config, block_size)
        if blocks < fewest:
            what = "a heavy and a recent one"
            if config.eviction_unit == "token":
                what = f"which {config.sinks} sinks (--h2o-sinks) need"
            least = (fewest - 1) * block_size + 1
            fix = f"use {least} or more, or a smaller --block-size"
            if max_model_len < least:
                fix = (
                    f"use a smaller --block-size, as --max-model-len is {max_model_len}"
                )
            raise ValueError(
                f"h2o_budget (--h2o-budget) is {shown(config.budget)}, {asked} tokens: "
                f"less than {fewest} blocks of {block_size}, {what}; {fix}"
            )
        return layout

    @classmethod
    def of_blocks(cls, config: H2OConfig, block_size: int, blocks: int) -> SlotLayout:
        """The layout of a budget of `blocks` whole blocks, at least `fewest_blocks`."""
        budget = blocks * block_size
        heavy = cls._heavy_slots(config, block_size, blocks)
        most = heavy if config.keeps_heavy_set else budget - 1
        if config.sinks > most:
            raise ValueError(
                f"h2o_sinks (--h2o-sinks) is {shown(config.sinks)}: of the {budget} "
                f"slots of h2o_budget={shown(config.budget)} (--h2o-budget) sinks "
                f"may take {most}; use fewer sinks or a larger budget"
            )
        return cls(
            block_size=block_size,
            heavy_slots=heavy,
            recent_slots=budget - heavy,
            sinks=config.sinks,
            whole_blocks=config.eviction_unit == "block",
        )

    @staticmethod
    def _heavy_slots(config: H2OConfig, block_size: int, blocks: int) -> int:
        if not config.keeps_heavy_set:
            return config.sinks
        # Both parts share a single block; of more, each has whole ones.
        unit = block_size if blocks > 1 else 1
        units = blocks * block_size // unit
        recent = int(units * config.recent_ratio + 0.5)
        # The sinks come first, as far as they leave a recent part.
        least = min(max(-(-config.sinks // unit), 1), units - 1)
        return blocks * block_size - min(max(recent, 1), units - least) * unit

    @classmethod
    def fewest_blocks(cls, config: H2OConfig, block_size: int) -> int:
        """Smallest number of blocks that a head may get.

        One if the sinks fill at most half of it, else the fewest whose heavy set has
        room for the sinks.
        """
        if 2 * config.sinks <= block_size:
            return 1
        blocks = 2
        while cls._heavy_slots(config, block_size, blocks) < config.sinks:
            blocks += 1
        return blocks

    @classmethod
    def fewest_of_request(cls, config: H2OConfig, block_size: int) -> int:
        """Smallest number of blocks that a request may get.

        One, as far as the sinks leave room; two where blocks compete.
        """
        blocks = cls.fewest_blocks(config, block_size)
        if config.eviction_unit == "block":
            blocks = max(blocks, 2)
        return max(blocks, config.sinks // block_size + 1)

    @property
    def budget(self) -> int:
        """Token slots of a request."""
        return self.heavy_slots + self.recent_slots

    @property
    def budget_blocks(self) -> int:
        """Blocks of a request that fills its budget."""
        return self.budget // self.block_size

    @property
    def pinned_slots(self) -> int:
        """Leading slots that competition never touches.

        In whole-block mode a block that holds a sink is pinned whole.
        """
        if not self.whole_blocks:
            return self.sinks
        return -(-self.sinks // self.block_size) * self.block_size

    def slot(self, place: int) -> int:
        """Slot that a token is written to, by its place in the order of slots."""
        if place < self.heavy_slots:
            return place
        return self.heavy_slots + (place - self.heavy_slots) % self.recent_slots

    def resident_tokens(self, num_tokens: int) -> int:
        """Tokens of a sequence of `num_tokens` that are still held."""
        if num_tokens <= self.budget or not self.whole_blocks:
            return min(num_tokens, self.budget)
        # The ring block being rewritten holds only its new tokens.
        return self.budget - (-num_tokens) % self.block_size


def place_of(position: int, grown_at: int, held: int) -> int:
    """Place of a token in the order in which a head's slots are filled.

    It is the token's position, until the request's budget grows: then what the head
    holds takes the first places, oldest last but for the heavy set, and what comes next
    the places behind it.

    Args:
        position: Of the token.
        grown_at: Tokens of the sequence when its budget last grew; 0: it never has.
        held: What the head's budget was before that.
    """
    return position - grown_at + min(grown_at, held)


def state_bytes(
    num_kv_heads: int, block_size: int, num_fields: int = 1, page_floats: int = 0
) -> int:
    """Bytes of a page beside K and V.

    They are float32 fields and an int32 birth of each slot, then float32 of the page as
    a whole (`floats_of_page`).
    """
    return num_kv_heads * 4 * (block_size * (num_fields + 1) + page_floats)


def floats_of_page(
    head_size: int, block_size: int, reads_part: bool, merges: bool
) -> int:
    """What a KV head keeps of a page for the policy's options.

    Where queries read a part of the pages this is a bound of its keys (`[head_size]`,
    see `policy.sparse_read`). Where lost tokens are merged (see `policy.merging`) it is
    the inverse length of each key, which the C kernel compares with, and a threshold
    that takes a whole cache line, or the next page would begin within one.
    """
    return head_size * reads_part + (block_size + _CACHE_LINE_FLOATS) * merges


def first_observer(
    config: H2OConfig, prefill_end: int, window: int | str | None = None
) -> int:
    """Position of the first prompt query whose attention is scored, or expected.

    Args:
        config: The engine's policy.
        prefill_end: Tokens of the prompt.
        window: The request's own observation window; None: the policy's.
    """
    if config.gated:
        return max(0, prefill_end - NUM_QUERIES)
    window = config.observation_window if window is None else window
    if window == ALL_QUERIES:
        return 0
    if isinstance(window, str):
        window = part_of(prefill_end, window)
    return max(0, prefill_end - window)
