"""Calls of agents under eviction, each judged by itself.

    python -m benchmarks.calls --model FOLDER --tasks 16 --output FILE

The tasks are those of `benchmarks.agents`. Before each call stand the leaderboard's own
calls and what tools answered to them, and the call is begun: so a model too small to
complete tasks still makes calls, and one mistake is counted once. Greedy, by one
engine, in several ways: `full`, all tokens kept; `again`, each call reads all that came
before and compresses it; `continue`, each goes on from what the call before it has
held.

Counted: calls that are the solution's, in function and arguments; those whose function
is; and those that are the full cache's.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agents import Leaderboard, calls_of
from benchmarks.answers import MIN_BUDGET
from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.recall import AGAIN, CONTINUE, FULL
from benchmarks.report import write_json

_BEGUN, _END = "```json\n", "```"
"""Of a call, as Qwen2.5-Coder writes it whatever its chat template asks for."""


class Step(NamedTuple):
    """A call that is asked for.

    Attributes:
        task: Its id.
        number: Of the call in its task, from 0.
        turn: Index of the user's turn.
        prompt: Token ids; each of a task begins with the one before it.
        name: Of the function.
        arguments: By name.
    """

    task: str
    number: int
    turn: int
    prompt: list[int]
    name: str
    arguments: dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Let a model make calls, print a line for each way, write JSON."""
    args = parse_args(argv)
    env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    job = vars(args) | {"output": None}
    results = run_in_process("benchmarks.calls:measure", job, env)
    write_json(args, ways=results)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder; it calls tools")
    parser.add_argument("--tasks", type=int, default=16, help="evenly spread")
    parser.add_argument("--budgets", nargs="+", default=["20%", "10%"], help="shares")
    parser.add_argument("--max-model-len", type=int, default=12288)
    parser.add_argument("--max-tokens", type=int, default=128, help="of a call")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--output", type=Path, default=Path("build/calls.json"))
    return parser.parse_args(argv)


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Inside the process: a result for each way."""
    from vllm import LLM

    richest = max(job["budgets"], key=lambda share: float(share.rstrip("%")))
    options = ENGINE_ARGS | {"enable_prefix_caching": True} | job["engine_args"]
    llm = LLM(
        job["model"],
        kv_policy="h2o",
        h2o_budget=richest,
        h2o_min_budget=MIN_BUDGET,
        h2o_keep="prompt",
        max_model_len=job["max_model_len"],
        **options,
    )
    with Leaderboard.fetched() as leaderboard:
        tasks = [
            [
                step
                for step in steps(leaderboard, task, llm.get_tokenizer())
                if len(step.prompt) + job["max_tokens"] <= job["max_model_len"]
            ]
            for task in leaderboard.tasks(job["tasks"])
        ]
    results = []
    for way, wishes in ways(job["budgets"]):
        calls = _make_calls(llm, tasks, way, wishes, job)
        results.append(way | {"calls": calls})
        print(line(way, calls, results[0]["calls"]), flush=True)
    llm.llm_engine.engine_core.shutdown()
    return results


def ways(budgets: list[str]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Ways, and what their requests ask of H2O."""
    yield {"way": FULL, "budget": FULL}, {"policy": "full"}
    for budget in budgets:
        yield {"way": AGAIN, "budget": budget}, {"budget": budget, "keep": "none"}
        wishes = {"budget": budget, "continue": True}
        yield {"way": CONTINUE, "budget": budget}, wishes


def steps(
    leaderboard: Leaderboard, task: dict[str, Any], tokenizer: Any
) -> Iterator[Step]:
    """The calls of a task's solution, each behind those before it."""
    tools, messages, number = leaderboard.tools(task), [], 0
    names = {
        tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
        for tool in tools
    }
    for turn, said in enumerate(task["question"]):
        messages += said
        for solution in task["ground_truth"][turn]:
            name, arguments = call_of(solution, names)
            text = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
            prompt = tokenizer(text + _BEGUN, add_special_tokens=False)["input_ids"]
            yield Step(task["id"], number, turn, prompt, name, arguments)
            number += 1
            (answer,) = leaderboard.run(task, [solution], "solution")
            call = json.dumps({"name": name, "arguments": arguments}, indent=2)
            messages += [
                {"role": "assistant", "content": f"{_BEGUN}{call}\n{_END}"},
                {"role": "tool", "content": answer},
            ]
        messages.append({"role": "assistant", "content": "Done."})


def call_of(solution: str, names: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """Function and arguments of a call in Python, which may leave out their names.

    Args:
        solution: Of the leaderboard.
        names: Of the parameters of each function, in order.
    """
    call = ast.parse(solution, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    given = [ast.literal_eval(value) for value in call.args]
    arguments = dict(zip(names[call.func.id], given, strict=False))
    for keyword in call.keywords:
        assert keyword.arg is not None
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return call.func.id, json.loads(json.dumps(arguments))  # lists, no tuples


def _make_calls(
    llm: Any,
    tasks: list[list[Step]],
    way: dict[str, str],
    wishes: dict[str, Any],
    job: dict[str, Any],
) -> list[dict[str, Any]]:
    """All calls, those of a task in turn."""
    from vllm import SamplingParams

    engine, calls = llm.llm_engine, []
    # No string: the front end would end the request, which then has no report.
    (end,) = llm.get_tokenizer()(_END, add_special_tokens=False)["input_ids"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=[end],
        extra_args={"h2o": wishes | {"report": True}},
    )
    # Who reads again has the pages of all tokens from the first way, if they are there.
    salt = f"continue {way['budget']}" if way["way"] == CONTINUE else "read"
    ahead = {task[0].task: task for task in tasks if task}

    def ask(step: Step) -> None:
        prompt = {"prompt_token_ids": step.prompt, "cache_salt": salt}
        engine.add_request(f"{step.task} {step.number} {salt}", prompt, sampling)

    for task in ahead.values():
        ask(task[0])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                name, number = output.request_id.split()[:2]
                task, i = ahead[name], int(number)
                calls.append(_judged(task[i], output))
                if i + 1 < len(task):
                    ask(task[i + 1])
    return sorted(calls, key=lambda call: (call["task"], call["number"]))


def _judged(step: Step, output: Any) -> dict[str, Any]:
    answer, report = output.outputs[0], output.kv_transfer_params["h2o"]
    text = _BEGUN + answer.text.removesuffix(_END) + _END
    name, arguments = (calls_of(text) or [("", {})])[0]
    function_right = name == step.name
    return {
        "task": step.task,
        "number": step.number,
        "turn": step.turn,
        "tokens": len(step.prompt),
        "tokens_continued": report.get("tokens_continued", 0),
        "function_right": function_right,
        "right": function_right and arguments == step.arguments,
        "name": name,
        "arguments": arguments,
    }


def line(
    way: dict[str, str], calls: list[dict[str, Any]], full: list[dict[str, Any]]
) -> str:
    """What a way has done, and how much of it the full cache has done too."""
    alike = sum(
        all(mine[part] == theirs[part] for part in ("name", "arguments"))
        for mine, theirs in zip(calls, full, strict=True)
    )
    later = [call for call in calls if call["number"]]
    continued = sum(call["tokens_continued"] for call in later)
    continued /= max(sum(call["tokens"] for call in later), 1)
    return (
        f"{way['way']} {way['budget']}: "
        f"{sum(call['right'] for call in calls)} of {len(calls)} calls right, "
        f"{sum(call['function_right'] for call in calls)} functions, "
        f"{alike} the full cache's, "
        f"{continued:.0%} of later prompts gone on from"
    )


if __name__ == "__main__":
    main()
