"""Agents' sessions over time: who finds its session again after a pause.

    python -m benchmarks.sessions --sessions 12 --requests 12 --output FILE

Shapes of real sessions of a coding agent (`agent_sessions.json`: public traces of
callanjfox/kv-cache-tester, Apache-2.0): when each request came, how many tokens it had,
how many of them the one before had too, how many were answered. Lengths and pauses are
divided by `--scale` and `--pace`; tokens are prose. A session sends its next request a
pause after its last answer, which is a part of it. All systems have a pool of as many
bytes, one after the other:

    stock        vLLM with its prefix cache
    h2o again    compressed; each request is read again, but for prefix hits
    h2o          compressed; each goes on by its session's name
    h2o files    the same, with a folder in host memory

Measured: how many returns find all of what they have in common with their session but
a block (`found`), tokens read, first token, tokens/s.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cells import ENGINE_ARGS
from benchmarks.machine import engine_env
from benchmarks.process import run_in_process
from benchmarks.report import write_json
from benchmarks.smollm2 import ensure_model
from benchmarks.workloads import SOTU, prompt_source

DATA = Path(__file__).with_name("agent_sessions.json")
STOCK, AGAIN, GOES_ON, FILES = "stock", "h2o again", "h2o", "h2o files"
SYSTEMS = (STOCK, AGAIN, GOES_ON, FILES)
_LEAST_REQUESTS, _MOST_SESSIONS = 20, 40


class Shape(NamedTuple):
    """A request of a session.

    Attributes:
        pause: Seconds since the answer before it.
        tokens: Of its prompt.
        shared: Tokens with which the prompt before it began as well.
        answer: Tokens of its answer.
    """

    pause: float
    tokens: int
    shared: int
    answer: int


def main(argv: list[str] | None = None) -> None:
    """Let each system serve all sessions, print a line for each, write JSON."""
    args = parse_args(argv)
    if args.traces:
        DATA.write_text(json.dumps(cut(args.traces), separators=(",", ":")) + "\n")
        return
    results = {}
    for system in args.systems:
        job = vars(args) | {"system": system, "output": None, "traces": None}
        env = engine_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        results[system] = run_in_process("benchmarks.sessions:serve", job, env)
        print(line(system, results[system]), flush=True)
        write_json(args, systems=results)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="a folder; SmolLM2-135M")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--sessions", type=int, default=_MOST_SESSIONS)
    parser.add_argument("--requests", type=int, default=1000, help="of each, at most")
    parser.add_argument("--scale", type=float, default=16, help="of lengths")
    parser.add_argument("--pace", type=float, default=16, help="of pauses")
    parser.add_argument("--pool-tokens", type=int, default=64000, help="of stock's")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--traces", type=Path, help="a git folder; makes the data anew")
    parser.add_argument("--output", type=Path, default=Path("build/sessions.json"))
    return parser.parse_args(argv)


def cut(repository: Path) -> list[list[Shape]]:
    """The shapes of the first sessions that are long enough, of their main agent.

    Args:
        repository: A git folder of the traces.
    """

    def git(*command: str) -> str:
        whole = ["git", "-C", str(repository), *command]
        return subprocess.run(whole, capture_output=True, text=True, check=True).stdout

    found: list[list[Shape]] = []
    for name in sorted(git("ls-tree", "-r", "HEAD", "--name-only").split()):
        if not name.startswith("traces/") or len(found) == _MOST_SESSIONS:
            continue
        try:
            trace = json.loads(git("show", f"HEAD:{name}"))
        except subprocess.CalledProcessError:
            continue  # A copy may lack its largest files.
        requests = [x for x in trace["requests"] if "hash_ids" in x]
        if len(requests) < _LEAST_REQUESTS:
            continue
        before: list[int] = []
        shapes = []
        for request in requests:
            blocks = request["hash_ids"]
            same = 0
            for mine, other in zip(blocks, before, strict=False):
                if mine != other:
                    break
                same += 1
            shared = min(same * trace["block_size"], request["in"])
            pause = request.get("think_time") or 0.0
            shapes.append(Shape(pause, request["in"], shared, request["out"]))
            before = blocks
        found.append(shapes)
    return found


def sessions(job: dict[str, Any]) -> list[list[Shape]]:
    """The shapes that a job replays."""
    scale, pace = job["scale"], job["pace"]

    def smaller(tokens: int) -> int:
        return max(round(tokens / scale), 1)

    return [
        [
            Shape(x[0] / pace, smaller(x[1]), round(x[2] / scale), smaller(x[3]))
            for x in shapes[: job["requests"]]
        ]
        for shapes in json.loads(DATA.read_text())[: job["sessions"]]
    ]


class Session:
    """Makes the prompts of a session, one from the other."""

    def __init__(self, name: str, shapes: list[Shape], text: list[int]) -> None:
        """Begin.

        Args:
            name: vLLM's `session_id`.
            shapes: Of its requests.
            text: Token ids that nobody else has.
        """
        self.name, self._shapes, self._text = name, shapes, text
        self._sent, self.number, self.shared = list[int](), 0, 0
        self._told: list[int] = []

    @property
    def next_shape(self) -> Shape | None:
        """Of its next request; None: it has ended."""
        if self.number == len(self._shapes):
            return None
        return self._shapes[self.number]

    def prompt(self) -> list[int]:
        """The next prompt: what it has in common with the last, the answer if that is
        all of it, then text."""
        shape, before = self._shapes[self.number], self._sent
        shared = min(shape.shared, shape.tokens)
        prompt = before[:shared]
        # Blocks of the traces end within a prompt, of which nothing is lost then.
        if before and shared + 64 >= len(before):
            prompt = (before + self._told)[: shape.tokens]
        self.shared = len(prompt)
        fresh = max(shape.tokens - len(prompt), 1)
        prompt = prompt + self._text[:fresh]
        self._text = self._text[fresh:]
        self.number += 1
        return prompt

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        """Note what has been said."""
        self._sent, self._told = prompt, answer


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Inside the process: one engine, all sessions."""
    from vllm import LLM

    from vllm_h2o import stats

    model, shapes = job["model"] or str(ensure_model()), sessions(job)
    longest = max(x.tokens + x.answer for mine in shapes for x in mine)
    options: dict[str, Any] = ENGINE_ARGS | {"enable_prefix_caching": True}
    options |= {"max_model_len": longest + options["block_size"]} | job["engine_args"]
    options["kv_cache_memory_bytes"] = _pool_bytes(model, options, job["pool_tokens"])
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="h2o_sessions_") as folder:
        if job["system"] != STOCK:
            options |= {"kv_policy": "h2o", "h2o_budget": job["budget"]}
            options["h2o_keep"] = "end"
        if job["system"] == FILES:
            options |= {"h2o_keep_folder": folder, "h2o_keep_size": 4.0}
        llm = LLM(model, disable_log_stats=False, **options)
        replay = Replay(llm, shapes, prompt_source(SOTU, model, 0))
        if job["system"] == AGAIN:
            replay.extra_args = {"h2o": {"continue": False}}
        seconds = replay.run()
        counters = {} if job["system"] == STOCK else stats(llm)
        llm.llm_engine.engine_core.shutdown()
    return {"seconds": seconds, "samples": replay.samples, "counters": counters}


class Replay:
    """Sessions that are served by one engine, each by its own clock."""

    def __init__(self, llm: Any, shapes: list[list[Shape]], source: list[int]) -> None:
        """Begin one session a second.

        Args:
            llm: The engine.
            shapes: Of each session's requests.
            source: Token ids of prose, of which each session has its own part.
        """
        self._llm, self.samples = llm, list[dict[str, float]]()
        self.extra_args: dict[str, Any] | None = None
        self._due: list[tuple[float, int]] = []
        self._sessions: list[Session] = []
        self._running: dict[str, tuple[int, list[int]]] = {}
        first = 0
        for number, mine in enumerate(shapes):
            count = sum(max(x.tokens - x.shared, 1) for x in mine) + len(mine)
            text = [source[(first + i) % len(source)] for i in range(count)]
            first += count
            self._sessions.append(Session(f"s{number}", mine, text))
            heapq.heappush(self._due, (mine[0].pause + number, number))

    def run(self) -> float:
        """Serve all requests; the seconds that it took."""
        begun = time.perf_counter()
        while self._due or self._running:
            now = time.perf_counter() - begun
            while self._due and self._due[0][0] <= now:
                self._send(heapq.heappop(self._due)[1])
            if not self._running:
                time.sleep(self._due[0][0] - now)
                continue
            for output in self._llm.llm_engine.step():
                if output.finished:
                    self._end(output, time.perf_counter() - begun)
        return time.perf_counter() - begun

    def _send(self, number: int) -> None:
        from vllm import SamplingParams

        session = self._sessions[number]
        shape = session.next_shape
        assert shape is not None
        prompt = session.prompt()
        asked = SamplingParams(
            temperature=0.0, max_tokens=shape.answer, ignore_eos=True,
            detokenize=False, extra_args=self.extra_args,
        )  # fmt: skip
        name = f"{session.name}.{session.number}."
        self._llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, asked, session_id=session.name
        )
        self._running[name] = number, prompt

    def _end(self, output: Any, now: float) -> None:
        # vLLM adds to the ids that it is given.
        name = next(x for x in self._running if output.request_id.startswith(x))
        number, prompt = self._running.pop(name)
        session, answer = self._sessions[number], list(output.outputs[0].token_ids)
        self.samples.append(
            {
                "session": number,
                "number": session.number,
                "tokens": len(prompt),
                "shared": session.shared,
                "read": len(prompt) - (output.num_cached_tokens or 0),
                "answer": len(answer),
                "first_token_s": output.metrics.first_token_latency,
            }
        )
        session.answered(prompt, answer)
        if (shape := session.next_shape) is not None:
            heapq.heappush(self._due, (now + shape.pause, number))


def _pool_bytes(model: str, options: dict[str, Any], tokens: int) -> int:
    """Of stock's cache for so many tokens."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head = getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    item = 4 if options["dtype"] == "float32" else 2
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * item
    return tokens * of_token


def line(system: str, result: dict[str, Any]) -> str:
    """What a system did."""
    samples = result["samples"]
    returns = [x for x in samples if x["number"] > 1]
    found = [x for x in returns if x["tokens"] - x["read"] >= x["shared"] - 33]
    first = sorted(x["first_token_s"] for x in returns)
    at = [first[min(int(len(first) * q), len(first) - 1)] for q in (0.5, 0.99)]
    return (
        f"{system}: {len(found)} of {len(returns)} returns found their session, "
        f"{sum(x['read'] for x in samples)} of {sum(x['tokens'] for x in samples)} "
        f"tokens read, first token p50 {at[0]:.2f} s, p99 {at[1]:.2f} s, "
        f"{sum(x['answer'] for x in samples) / result['seconds']:.1f} tokens/s, "
        f"{result['seconds']:.0f} s, median request "
        f"{statistics.median(x['tokens'] for x in samples):.0f} tokens"
    )


if __name__ == "__main__":
    main()
