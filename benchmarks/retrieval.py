"""Questions about a long prompt, known when it is compressed or asked later.

    python -m benchmarks.retrieval --model FOLDER --lengths 1024 2048 --output FILE

The tasks are needles in three forms (`benchmarks.quality.tasks`) and RULER's
(`benchmarks.quality.ruler`), 20 questions each. One engine has them all: each question
is asked of the full cache first, so that the others find its prompt in the prefix
cache, and then with each budget. Tasks of which the full cache answers less than
`--least` say nothing about what eviction loses, and are left at that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers import MIN_BUDGET
from benchmarks.cells import ENGINE_ARGS
from benchmarks.forcing import forced, processor
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.quality.cells import (
    ANSWER_TOKENS,
    ENGINE,
    FULL,
    RETRIEVAL,
    Cell,
    questions_of,
)
from benchmarks.quality.reading import stop_token_ids, until_stop
from benchmarks.quality.ruler import ANSWER_TOKENS as TOKENS
from benchmarks.quality.ruler import LEAST_TOKENS
from benchmarks.quality.tasks import RECIPES, Question
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model

TASKS = ("needles", "paraphrased", "decoys", *TOKENS)
BUDGETS = "50%", "20%", "10%"


def main(argv: list[str] | None = None) -> None:
    """Ask, print a line for each task and way, write JSON."""
    args = parse_args(argv)
    results = []
    for length in args.lengths:
        job = vars(args) | {"output": None, "length": length}
        env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        results += run_in_process("benchmarks.retrieval:measure", job, env)
        write_json(args, results=results)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="a folder; SmolLM2-135M")
    help_ = "of prompts in tokens, the chat template aside"
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[LEAST_TOKENS], help=help_
    )
    help_ = ", ".join(TASKS)
    parser.add_argument("--tasks", nargs="+", choices=(*RECIPES, *TOKENS), help=help_)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="richest first")
    parser.add_argument("--per-depth", type=int, default=4, help="of 5 depths")
    parser.add_argument(
        "--least",
        type=float,
        default=0.5,
        help="share that the full cache answers, or a task is left at that",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--h2o-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    args = parser.parse_args(argv)
    args.tasks = args.tasks or list(TASKS)
    if set(args.tasks) & set(TOKENS) and min(args.lengths) < LEAST_TOKENS:
        parser.error(
            f"--lengths has {min(args.lengths)}: RULER's tasks need {LEAST_TOKENS}"
        )
    return args


def ways(budgets: list[str]) -> list[dict[str, Any]]:
    """What is asked in turn; `full` first, whose prompts the others find."""
    asked = [{"budget": FULL, "known": True}]
    return asked + [{"budget": b, "known": k} for k in (True, False) for b in budgets]


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Inside the process: a result for each task and way."""
    from transformers import GenerationConfig
    from vllm import LLM

    model = job["model"] or str(ensure_model())
    options = {
        "kv_policy": "h2o", "h2o_budget": job["budgets"][0],
        "h2o_min_budget": MIN_BUDGET, "enable_prefix_caching": True,
        # Besides the chat template, whose tokens RULER does not count.
        "max_model_len": job["length"] + 512, "gpu_memory_utilization": 0.2,
        "logits_processors": [processor()],
    }  # fmt: skip
    llm = LLM(model, **ENGINE_ARGS | options | job["h2o_args"] | job["engine_args"])
    stops = stop_token_ids(GenerationConfig.from_pretrained(model))
    cell = Cell(
        ENGINE, "h2o", RETRIEVAL, 0, job["length"], model=model,
        per_depth=job["per_depth"], seed=job["seed"],
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    for task in job["tasks"]:
        asked = questions_of(cell, task, llm.get_tokenizer())
        for way in ways(job["budgets"]):
            found = _ask(llm, asked, way, TOKENS.get(task, ANSWER_TOKENS), stops)
            right = sum(sample["right"] for sample in found)
            result = {"task": task, "length": job["length"]} | way
            results.append(result | {"right": right, "samples": found})
            when = "" if way["known"] else ", asked later"
            name = f"{task} {job['length']}, {way['budget']}{when}"
            print(f"{name}: {right:.1f} of {len(found)}", flush=True)
            if way["budget"] == FULL and right < job["least"] * len(found):
                break
    return results


def _ask(
    llm: Any,
    asked: Sequence[Question],
    way: dict[str, Any],
    max_tokens: int,
    stops: set[int],
) -> list[dict[str, Any]]:
    """A sample for each question; one that is not known is forced, as if generated."""
    wishes = {"policy": FULL} if way["budget"] == FULL else {"budget": way["budget"]}
    prompts, params, skipped = [], [], []
    for question in asked:
        first, later = question.context, question.question
        if way["known"]:
            first, later = first + later, []
        prompts.append({"prompt_token_ids": first})
        mine = forced(later, len(later) + max_tokens, h2o=wishes | {"report": True})
        mine.ignore_eos = bool(later)
        params.append(mine)
        skipped.append(len(later))
    samples = []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for question, output, skip in zip(asked, outputs, skipped, strict=True):
        ids = until_stop(list(output.outputs[0].token_ids)[skip:], stops)
        text = llm.get_tokenizer().decode(ids, skip_special_tokens=True)
        samples.append(
            {
                "right": question.share_answered_by(text),
                "text": text,
                "tokens": len(question.context) + len(question.question),
                **output.kv_transfer_params["h2o"],
            }
        )
    return samples


if __name__ == "__main__":
    main()
