"""`vllm serve` as a process of its own, driven by the openai client."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import requests

from benchmarks.dashboard import page
from tests import prometheus
from tests.engine.helpers import prompts_of
from tests.engine.tiny_models import save_heads, save_reading_llama
from tests.test_monitoring import RULES, queries

pytestmark = pytest.mark.engine

BUDGET, EXAMPLES = 128, Path(__file__).parents[2] / "examples"
# Longer than anything takes; shorter than a test may take, so that the log is shown.
READY_SECONDS, SECONDS = 280, 200


class Server:
    """A running server, its clients, and what it printed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # What it answers does not matter here, and it answers at once.
        model = save_reading_llama(folder / "model", num_hidden_layers=4)
        save_heads(model)
        self.model = str(model)
        self.base = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        command = [str(Path(sys.executable).with_name("vllm")), "serve", self.model]
        command += f"--kv-policy h2o --h2o-budget {BUDGET} --h2o-sinks 2".split()
        command += "--block-size 32 --dtype float32 --enforce-eager".split()
        command += f"--max-model-len 2048 --host 127.0.0.1 --port {port}".split()
        command += ["--h2o-resident-dtype", "model", "--h2o-keep", "end"]
        kept = folder / "kept"
        command += ["--h2o-keep-folder", str(kept), "--h2o-keep-size", "0.5"]
        # Without it vLLM kills the engine at once, which then may not log its end.
        command += ["--shutdown-timeout", str(SECONDS)]
        env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.client = openai.OpenAI(base_url=f"{self.base}/v1", api_key="none")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if requests.get(f"{self.base}/health", timeout=SECONDS).ok:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(1)
        raise TimeoutError(self.log.read_text()[-3000:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def complete(self, prompt, tokens, wishes=None, **options):
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": wishes},
            **options,
        )

    def metrics(self, *labels: str) -> dict[str, float]:
        """Values of the metrics by name, of those that have these labels."""
        answer = requests.get(f"{self.base}/metrics", timeout=SECONDS)
        return {
            line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
            for line in answer.text.splitlines()
            if line.startswith(("vllm:", "h2o_"))
            and all(label in line for label in labels)
        }

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            now = self.metrics()
            if not (
                now["vllm:num_requests_running"]
                or now["vllm:num_requests_waiting"]
                or now["vllm:kv_cache_usage_perc"]
            ):
                return
            time.sleep(0.5)
        raise AssertionError(f"still busy: {self.metrics()}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("serve"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def test_completion_beyond_the_budget(server):
    (prompt,) = prompts_of(600)
    done = server.complete(prompt, 64)
    assert done.usage.prompt_tokens == 600
    assert done.usage.completion_tokens == 64
    assert done.choices[0].text.strip()
    assert server.complete(prompt, 64).choices[0].text == done.choices[0].text


def test_chat(server):
    done = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=40,
        temperature=0,
    )
    assert done.choices[0].message.content.strip()


def test_stream(server):
    (prompt,) = prompts_of(300)
    chunks = [
        chunk.choices[0].text for chunk in server.complete(prompt, 32, stream=True)
    ]
    assert len(chunks) > 1
    assert "".join(chunks) == server.complete(prompt, 32).choices[0].text


def test_eight_clients_and_one_that_hangs_up(server):
    prompts = prompts_of(*[400] * 8)

    def client(number):
        if number == 3:
            with server.complete(prompts[number], 1000, stream=True) as stream:
                for count, _ in enumerate(stream):
                    if count == 5:
                        break
            return None
        return server.complete(prompts[number], 40).usage.completion_tokens

    with ThreadPoolExecutor(8) as clients:
        counts = list(clients.map(client, range(8)))
    assert counts == [40, 40, 40, None, 40, 40, 40, 40]
    server.wait_until_idle()
    assert server.metrics()["vllm:generation_tokens_total"] > 7 * 40


WRONG = [
    {"h2o_policy": "half"},
    {"h2o_policy": 3},
    {"h2o_policy": ["full"]},
    {"h2o_budgets": 64},
    {"h2o_budget": BUDGET + 1},
    {"h2o_budget": 0},
    {"h2o_budget": "101%"},
    {"h2o_report": "maybe"},
    {"h2o_": 1},
    {"h2o": "full"},
    {"h2o_observation_window": 0},
    {"h2o_observation_window": 1.5},
    {"h2o_observation_window": "101%"},
    {"h2o_observation_window": 16, "h2o_policy": "full"},
    {"h2o_observation_window": 16},  # without effect: prompts may go by a gate
]
RIGHT: list = [
    None,
    {"h2o_policy": "full"},
    {"h2o_policy": "h2o", "other": 1},
    {"h2o_budget": 64},
    {"h2o_budget": "25%", "h2o_report": True},
]


def test_wrong_wishes_are_refused_and_nobody_else_is(server):
    """A third of 200 requests at once ask for what is not there."""
    prompts = prompts_of(*[40, 90, 150, 200] * 5)

    def client(number):
        wrong, prompt = number % 3 == 1, prompts[number % len(prompts)]
        asked = WRONG if wrong else RIGHT
        try:
            done = server.complete(prompt, 6, asked[number // 3 % len(asked)])
        except openai.BadRequestError as error:
            said = str(error)
            return wrong and "h2o" in said and ("use " in said or "leave " in said)
        return not wrong and done.usage.completion_tokens == 6

    with ThreadPoolExecutor(32) as clients:
        as_they_should = list(clients.map(client, range(200)))
    assert [i for i, well in enumerate(as_they_should) if not well] == []
    server.wait_until_idle()


def test_a_stream_says_what_is_wrong(server):
    with pytest.raises(openai.APIError, match="h2o_policy.*'half'"):
        list(server.complete([1, 2, 3], 6, {"h2o_policy": "half"}, stream=True))


@pytest.mark.parametrize(
    "wishes, policy, budget",
    [
        ({}, "h2o", BUDGET),
        ({"h2o_budget": 64}, "h2o", 64),
        ({"h2o_budget": "25%"}, "h2o", 96),
        ({"h2o_policy": "full"}, "full", None),
    ],
)
def test_a_chat_says_what_it_got(server, wishes, policy, budget):
    done = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Name three colours. " * 60}],
        max_tokens=20,
        temperature=0,
        extra_body={"vllm_xargs": wishes | {"h2o_report": True}, "ignore_eos": True},
    )
    tokens = done.usage.prompt_tokens + 20 - 1
    assert 256 < tokens <= 4 * 96
    held = budget or tokens
    assert done.kv_transfer_params["h2o"] == {
        "policy": policy,
        "budget": budget,
        "tokens_held": held,
        "tokens_evicted": tokens - held,
    }


def test_nothing_is_reported_unasked_and_chats_are_refused_alike(server):
    assert server.complete(prompts_of(300)[0], 4).kv_transfer_params is None
    with pytest.raises(openai.BadRequestError, match="h2o_policy.*'half'"):
        server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Name three colours."}],
            extra_body={"vllm_xargs": {"h2o_policy": "half"}},
        )


@pytest.mark.parametrize(
    "command",
    [[sys.executable, EXAMPLES / "openai_client.py"], ["sh", EXAMPLES / "curl.sh"]],
    ids=["openai client", "curl"],
)
def test_examples(server, command):
    done = subprocess.run(
        [*command, server.base, "64"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    held = re.findall(r"\Wtokens_held\W: ?(\d+)", done.stdout)
    assert held[0] == "64" and len(held) == (2 if "py" in str(command[1]) else 1)


def test_a_prompt_is_read_by_one_server_and_answered_by_another(server):
    """By the same here: it goes on from the pool."""
    command = [sys.executable, EXAMPLES / "prefill_decode.py", server.base, server.base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    known, tokens = map(int, re.match(r"(\d+) of (\d+) not read", done.stdout).groups())
    assert known == tokens - 1 > 400


def test_metrics_say_what_is_evicted(server):
    """Of one that is compressed, one with less than the server's budget, a full one."""
    before = server.metrics('engine="0"')
    (prompt,) = prompts_of(600)
    for wishes in (None, {"h2o_budget": 64}, {"h2o_policy": "full"}):
        server.complete(prompt, 50, wishes)
    server.wait_until_idle()
    now = server.metrics(f'model_name="{server.model}"', 'engine="0"')
    grown = {name: value - before[name] for name, value in now.items()}
    length = 600 + 49  # the last token of an answer is not computed
    evicted = [length - BUDGET, length - 64]
    assert grown["h2o_transitions_total"] == 2
    assert grown["h2o_evicted_tokens_total"] == sum(evicted)
    assert grown["h2o_freed_dense_blocks_total"] == 2 * -(-600 // 32)
    assert grown["h2o_evicted_share_count"] == 3
    assert grown["h2o_transition_seconds_count"] == 2
    assert 0 < grown["h2o_transition_seconds_sum"] < 60
    share = sum(evicted) / length
    assert grown["h2o_evicted_share_sum"] == pytest.approx(share)
    assert now["h2o_budget_tokens"] == BUDGET
    assert now["h2o_dense_blocks"] == now["h2o_resident_blocks"] == 0
    for state in ("resident", "prefilling", "dense"):
        assert server.metrics(f'state="{state}"') == {"h2o_requests": 0}
    asked = server.metrics('policy="h2o"', 'head_budgets="auto"', 'prompt_score="auto"')
    assert asked == {"h2o_policy_info": 1}


@pytest.mark.parametrize("named", ["body", "header"])
def test_a_session_goes_on_by_its_name(server, named):
    """Without an option of H2O's in the client; another session reads all."""
    length = 400 if named == "body" else 380
    (prompt,) = prompts_of(length)

    def turn(tokens, session):
        header = {"X-Session-ID": session} if named == "header" else {}
        body = {"session_id": session} if named == "body" else {}
        before = server.metrics()["h2o_continued_tokens_total"]
        answer = server.client.completions.create(
            model=server.model, prompt=tokens, max_tokens=20, temperature=0,
            extra_headers=header,
            extra_body={"ignore_eos": True, "return_token_ids": True} | body,
        )  # fmt: skip
        server.wait_until_idle()
        gone_on = server.metrics()["h2o_continued_tokens_total"] - before
        return [*tokens, *answer.choices[0].token_ids], gone_on

    told, gone_on = turn(prompt, f"{named} a")
    assert gone_on == 0
    assert turn([*told, 7, 8, 9], f"{named} b")[1] == 0
    assert turn([*told, 7, 8, 9], f"{named} a")[1] == len(told) - 1


@pytest.mark.slow
def test_dashboard_and_rules_on_a_prometheus_that_scrapes_it(server, tmp_path):
    target = server.base.removeprefix("http://")
    with prometheus.scraping(target, tmp_path) as watching:
        with ThreadPoolExecutor(4) as clients:
            list(clients.map(lambda p: server.complete(p, 60), prompts_of(*[500] * 8)))
        watching.wait_for("increase(h2o_evicted_share_count[10m]) > 0")
        for panel, expression in queries().items():
            for variable in ("$model_name", "$engine"):
                expression = expression.replace(variable, ".*")
            values = watching.wait_for(expression.replace("$__rate_interval", "10m"))
            assert all(map(math.isfinite, values)), panel
        drawn = page(watching.base, 600)
        assert drawn.count("<section") == len({name[:-2] for name in queries()})
        assert "no data" not in drawn and "<polyline" in drawn and "<rect" in drawn
        for rule in (rule for group in RULES["groups"] for rule in group["rules"]):
            if "record" in rule:
                watching.wait_for(f"last_over_time({rule['record']}[10m])")
        groups = watching.ask("rules")["groups"]
        states = [rule["health"] for group in groups for rule in group["rules"]]
        assert states == ["ok"] * sum(len(group["rules"]) for group in RULES["groups"])
        alerts = watching.ask("alerts")["alerts"]
        assert [alert for alert in alerts if alert["state"] == "firing"] == []


def test_counters_are_logged_at_shutdown(server):
    server.wait_until_idle()
    server.stop()
    text = server.log.read_text()
    assert "H2O is on: policy h2o, budget 128 tokens (4 blocks of 32)" in text
    (line,) = [line for line in text.splitlines() if "H2O counters:" in line]
    counters = dict(
        part.strip().rsplit(" ", 1)
        for part in line.split("H2O counters:")[1].replace("\x1b[0m", "").split(",")
    )
    assert int(counters["transitions"]) >= 12
    # The front end's last word, which does not need the core to live that long.
    *_, said = re.findall(r"Engine 000: H2O transitions: (\d+), evicted tokens", text)
    assert said == counters["transitions"]
    assert int(counters["tokens_evicted"]) > 1000
    assert int(counters["blocks_in_use"]) == 0
