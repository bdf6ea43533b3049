"""Agents under eviction: tools that are called over turns, judged by what they left.

    python -m benchmarks.agents --model FOLDER --tasks 20 --output FILE

The tasks are the multi-turn base of the Berkeley Function-Calling Leaderboard
(Apache-2.0, out of its package on PyPI, which is not installed): simulated tools, whose
state its own checker compares after each turn. A task's prompts grow by what the model
has called and what tools answered, token for token. Greedy, in three ways, each by an
engine of its own: `full`, all tokens kept; `again`, each step reads all that came
before and compresses it; `continue`, each goes on from what the step before has held.

Beside tasks that are completed: their leading turns that are right, as most tasks are
beyond a small model, calls that a tool refused, answers that do not end, and tasks that
do not. Other than the leaderboard's: calls may stand in the form that the chat template
asks for or in a block of JSON, and numbers that tools could not bear are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.packages import download
from benchmarks.process import run_in_process
from benchmarks.recall import AGAIN, CONTINUE, FULL
from benchmarks.report import write_json

WAYS: dict[str, dict[str, Any]] = {
    FULL: {"policy": "full"},
    AGAIN: {"keep": "none"},
    CONTINUE: {"continue": True},
}
"""What requests ask of H2O, by way."""
_PACKAGE, _CATEGORY = "bfcl-eval==2026.3.23", "multi_turn_base"
_EVALUATION = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|```json(.*?)```", re.DOTALL)
"""As the chat template asks for it, and as Qwen2.5-Coder writes it all the same."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class Leaderboard:
    """Tasks, tools and the checker of an unpacked package."""

    @classmethod
    @contextlib.contextmanager
    def fetched(cls) -> Iterator[Leaderboard]:
        """The leaderboard out of its package, which goes with the context."""
        with tempfile.TemporaryDirectory() as folder:
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(download(_PACKAGE, Path(folder))) as archive:
                archive.extractall(unpacked)
            yield cls(unpacked)

    def __init__(self, folder: Path) -> None:
        """Import its tools and checker, which need nothing that is not here.

        Args:
            folder: Where the package is unpacked, with nothing else.
        """
        sys.path.insert(0, str(folder))
        self._data = folder / "bfcl_eval" / "data"
        self._utils = importlib.import_module(_EVALUATION + "utils")
        self._check = importlib.import_module(_EVALUATION + "checker")
        backend = importlib.import_module(
            "bfcl_eval.constants.executable_backend_config"
        )
        self._documents: dict[str, str] = backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING

    def tasks(self, count: int) -> list[dict[str, Any]]:
        """So many of the tasks, evenly spread, with `ground_truth`."""
        name = f"BFCL_v4_{_CATEGORY}.json"
        rows = _lines(self._data / name)
        truths = _lines(self._data / "possible_answer" / name)
        whole = [
            row | {"ground_truth": truth["ground_truth"]}
            for row, truth in zip(rows, truths, strict=True)
        ]
        count = min(count, len(whole))
        return [whole[i * len(whole) // count] for i in range(count)]

    def tools(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """Functions of a task, as a chat template takes them."""
        return [
            {"type": "function", "function": _function(document)}
            for name in task["involved_classes"]
            for document in _lines(
                self._data / "multi_turn_func_doc" / self._documents[name]
            )
        ]

    def run(self, task: dict[str, Any], calls: list[str], owner: str) -> list[str]:
        """What a task's tools answer to calls; `owner` names their instances."""
        answers, _ = self._utils.execute_multi_turn_func_call(
            calls, task["initial_config"], task["involved_classes"], owner, task["id"]
        )
        return answers

    def turns_right(
        self, task: dict[str, Any], calls: list[list[list[str]]], owner: str
    ) -> int:
        """How many of a task's first turns left the tools as they should be.

        Args:
            task: Of `tasks`.
            calls: By turn and step.
            owner: Names the tools' instances.
        """
        right = 0
        for turns in range(1, len(task["ground_truth"]) + 1):
            verdict = len(calls) >= turns and self._check.multi_turn_checker(
                calls[:turns], task["ground_truth"][:turns], task, _CATEGORY,
                f"{owner}_{turns}",
            )["valid"]  # fmt: skip
            if not verdict:
                break
            right = turns
        return right


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _function(document: dict[str, Any]) -> dict[str, Any]:
    """A tool as JSON schema: the leaderboard names types as Python does."""

    def schema(of: Any) -> Any:
        if isinstance(of, list):
            return [schema(x) for x in of]
        if not isinstance(of, dict):
            return of
        return {
            key: _TYPES.get(x, x) if key == "type" and isinstance(x, str) else schema(x)
            for key, x in of.items()
        }

    names = "name", "description", "parameters"
    return {name: schema(document[name]) for name in names}


def calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in an answer; what is no call is left out."""
    found = []
    for parts in _CALL.findall(text):
        try:
            call = json.loads("".join(parts))
            arguments = call.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if isinstance(arguments, dict):
                found.append((str(call["name"]), arguments))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def as_python(name: str, arguments: dict[str, Any]) -> str:
    """A call as the tools' package takes it; arguments are JSON's values, no code."""
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({given})"


@dataclass
class Agent:
    """A task that a model works on.

    Attributes:
        task: Of `Leaderboard.tasks`.
        way: Of `WAYS`.
        names: Of the functions that there are.
        prompt: Token ids of all that was said.
        calls: By turn and step.
        called: Calls, and of functions that are not there.
        refused: Of them those to which a tool answered with an error.
        read: Tokens of prompts, but for the first.
        continued: Of them those that were gone on from.
        unending: Answers that were cut.
        answers: What the model said, step by step.
        ended: Why it works no longer: `"turns"` if there is none left.
    """

    task: dict[str, Any]
    way: str
    names: set[str]
    prompt: list[int]
    calls: list[list[list[str]]] = field(default_factory=lambda: [[]])
    called: int = 0
    refused: int = 0
    read: int = 0
    continued: int = 0
    unending: int = 0
    answers: list[str] = field(default_factory=list)
    ended: str = ""

    @property
    def owner(self) -> str:
        """Name of its instances of the tools."""
        return f"agent_{self.way}"

    def ask(self, engine: Any, sampling: Any) -> None:
        """Give the engine what has been said, for the next answer."""
        prompt = {
            "prompt_token_ids": list(self.prompt),
            "cache_salt": f"{self.way} {self.task['id']}",
        }
        number = len(self.answers)
        engine.add_request(f"{self.task['id']} {self.way} {number}", prompt, sampling)

    def hear(
        self, output: Any, tokenizer: Any, leaderboard: Leaderboard, job: dict[str, Any]
    ) -> None:
        """Do what an answer says, and go on with what comes of it.

        Args:
            output: vLLM's `RequestOutput` of the last prompt.
            tokenizer: Of the model.
            leaderboard: Has the tools.
            job: The options.
        """
        answer = output.outputs[0]
        report = output.kv_transfer_params["h2o"]
        if self.answers:
            self.read += len(self.prompt)
            self.continued += report.get("tokens_continued", 0)
        self.answers.append(answer.text)
        self.unending += answer.finish_reason != "stop"
        said: list[dict[str, str]]
        if calls := calls_of(answer.text):
            self.calls[-1].append([])
            said = [
                {"role": "tool", "content": self._call(leaderboard, *call)}
                for call in calls
            ]
            if len(self.calls[-1]) > job["steps"]:
                self.ended = "a turn without end"
                return
        else:
            turns = self.task["question"]
            if len(self.calls) == len(turns):
                self.ended = "turns"
                return
            said = turns[len(self.calls)]
            self.calls.append([])
        self.prompt += _behind(tokenizer, list(answer.token_ids), said)
        if len(self.prompt) + job["max_tokens"] > job["max_model_len"]:
            self.ended = "a prompt without end"

    def _call(
        self, leaderboard: Leaderboard, name: str, arguments: dict[str, Any]
    ) -> str:
        """What a tool answers; a function that is not there never runs."""
        text = f"Error during execution: name '{name}' is not defined"
        self.called += 1
        if not _bearable(arguments):
            text = "Error during execution: the number is too large"
        elif name in self.names and all(key.isidentifier() for key in arguments):
            call = as_python(name, arguments)
            self.calls[-1][-1].append(call)
            (text,) = leaderboard.run(self.task, [call], self.owner)
        self.refused += "error" in text[:10].lower()
        return text


def _bearable(arguments: dict[str, Any]) -> bool:
    """Whether no power and no number of digits is asked for that takes for ever."""
    given = (arguments.get(name, 0) for name in ("exponent", "precision"))
    return all(isinstance(x, (int, float)) and abs(x) <= 1000 for x in given)


def _behind(tokenizer: Any, answer: list[int], said: list[dict[str, str]]) -> list[int]:
    """Token ids of an answer, its end if it has none, and what comes before the next.

    Args:
        tokenizer: Of the model.
        answer: Token ids, as they were generated.
        said: Messages behind it.
    """
    messages = [{"role": "user", "content": "-"}]
    messages += [{"role": "assistant", "content": "@@@"}, *said]
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    text = whole[whole.index("@@@") + len("@@@") :]
    if answer[-1] == tokenizer.eos_token_id:
        text = text.removeprefix(tokenizer.eos_token)
    return answer + tokenizer(text, add_special_tokens=False)["input_ids"]


def main(argv: list[str] | None = None) -> None:
    """Let agents work, print a line for each way, write JSON."""
    args = parse_args(argv)
    env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    results = []
    for way in args.ways:
        job = vars(args) | {"output": None, "way": way}
        found = run_in_process("benchmarks.agents:work", job, env)
        print(line(way, found), flush=True)
        results += found
        write_json(args, agents=results)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder; it calls tools")
    parser.add_argument("--tasks", type=int, default=20, help="evenly spread")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--steps", type=int, default=20, help="of a turn, at most")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--output", type=Path, default=Path("build/agents.json"))
    return parser.parse_args(argv)


def work(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Inside the process: an engine of its own, a result for each task."""
    from vllm import LLM, SamplingParams

    options = ENGINE_ARGS | {"enable_prefix_caching": True} | job["engine_args"]
    llm = LLM(
        job["model"],
        kv_policy="h2o",
        h2o_budget=job["budget"],
        h2o_keep="end",
        max_model_len=job["max_model_len"],
        **options,
    )
    engine, tokenizer, way = llm.llm_engine, llm.get_tokenizer(), job["way"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        extra_args={"h2o": WAYS[way] | {"report": True}},
    )
    with Leaderboard.fetched() as leaderboard:
        agents = {
            task["id"]: _agent(leaderboard, task, way, tokenizer)
            for task in leaderboard.tasks(job["tasks"])
        }
        for agent in agents.values():
            agent.ask(engine, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    agent = agents[output.request_id.split()[0]]
                    agent.hear(output, tokenizer, leaderboard, job)
                    if not agent.ended:
                        agent.ask(engine, sampling)
        results = [_result(leaderboard, agent) for agent in agents.values()]
    engine.engine_core.shutdown()
    goes_on = any(result["tokens_continued"] for result in results)
    assert goes_on or way != CONTINUE, "nothing is gone on from"
    return results


def _agent(
    leaderboard: Leaderboard, task: dict[str, Any], way: str, tokenizer: Any
) -> Agent:
    tools = leaderboard.tools(task)
    text = tokenizer.apply_chat_template(
        task["question"][0], tools=tools, tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Agent(task, way, {tool["function"]["name"] for tool in tools}, prompt)


def _result(leaderboard: Leaderboard, agent: Agent) -> dict[str, Any]:
    turns = len(agent.task["question"])
    all_ended = agent.ended == "turns"
    ended = agent.calls if all_ended else agent.calls[:-1]
    right = leaderboard.turns_right(agent.task, ended, agent.owner)
    return {
        "way": agent.way,
        "task": agent.task["id"],
        "turns": turns,
        "turns_right": right,
        "completed": right == turns and all_ended,
        "ended": agent.ended,
        "steps": sum(len(steps) for steps in agent.calls),
        "called": agent.called,
        "refused": agent.refused,
        "unending": agent.unending,
        "tokens": len(agent.prompt),
        "tokens_read": agent.read,
        "tokens_continued": agent.continued,
        "calls": agent.calls,
        "answers": agent.answers,
    }


def line(way: str, results: list[dict[str, Any]]) -> str:
    """What a way has done."""

    def total(name: str) -> int:
        return sum(x[name] for x in results)

    continued = total("tokens_continued") / max(total("tokens_read"), 1)
    return (
        f"{way}: {total('completed')} of {len(results)} tasks completed, "
        f"{total('turns_right')} of {total('turns')} turns right, "
        f"{total('refused')} of {total('called')} calls refused, "
        f"{total('unending')} answers and "
        f"{sum(x['ended'] != 'turns' for x in results)} tasks do not end, "
        f"{continued:.0%} of later prompts gone on from"
    )


if __name__ == "__main__":
    main()
