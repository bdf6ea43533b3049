"""The peers: NVIDIA's kvpress on transformers, forced and asked as the engine is.

kvpress compresses the prompt at its end and, with its decoding wrapper, again
after every `interval_tokens` read tokens, each time to the budget: a query
attends to at most budget + interval tokens, itself included (`held_tokens` says
how many it were). Presses run as kvpress ships them but for three things:

* transformers 5.3 stopped handing `cache_position` to the attention modules, which
  kvpress reads: it is given explicitly, with the logical positions.
* kvpress leaves the kept tokens in the order of their scores, and then takes the
  first slots for the sinks (StreamingLLM) and a slot's number for its age
  (ObservedAttention): here kept tokens stay in the order of time.
* SnapKV's window must be shorter than the decoding interval, after the prompt.

What the decoding wrapper of kvpress 0.5.5 does is left as it is, though after the
prompt ObservedAttention sees the probabilities of the last query only, SnapKV
rotates its whole window to the position of its last query, and ExpectedAttention
expects queries at positions right after its buffer instead of after the text.

Layers that attend within a sliding window keep it, as in the engine: kvpress says so
of Gemma 3, but sees only the variant with pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from kvpress import (
    DecodingPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    ObservedAttentionPress,
    PrefillDecodingPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.utils import compute_n_kept
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.quality.reading import (
    AnswersGreedily,
    ForcedRecord,
    force,
    record_all,
    stop_token_ids,
    write_reference,
)

FULL = "full"
INTERVAL_TOKENS = 16
SNAPKV_WINDOW = 64
OBSERVED = "observed_attention"
PRESSES: dict[str, type[ScorerPress]] = {
    OBSERVED: ObservedAttentionPress,
    "snapkv": SnapKVPress,
    "tova": TOVAPress,
    "streaming_llm": StreamingLLMPress,
    "keydiff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
    "random": RandomPress,
}


def compression_ratio(budget_tokens: int, prompt_tokens: int) -> float:
    """What makes kvpress keep a budget: it keeps int(n * (1 - ratio)) tokens."""
    return max(0.0, 1 - (budget_tokens + 0.5) / prompt_tokens)


class TimeOrdered:
    """Mixed into a `ScorerPress`: the kept tokens stay in the order of time."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """`ScorerPress.compress`, with sorted slots."""
        if not self.compression_ratio:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        num_kept = compute_n_kept(keys.shape[2], self.compression_ratio)
        slots = scores.topk(num_kept, dim=-1).indices.sort(dim=-1).values
        slots = slots.unsqueeze(-1).expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, slots), values.gather(2, slots)


class PressReader:
    """A `Reader`: a transformers model, a cache, and kvpress's hooks on the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self._evicting = self.cache.is_sliding.index(False)
        self.position = 0
        self.held_tokens = 0

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read at the logical positions, whatever the cache still holds."""
        positions = torch.arange(self.position, self.position + tokens.shape[1])
        if self.position:
            held = self.cache.get_seq_length(self._evicting) + tokens.shape[1]
            self.held_tokens = max(self.held_tokens, held)
        self.position += tokens.shape[1]
        return self.model(
            input_ids=tokens,
            past_key_values=self.cache,
            position_ids=positions[None],
            cache_position=positions,
            logits_to_keep=1,
        ).logits[:, -1]


def _leave_windows_alone(model: PreTrainedModel) -> None:
    """Take a press's hooks off the layers that attend within a sliding window."""
    for layer in model.model.layers:
        if getattr(layer.self_attn, "is_sliding", False):
            layer.self_attn._forward_hooks.clear()


class PeerRunner(AnswersGreedily):
    """The presses of `PRESSES`, and "full", on one model.

    Args:
        model_folder: a llama, as `from_pretrained` takes it.
        interval_tokens: read tokens from one compression to the next.
        time_ordered: keep the kept tokens in the order of time; else as shipped.
        seed: of the random press.
        dtype: of the model.
    """

    def __init__(
        self,
        model_folder: Path,
        interval_tokens: int = INTERVAL_TOKENS,
        time_ordered: bool = True,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=dtype
        ).eval()
        self.interval_tokens = interval_tokens
        self.time_ordered = time_ordered
        self.seed = seed
        self.stops = stop_token_ids(self.model.generation_config)

    def forced(
        self,
        press: str,
        prompts: list[list[int]],
        continuations: list[list[int]],
        budget_tokens: int,
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """Read each prompt, then be forced through its continuation.

        Args:
            press: a name of `PRESSES`, or "full", which writes the references.
            prompts: of equal length; they are read as one batch.
            continuations: of equal length, one per prompt.
            budget_tokens: what a KV head holds after each compression.
            references: one file per text; None for no KL.
        """
        if press == FULL:
            return self._forced_full(prompts, continuations, references)
        with self.reader(press, budget_tokens, len(prompts[0])) as reader:
            return force(reader, prompts, continuations, references)

    @torch.no_grad()
    def _forced_full(
        self,
        prompts: list[list[int]],
        continuations: list[list[int]],
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """All of a text in one pass; its KL is what float16 costs the reference."""
        records = []
        for text, (prompt, forced) in enumerate(
            zip(prompts, continuations, strict=True)
        ):
            logits = self.model(
                input_ids=torch.tensor([prompt + forced[:-1]]),
                use_cache=False,
                logits_to_keep=len(forced),
            ).logits[0]
            path = references[text] if references else None
            if path:
                write_reference(path, logits)
            record = record_all(logits, forced, path)
            record.held_tokens = len(prompt) + len(forced) - 1
            records.append(record)
        return records

    @contextmanager
    def reader(
        self, press: str, budget_tokens: int, prompt_tokens: int
    ) -> Iterator[PressReader]:
        """A fresh cache, and the hooks of the press while it lasts."""
        # Only the eager attention returns the probabilities that this one sums.
        self.model.set_attn_implementation("eager" if press == OBSERVED else "sdpa")
        if press == FULL:
            yield PressReader(self.model)
            return
        torch.manual_seed(self.seed)
        with self._wrapped(press, budget_tokens, prompt_tokens)(self.model):
            _leave_windows_alone(self.model)
            yield PressReader(self.model)

    def _wrapped(
        self, name: str, budget_tokens: int, prompt_tokens: int
    ) -> PrefillDecodingPress:
        """The press for the prompt and for what follows it."""
        prompt_press, later_press = self._press(name), self._press(name)
        if prompt_tokens > budget_tokens:
            ratio = compression_ratio(budget_tokens, prompt_tokens)
            prompt_press.compression_ratio = ratio
        if isinstance(later_press, SnapKVPress):
            later_press.window_size = min(SNAPKV_WINDOW, self.interval_tokens - 1)
        return PrefillDecodingPress(
            prefilling_press=prompt_press,
            decoding_press=DecodingPress(
                base_press=later_press,
                compression_interval=self.interval_tokens,
                target_size=budget_tokens,
            ),
        )

    def _press(self, name: str) -> ScorerPress:
        if name not in PRESSES:
            raise ValueError(f"no press {name!r}: one of {[FULL, *PRESSES]}")
        press = PRESSES[name]
        if self.time_ordered:
            press = type(f"TimeOrdered{press.__name__}", (TimeOrdered, press), {})
        return press()
