"""What an early turn said, asked turns later: read again, or gone on from.

    python -m benchmarks.recall --model FOLDER --facts 20 --output FILE

Every conversation is about an essay; its first turn also says a number of a city. At
turns 2, 5 and 9 the user asks for it. Beside `full`, vLLM with all tokens kept, two
ways of H2O: `again` reads the conversation with the question, so that the question is
known when it is compressed; `continue` goes on from what the turn before has held. The
conversation itself goes on without the question.

Counted: numbers that are found, of `--facts`, by turn.
"""

from __future__ import annotations

import argparse
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cells import ENGINE_ARGS
from benchmarks.forcing import forced, processor
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.quality.tasks import CITIES
from benchmarks.quality.texts import KINDS
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model

FULL, AGAIN, CONTINUE = "full", "again", "continue"
WAYS: dict[str, dict[str, Any]] = {
    FULL: {"policy": "full"},
    AGAIN: {"keep": "none"},
    CONTINUE: {"continue": True, "keep": "none"},
}
"""What the questions ask of H2O; who goes on has kept each turn."""
ASKED_AT = 2, 5, 9
"""Turns, of which the first is 1 and has said it."""


class Conversation(NamedTuple):
    """Turns as pairs of what a user says and what the assistant answers.

    Attributes:
        turns: Of the essay; the first says the number.
        asked: The question for it.
        begun: How the answer begins.
        number: What it has to contain.
    """

    turns: list[tuple[str, str]]
    asked: str
    begun: str
    number: str


def main(argv: list[str] | None = None) -> None:
    """Ask, print a line for each way and turn, write JSON."""
    args = parse_args(argv)
    job = vars(args) | {"output": None}
    env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    samples = run_in_process("benchmarks.recall:measure", job, env)
    found = counted(samples)
    for way, by_turn in found.items():
        print(f"{way}: {by_turn} of {args.facts}, by turn", flush=True)
    write_json(args, found=found, samples=samples)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Lengths in words."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="a folder; SmolLM2-135M")
    parser.add_argument("--facts", type=int, default=20, help="conversations")
    parser.add_argument("--user", type=int, default=100, help="words of a turn")
    parser.add_argument("--answer", type=int, default=30, help="words of an answer")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/recall.json"))
    return parser.parse_args(argv)


def counted(samples: list[dict[str, Any]]) -> dict[str, dict[int, int]]:
    """How many numbers are found, by way and turn."""
    return {
        way: {
            turn: sum(
                x["found"] for x in samples if (x["way"], x["turn"]) == (way, turn)
            )
            for turn in ASKED_AT
        }
        for way in WAYS
    }


def conversation(seed: str, user: int, answer: int) -> Conversation:
    """One of nine turns, made from a seed.

    Args:
        seed: Of what is drawn.
        user: Words of a turn's user.
        answer: Words of its answer.
    """
    draw = random.Random(seed)
    needed = max(ASKED_AT) * (user + answer)
    words = draw.choice(
        [x for x in KINDS["essay"]() if len(x.split()) > needed]
    ).split()
    turns = []
    for number in range(max(ASKED_AT)):
        mine = words[number * (user + answer) :][: user + answer]
        turns.append((" ".join(mine[:user]), " ".join(mine[user:])))
    city, code = draw.choice(CITIES), str(draw.randrange(10_000, 100_000))
    said = turns[0][0].split()
    said.insert(
        draw.randrange(len(said)), f"The special magic number for {city} is {code}."
    )
    turns[0] = " ".join(said), turns[0][1]
    return Conversation(
        turns,
        f"What is the special magic number for {city}?",
        f"The special magic number for {city} is",
        code,
    )


def tokens_of(tokenizer: Any, told: Conversation) -> list[list[int]]:
    """Token ids of what comes behind one another: a prompt, its answer, and so on."""

    def text(messages: list[dict[str, str]], begins: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=begins
        )

    messages: list[dict[str, str]] = []
    marks = [""]
    for user, answer in told.turns:
        messages.append({"role": "user", "content": user})
        marks.append(text(messages, True))
        messages.append({"role": "assistant", "content": answer})
        whole = text(messages, False)
        end = whole.rindex(answer) + len(answer)
        marks.append(whole[:end])
    return [_ids(tokenizer, b.removeprefix(a)) for a, b in pairwise(marks)]


def question_of(tokenizer: Any, told: Conversation, turn: int) -> list[int]:
    """Token ids of the question and its begun answer, behind a turn's answer."""
    user, answer = told.turns[turn - 2]
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": told.asked},
    ]
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    behind = whole[whole.index(answer) + len(answer) :]
    return _ids(tokenizer, behind + told.begun)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Inside the process: a sample for each conversation, way and turn."""
    from vllm import LLM

    model = job["model"] or str(ensure_model())
    llm = LLM(
        model,
        kv_policy="h2o",
        h2o_budget=job["budget"],
        h2o_keep="end",
        max_model_len=max(ASKED_AT) * (job["user"] + job["answer"]) * 2 + 256,
        enable_prefix_caching=True,
        logits_processors=[processor()],
        gpu_memory_utilization=0.5,
        **ENGINE_ARGS,
    )
    tokenizer, samples = llm.get_tokenizer(), []
    for number in range(job["facts"]):
        told = conversation(f"{job['seed']} {number}", job["user"], job["answer"])
        parts = tokens_of(tokenizer, told)
        prompt: list[int] = []
        for turn in range(1, max(ASKED_AT) + 1):
            if turn in ASKED_AT:
                asked = prompt + question_of(tokenizer, told, turn)
                for way in WAYS:
                    samples.append(
                        {"conversation": number, "turn": turn, "way": way}
                        | _ask(llm, way, f"{number}", asked, told.number)
                    )
                # Turns within the smallest budget evict nothing, and are prefix hits.
                goes_on = samples[-1]["tokens_continued"] > 0
                assert goes_on or turn < max(ASKED_AT), "nothing is gone on from"
            user, answer = parts[2 * turn - 2 : 2 * turn]
            _tell(llm, f"{number}", prompt + user, answer)
            prompt = prompt + user + answer
    return samples


def _tell(llm: Any, name: str, prompt: list[int], answer: list[int]) -> None:
    """Give a turn its answer, going on; it is kept."""
    sampling = forced(answer)
    sampling.extra_args["h2o"] = {"continue": True}
    given = {"prompt_token_ids": prompt, "cache_salt": f"{CONTINUE} {name}"}
    llm.generate([given], sampling, use_tqdm=False)


def _ask(
    llm: Any, way: str, name: str, prompt: list[int], number: str
) -> dict[str, Any]:
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0.0, max_tokens=8, extra_args={"h2o": WAYS[way] | {"report": True}}
    )
    given = {"prompt_token_ids": prompt, "cache_salt": f"{way} {name}"}
    (output,) = llm.generate([given], asked, use_tqdm=False)
    text = output.outputs[0].text
    report = output.kv_transfer_params["h2o"]
    return {"found": number in text, "text": text, "tokens": len(prompt), **report}


if __name__ == "__main__":
    main()
