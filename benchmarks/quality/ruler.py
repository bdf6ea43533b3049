"""RULER's synthetic tasks, as lm_eval makes them, in the form of `tasks.Question`.

    niah_single_1     a number among sentences that repeat
    niah_multikey_2   a number among such numbers
    niah_multikey_3   a UUID among UUIDs
    vt                the names that a value is assigned to, one from the other
    cwe               the ten words that a list has most often
    fwe               the three words that a text has most often

Source: RULER (arXiv 2404.06654), lm_eval's generators. `pip install --no-deps -r
requirements/quality.txt` brings them; nothing is downloaded. The chat template is
applied, and the answer is begun as lm_eval does it.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.tasks import Question

NEEDLES = {
    "niah_single_1": ("repeat", "words", "numbers"),
    "niah_multikey_2": ("needle", "words", "numbers"),
    "niah_multikey_3": ("needle", "uuids", "uuids"),
}
"""Haystack, keys and values."""
ANSWER_TOKENS = dict.fromkeys(NEEDLES, 48) | {"vt": 30, "cwe": 120, "fwe": 50}
"""Lengths of answers, RULER's but for needles, which it gives 128: what is asked for
comes first."""
TASKS = tuple(ANSWER_TOKENS)
LEAST_TOKENS = 1024
"""Least length: below, the generator of `vt` looks for a shorter text for ever."""


class RulerQuestion(Question):
    """A `Question` that RULER's own measure marks."""

    def share_answered_by(self, text: str) -> float:
        """Which part of the answers the output contains, in any case of letters."""
        found = [answer.lower() in text.lower() for answer in self.answers]
        return sum(found) / len(found)


def ruler_questions(
    tokenizer: Any, task: str, num_tokens: int, count: int, seed: int
) -> list[Question]:
    """So many questions of a task.

    Args:
        tokenizer: With a chat template.
        task: One of `TASKS`.
        num_tokens: Of prompt and answer before the template, as the generators count;
            most prompts are shorter.
        count: Of questions.
        seed: Of all that is random.

    Raises:
        ValueError: They are too short for a task.
    """
    if num_tokens < LEAST_TOKENS:
        raise ValueError(f"a length is {num_tokens}: use {LEAST_TOKENS} or more")
    random.seed(seed)
    np.random.seed(seed)
    # The generators show how far they are.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        samples = _samples(tokenizer, task, num_tokens, count, seed)
    assert len(samples) == count, "lm_eval leaves out what does not fit"
    return [_question(tokenizer, task, sample) for sample in samples]


def _samples(
    tokenizer: Any, task: str, num_tokens: int, count: int, seed: int
) -> list[dict]:
    have_tokenizer_of_sentences()
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, vt_utils

    if task in NEEDLES:
        haystack, keys, values = NEEDLES[task]
        return niah_utils.generate_samples(
            niah_utils.get_haystack(haystack),
            TOKENIZER=tokenizer,
            max_seq_length=num_tokens,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            template=niah_utils.TEMPLATE,
            num_samples=count,
        )
    if task == "vt":
        make = vt_utils.sys_vartrack_w_noise_random
        (example,) = make(tokenizer, 1, 500, incremental=5)
        return make(tokenizer, count, num_tokens, icl_example=example)
    if task == "cwe":
        cwe_utils.RNG.seed(seed)
        return cwe_utils.sys_word_pair_random(count, num_tokens, tokenizer)
    return fwe_utils.sys_kwext(tokenizer, num_tokens, count)


@cache
def have_tokenizer_of_sentences() -> tempfile.TemporaryDirectory[str]:
    """Pretend that nltk has what lm_eval would download for tasks of essays.

    Returns:
        What nltk looks into, and has to be there when lm_eval is imported.
    """
    import nltk

    folder = tempfile.TemporaryDirectory(prefix="vllm_h2o_nltk_")
    (Path(folder.name) / "tokenizers" / "punkt_tab").mkdir(parents=True)
    nltk.data.path.append(folder.name)
    return folder


def _question(tokenizer: Any, task: str, sample: dict[str, Any]) -> Question:
    """The context ends before the last line, which asks."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample["input"]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    haystack = sample["input"].rpartition("\n")[0]
    end = text.index(haystack) + len(haystack)
    context, question = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (text[:end], text[end:] + sample["gen_prefix"])
    )
    return RulerQuestion(task, 0.0, context, question, tuple(sample["outputs"]))
