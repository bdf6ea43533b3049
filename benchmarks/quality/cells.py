"""One measurement: a system under a policy and a budget, at one kind of work.

Every cell runs in a process of its own (`run_apart`), so that its memory is gone
after it; what it measured comes back as rows of the CSV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.process import run_in_process
from benchmarks.quality.reading import ForcedRecord
from benchmarks.quality.ruler import ANSWER_TOKENS as RULER_TOKENS
from benchmarks.quality.ruler import ruler_questions
from benchmarks.quality.tasks import Question, questions
from benchmarks.quality.texts import kinds_of, texts
from benchmarks.smollm2 import ensure_model
from vllm_h2o.attention.ops import KERNELS
from vllm_h2o.policy.methods import fused_form_of
from vllm_h2o.policy.presets import PRESETS

FULL = "full"
ENGINE, KVPRESS, BLOCKS, TORCH = "vllm_h2o", "kvpress", "shared_blocks", "torch"
PROMPT_ONLY = "prompt_only"
LOSS, RETRIEVAL, GENERATION = "loss", "retrieval", "generation"
BLOCK_SIZE = ENGINE_ARGS["block_size"]
ANSWER_TOKENS = 24
NGRAM = 4
_POOL_GIB = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        system: `vllm_h2o` (the engine), `kvpress`, `shared_blocks`, `torch`, or
            `prompt_only` (policies of the engine, and kvpress's).
        policy: Name within the system; `full` is the full cache.
        work: `loss`, `retrieval` or `generation`.
        budget_tokens: Token slots, 0 for the full cache.
        context_tokens: Length of a text, of a question's prompt, or of prompt and
            generated tokens.
        scored_tokens: Forced tokens of a text, or generated ones.
        options: `h2o_*` options of the engine by name without the prefix.
        label: What the CSV calls the policy, if not its name.
        question_known: Whether the question is there when the prompt is compressed.
        per_kind: Texts of each kind.
        tasks: Retrieval tasks by name, of `tasks` or of `ruler`.
        depths: Of the answers, 0 to 1.
        per_depth: Questions per task and depth.
        model: A folder.
        seed: Of the questions.
        references: Folder of the full cache's log-softmax per text, or "".
        texts: Folder of .txt files, each a kind; "" for the kinds of `texts.py`.
        max_model_len: Of the engine; 0: what the texts need.
        dtype: Of the model; "": that of all benchmarks. What is in plain torch has
            float32.
    """

    system: str
    policy: str
    work: str
    budget_tokens: int
    context_tokens: int
    scored_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    question_known: bool = True
    per_kind: int = 1
    tasks: list[str] = field(default_factory=lambda: ["passkey", "needles"])
    depths: list[float] = field(default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 0.9])
    per_depth: int = 4
    model: str = field(default_factory=lambda: str(ensure_model()))
    seed: int = 0
    references: str = ""
    texts: str = ""
    max_model_len: int = 0
    dtype: str = ""

    @property
    def name(self) -> str:
        """What the CSV calls the policy."""
        return self.label or self.policy

    @property
    def samples(self) -> int:
        """Predictions, questions per task or texts behind its first metric."""
        if self.work == RETRIEVAL:
            return len(self.depths) * self.per_depth
        texts = len(kinds_of(self.texts)) * self.per_kind
        return texts * self.scored_tokens if self.work == LOSS else texts


Rows = list[tuple[str, float, int]]
"""`(metric, value, samples)`."""


def run_apart(cell: Cell) -> Rows:
    """Run one cell in a process of its own.

    Raises:
        subprocess.CalledProcessError: It failed; its traceback is on stderr.
    """
    # With a worker in this process no other one waits for it at full load.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if _POOL_GIB not in os.environ:
        env[_POOL_GIB] = "2"
    if cell.policy in PRESETS:
        config = replace(PRESETS[cell.policy], **cell.options)
        if fused_form_of(config.method) is None:
            env[KERNELS] = "reference"
    rows = run_in_process("benchmarks.quality.cells:run_job", asdict(cell), env)
    return [tuple(row) for row in rows]


def run_job(job: dict[str, Any]) -> Rows:
    """Run a cell that came as JSON."""
    return run(Cell(**job))


def run(cell: Cell) -> Rows:
    """Run one cell here."""
    from benchmarks.quality.systems import system_of

    measure = {LOSS: _loss, RETRIEVAL: _retrieval, GENERATION: _generation}[cell.work]
    system = system_of(cell)
    try:
        return measure(cell, system)
    finally:
        system.close()


def _loss(cell: Cell, system: Any) -> Rows:
    found = texts(system.tokenizer, cell.context_tokens, cell.per_kind, cell.texts)
    cut = cell.context_tokens - cell.scored_tokens
    samples = [tokens for kind in found.values() for tokens in kind]
    references = [Path(cell.references) / f"{i}.npy" for i in range(len(samples))]
    records = system.forced(
        [tokens[:cut] for tokens in samples],
        [tokens[cut:] for tokens in samples],
        references if cell.references else None,
    )
    kinds = [kind for kind, tokens in found.items() for _ in tokens]
    rows = _loss_rows(records, "")
    for kind in found:
        mine = [r for r, k in zip(records, kinds, strict=True) if k == kind]
        rows += [r for r in _loss_rows(mine, f"_{kind}") if "loss" in r[0]]
    if held := max(r.held_tokens for r in records):
        rows.append(("held_tokens", held, len(records)))
    return rows


def _loss_rows(records: list[ForcedRecord], suffix: str) -> Rows:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    logprobs = [p for record in records for p in record.logprobs]
    rows = [(f"loss_nats{suffix}", -mean(logprobs), len(logprobs))]
    if kl := [k for record in records for k in record.kl]:
        full = [p for record in records for p in record.full_logprobs]
        delta = mean(full) - mean(logprobs)
        rows.append((f"loss_delta_nats{suffix}", delta, len(kl)))
        agreed = [float(a) for record in records for a in record.agreed]
        rows.append((f"kl_nats{suffix}", mean(kl), len(kl)))
        rows.append((f"top1_agreement{suffix}", mean(agreed), len(agreed)))
    return rows


def _retrieval(cell: Cell, system: Any) -> Rows:
    known = "known" if cell.question_known else "unknown"
    rows: Rows = []
    for task in cell.tasks:
        asked = questions_of(cell, task, system.tokenizer)
        answers = system.answers(
            [q.context for q in asked],
            [q.question for q in asked],
            RULER_TOKENS.get(task, ANSWER_TOKENS),
            cell.question_known,
        )
        decoded = system.tokenizer.batch_decode(answers, skip_special_tokens=True)
        pairs = [
            (q, q.share_answered_by(x)) for q, x in zip(asked, decoded, strict=True)
        ]
        lengths = [len(q.context) + len(q.question) for q in asked]
        if task in RULER_TOKENS:
            rows.append(_share(f"ruler_{task}_{known}", pairs))
            mean = sum(lengths) / len(lengths)
            rows.append((f"ruler_{task}_{known}_prompt_tokens", mean, len(asked)))
            continue
        rows.append(_share(f"exact_match_{task}_{known}", pairs))
        if task == "passkey":
            for depth in cell.depths:
                at = [pair for pair in pairs if pair[0].depth == depth]
                rows.append(_share(f"exact_match_{task}_{known}_depth_{depth}", at))
    return rows


def questions_of(cell: Cell, task: str, tokenizer: Any) -> Sequence[Question]:
    """The questions of one of a cell's tasks."""
    if task in RULER_TOKENS:
        shape = cell.context_tokens, cell.samples, cell.seed
        return ruler_questions(tokenizer, task, *shape)
    return questions(
        tokenizer, [task], cell.context_tokens, cell.depths, cell.per_depth, cell.seed
    )


def _share(metric: str, pairs: list[tuple[Question, float]]) -> tuple[str, float, int]:
    return metric, sum(right for _, right in pairs) / len(pairs), len(pairs)


def _generation(cell: Cell, system: Any) -> Rows:
    """Agreement is over the full cache's own text, forced; repetition is free."""
    cut = cell.context_tokens - cell.scored_tokens
    found = texts(system.tokenizer, cut, cell.per_kind)
    prompts = [tokens for kind in found.values() for tokens in kind]
    free = system.generate(prompts, cell.scored_tokens)
    count = len(prompts)
    rows: Rows = [
        ("repetition_rate", sum(map(repetition_rate, free)) / count, count),
    ]
    path = Path(cell.references) / "generated.json"
    if cell.policy == FULL:
        path.write_text(json.dumps(free))
        return rows
    full = json.loads(path.read_text())
    records = system.forced(prompts, full, None)
    agreed = [
        float(mine == theirs)
        for record, tokens in zip(records, full, strict=True)
        for mine, theirs in zip(record.top1, tokens, strict=True)
    ]
    prefixes = [common_prefix(a, b) for a, b in zip(free, full, strict=True)]
    rows.append(("generation_agreement", sum(agreed) / len(agreed), len(agreed)))
    rows.append(("tokens_until_divergence", sum(prefixes) / count, count))
    return rows


def repetition_rate(tokens: list[int]) -> float:
    """Share of 4-grams that stood before."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens until the first difference."""
    pairs = zip(a, b, strict=False)
    same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    return min(len(a), len(b)) if same is None else same
