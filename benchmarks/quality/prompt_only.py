"""Prompts that are compressed once: what follows them is kept whole.

KVzip and its like have no other form. A method says which tokens of the prompt each KV
head of each layer keeps; the model reads on over these and over all later tokens, by
masks, in one pass as one token at a time. All methods keep as many tokens in all,
budget x KV heads x layers, but ours and `lukv`: a head whose budget is more than the
prompt has leaves slots empty.

The peers are kvpress's, as shipped, with these exceptions:

* SnapKV and TOVA, which drop tokens, are wrapped in AdaKV with a safeguard of 1: heads
  keep equally many, and the others are masked.
* KVzip and KVgrad take a chat template's first tokens off any prompt, and have the
  text repeated in an assistant's turn. Here all tokens of a prompt are scored, and
  plain text is repeated after a line break, as they do it without a template.
* `kvzap` is fitted here, as its authors' is: ridge regression from what enters a
  layer's attention to the logarithm of KVzip+'s scores, on the texts that measure
  heads. Tokens of all layers compete, as they do in KVzip, where its authors set a
  threshold; the last 128 are kept as there, or half of the budget.
* `lukv` is ExpectedAttention under this package's head budgets: its curves are of
  other models.

Ours keep what the engine has kept when the prompt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kvpress import (
    AdaKVPress,
    CompactorPress,
    CriticalAdaKVPress,
    ExpectedAttentionPress,
    KVgradPress,
    KVzipPress,
    LUKVPress,
    SnapKVPress,
    TOVAPress,
)
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
)

from benchmarks.quality.peers import compression_ratio
from benchmarks.quality.reading import (
    AnswersGreedily,
    ForcedRecord,
    record_all,
    stop_token_ids,
)
from vllm_h2o.calibration.texts import calibration_texts

Kept = list[torch.Tensor]
"""`[num_kv_heads, n]` bool of each layer: which of a prompt's tokens are kept."""

ATTENTION = "kept"
FULL_LAYERS = "full_attention"
KVZAP, LUKV = "kvzap", "lukv"
KVZAP_WINDOW = 128
FITTED_TOKENS = 2048
"""Tokens of each text that `kvzap` is fitted on."""


def _expected() -> ExpectedAttentionPress:
    return ExpectedAttentionPress(epsilon=1e-2)


PRESSES: dict[str, Callable[[], Any]] = {
    "snapkv": lambda: AdaKVPress(SnapKVPress(), alpha_safeguard=1.0),
    "tova": lambda: AdaKVPress(TOVAPress(), alpha_safeguard=1.0),
    "adakv_snapkv": lambda: AdaKVPress(SnapKVPress()),
    "adakv_expected_attention": lambda: AdaKVPress(_expected()),
    "critical_adakv_snapkv": lambda: CriticalAdaKVPress(SnapKVPress()),
    "adakv_compactor": lambda: AdaKVPress(CompactorPress()),
    "kvzip": KVzipPress,
    "kvzip_plus": lambda: KVzipPress(kvzip_plus_normalization=True),
    "kvgrad": KVgradPress,
    LUKV: LUKVPress,
}
METHODS = (*PRESSES, KVZAP)


def attend_kept(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention to what `module.kept` keeps of the prompt and to all that follows it.

    After transformers' attention interface: `query` is `[1, num_heads, m, d]`, of the
    last m tokens of `key` and `value`, `[1, num_kv_heads, n, d]`.
    """
    m, n, kept = query.shape[2], key.shape[2], getattr(module, "kept", None)
    group = query.shape[1] // key.shape[1]
    seen = torch.ones(m, n, dtype=torch.bool).tril(n - m)[None]
    if kept is not None:
        later = kept.new_ones(len(kept), n - kept.shape[1])
        seen = seen & torch.cat([kept, later], dim=1)[:, None]
        seen = seen.repeat_interleave(group, 0)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[None], scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


class KeptReader:
    """A `Reader`: its first tokens are the prompt, of which a method keeps a part.

    Args:
        model: Of `PromptOnlyRunner`.
        keep: Returns a cache with the prompt, what is kept of it, and the logits
            `[1, vocab]` after it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        keep: Callable[[torch.Tensor], tuple[DynamicCache, Kept, torch.Tensor]],
    ) -> None:
        self.model = model
        self.keep = keep
        self.cache: DynamicCache | None = None
        self.held_tokens = 0

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Reader`."""
        if self.cache is not None:
            return self.read_on(tokens)[:, -1]
        self.cache, kept, logits = self.keep(tokens)
        held = sum(float(mask.sum()) / len(mask) for mask in kept)
        self.held_tokens = round(held / len(kept))
        for layer, mask in zip(self.model.model.layers, kept, strict=True):
            layer.self_attn.kept = mask
        return logits

    def read_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[1, m, vocab]` logits after each of `[1, m]` tokens that follow."""
        self.held_tokens += tokens.shape[1]
        self.model.set_attn_implementation(ATTENTION)
        return self.model(input_ids=tokens, past_key_values=self.cache).logits


class PromptOnlyRunner(AnswersGreedily):
    """The methods of `METHODS`, and the engine's policies, on one model.

    Args:
        model_folder: A llama with its tokenizer, as `from_pretrained` takes it.
        engine: Starts an engine with H2O, of the budget that is asked for; None: no
            policies, and no `lukv`.
        dtype: Of the model.
    """

    def __init__(
        self,
        model_folder: Path,
        engine: Callable[[], Any] | None = None,
        dtype: str = "float32",
    ) -> None:
        AttentionInterface.register(ATTENTION, attend_kept)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=dtype
        ).eval()
        config = self.model.config
        windowed = getattr(config, "use_sliding_window", True) and getattr(
            config, "sliding_window", None
        )
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {FULL_LAYERS} or (windowed and not kinds):
            raise ValueError(
                f"{model_folder} has layers without full attention, and there are no "
                "masks for these: use a llama"
            )
        self.model.requires_grad_(False)
        self.stops = stop_token_ids(self.model.generation_config)
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._engine, self._llm = engine, None
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._zap: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forced(
        self,
        policy: str,
        prompts: list[list[int]],
        continuations: list[list[int]],
        budget_tokens: int,
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """Read each prompt, then its continuation in one pass; see `PeerRunner`."""
        records = []
        for i, (prompt, forced) in enumerate(zip(prompts, continuations, strict=True)):
            with torch.no_grad(), self.reader(policy, budget_tokens) as reader:
                first = reader.read(torch.tensor([prompt]))
                later = reader.read_on(torch.tensor([forced[:-1]]))[0]
            logits = torch.cat([first, later])
            record = record_all(logits, forced, references and references[i])
            record.held_tokens = reader.held_tokens
            records.append(record)
        return records

    def close(self) -> None:
        """Let go of the engine."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def reader(
        self, policy: str, budget_tokens: int, _prompt_tokens: int = 0
    ) -> Iterator[KeptReader]:
        """A fresh cache; what a prompt keeps is forgotten at the end."""
        keep = {KVZAP: self._kept_by_kvzap}.get(policy, self._kept_by_press)
        if policy not in METHODS:
            keep = self._kept_by_engine
        try:
            yield KeptReader(self.model, lambda ids: keep(policy, ids, budget_tokens))
        finally:
            for layer in self.model.model.layers:
                layer.self_attn.kept = layer.self_attn.masked_key_indices = None

    def _kept_by_press(
        self, name: str, ids: torch.Tensor, budget_tokens: int
    ) -> tuple[DynamicCache, Kept, torch.Tensor]:
        press = PRESSES[name]()
        n = ids.shape[1]
        press.compression_ratio = compression_ratio(budget_tokens, n)
        if isinstance(press, KVzipPress):  # drops int(tokens of all heads * ratio)
            press.compression_ratio = max(0.0, 1 - budget_tokens / n)
        if isinstance(press, LUKVPress):
            press._budget_curves = self._curves(budget_tokens, n)
        with press(self.model):
            cache, logits = self._read(ids)
            self._as_it_comes(press, ids)
        return cache, self._masks(n), logits

    def _as_it_comes(self, press: Any, ids: torch.Tensor) -> None:
        """Have KVzip score all of a prompt, and repeat it as the prompt is written."""
        if not isinstance(press, KVzipPress):
            return
        press.prefix_length = 0
        if not self._is_chat(ids[0]):
            press._suffix_ids = self._tokenizer.encode(
                "\n", return_tensors="pt", add_special_tokens=False
            )

    def _is_chat(self, ids: torch.Tensor) -> bool:
        """Whether a prompt begins as the chat template does."""
        if self._tokenizer.chat_template is None:
            return False
        turn = [{"role": "user", "content": ""}]
        text = self._tokenizer.apply_chat_template(turn, tokenize=False)
        begun = self._tokenizer(text, add_special_tokens=False)["input_ids"][:2]
        return ids[:2].tolist() == begun

    def _masks(self, n: int) -> Kept:
        """What the press left unmasked."""
        kept = []
        for layer in self.model.model.layers:
            mask = torch.ones(self.model.config.num_key_value_heads, n).bool()
            if (masked := layer.self_attn.masked_key_indices) is not None:
                mask[masked[1], masked[2]] = False
            kept.append(mask)
        return kept

    def _read(self, ids: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
        self.model.set_attn_implementation("sdpa")
        cache, positions = DynamicCache(), torch.arange(ids.shape[1])
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        logits = self.model(
            input_ids=ids,
            past_key_values=cache,
            cache_position=positions,
            logits_to_keep=1,
        ).logits[:, -1]
        return cache, logits

    def _curves(self, budget_tokens: int, n: int) -> Any:
        """Shares of a prompt that each head drops, whatever the ratio."""
        kept = self._own_slots(budget_tokens, n).clamp(max=n)
        return (1 - kept / n).expand(99, -1, -1).numpy()

    def _own_slots(self, budget_tokens: int, n: int) -> torch.Tensor:
        """`[layers, KV heads]` slots of the package's head budgets."""
        if (budget_tokens, n) not in self._slots:
            kept = self._engine_masks(torch.arange(n)[None])
            counts = torch.stack([mask.sum(dim=-1) for mask in kept]).float()
            self._slots[budget_tokens, n] = counts
        return self._slots[budget_tokens, n]

    def _kept_by_engine(
        self, _policy: str, ids: torch.Tensor, _budget_tokens: int
    ) -> tuple[DynamicCache, Kept, torch.Tensor]:
        cache, logits = self._read(ids)
        return cache, self._engine_masks(ids), logits

    def _engine_masks(self, ids: torch.Tensor) -> Kept:
        """What the engine keeps of a prompt when it ends."""
        from vllm import SamplingParams

        from vllm_h2o.inspect import watched_answer

        assert self._engine is not None
        self._llm = self._llm or self._engine()
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        _, record = watched_answer(self._llm, ids[0].tolist(), params)
        n, heads = ids.shape[1], self.model.config.num_key_value_heads
        kept = [torch.ones(heads, n).bool() for _ in self.model.model.layers]
        for head in record["heads"] if record else ():
            lost_at = torch.tensor(head["lost_at"][:n])
            kept[head["layer"]][head["head"]] = lost_at != 0
        return kept

    def _kept_by_kvzap(
        self, _name: str, ids: torch.Tensor, budget_tokens: int
    ) -> tuple[DynamicCache, Kept, torch.Tensor]:
        if not self._zap:
            self._zap = self._fitted()
        with self._entering() as hidden:
            cache, logits = self._read(ids)
        scores = torch.stack(
            [x @ w + b for x, (w, b) in zip(hidden, self._zap, strict=True)]
        ).transpose(1, 2)
        scores[..., : KVzipPress().n_sink] = float("inf")
        scores[..., -min(KVZAP_WINDOW, budget_tokens // 2) :] = float("inf")
        most = budget_tokens * scores.shape[0] * scores.shape[1]
        mask = torch.zeros(scores.numel(), dtype=torch.bool)
        mask[scores.flatten().topk(min(most, scores.numel())).indices] = True
        return cache, list(mask.view(scores.shape)), logits

    @contextmanager
    def _entering(self) -> Iterator[list[torch.Tensor]]:
        """What enters the attention of each layer, `[n, d]`, once a text is read."""
        hidden: list[torch.Tensor] = []

        def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            hidden.append(kwargs["hidden_states"][0])

        handles = [
            layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
            for layer in self.model.model.layers
        ]
        try:
            yield hidden
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _fitted(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weights `[d, KV heads]` and constants of each layer, as `kvzap` has them."""
        entering, wanted = [], []
        for text in calibration_texts(FITTED_TOKENS).values():
            press = KVzipPress(compression_ratio=0.5, kvzip_plus_normalization=True)
            found: list[torch.Tensor] = []
            press.compress_post = lambda _model, press=press, found=found: found.append(
                press.score_val[:, 0].clone()
            )
            ids = torch.tensor([self._tokenizer(text)["input_ids"][:FITTED_TOKENS]])
            with press(self.model):
                with self._entering() as hidden:
                    self._read(ids)
                self._as_it_comes(press, ids)
            entering.append(torch.stack(hidden))
            wanted.append(found[0].transpose(1, 2).clamp(min=1e-9).log())
        x, y = torch.cat(entering, dim=1), torch.cat(wanted, dim=1)
        fitted = []
        for mine, target in zip(x.double(), y.double(), strict=True):
            mean, goal = mine.mean(0), target.mean(0)
            centred = mine - mean
            gram = centred.T @ centred
            gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
            weight = torch.linalg.solve(gram, centred.T @ (target - goal))
            fitted.append((weight.float(), (goal - mean @ weight).float()))
        return fitted
