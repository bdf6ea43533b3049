"""The path of CUDA through the whole engine, on CPU tensors and interpreted.

vLLM's model runners V1 and V2, its Triton attention, our CUDA backend and kernels:
their tokens, log-probabilities and survivors are those of the CPU path, whose kernel
is C.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.known_drafts import speculating
from tests.engine.tiny_models import _COMMON, _save, random_prompts, save_hybrid
from tests.gpu_path.engine import LENGTHS, NUM_TOKENS, result_of
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.profile import HeadProfile, gate_in_json

pytestmark = pytest.mark.engine

POLICY = {
    "policy": "h2o",
    "budget": 96,
    "observation_window": 8,
    "pooling": 3,
    "resident_dtype": "model",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, **(_COMMON | sizes))
    return _save(LlamaForCausalLM, config, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def uneven(model, tmp_path_factory):
    """The same with wide attention in a head of layer 0 and a narrow one in layer 1."""
    folder = tmp_path_factory.mktemp("uneven")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for layer, factor in ((0, 0.1), (1, 6.0)):  # two query heads of 32, a KV head's
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"][:64] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Head 0 of layer 1 and head 1 of layer 0 want more than their share; the gate has
    random weights."""
    poor, rich = [1e-3, 1e-3, 9e-4, 8e-4], [2.0, 1.0, 1e-2, 1e-5]
    file = tmp_path_factory.mktemp("profile") / "heads.json"
    errors = [[poor, rich], [rich, poor]]
    weights = torch.randn(2, 2, 2 * 32 + 4, generator=torch.Generator().manual_seed(0))
    gate = gate_in_json(0.1 * weights, 0.5)
    HeadProfile([32, 64, 128, 192], errors, gate=gate).save(file)
    return file


@pytest.fixture
def run(model, monkeypatch):
    """Result of a path; of those of CUDA as `tests.gpu_path.engine` prints it."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")

    def run(
        path, policy, lengths=LENGTHS, num_tokens=NUM_TOKENS, of=model, asked=(),
        **options,
    ):  # fmt: skip
        request = {"path": path, "model": str(of), "lengths": lengths}
        request |= {"num_tokens": num_tokens, "asked": asked}
        request |= {"policy": policy, "options": options}
        if path == "cpu":
            return json.loads(json.dumps(result_of(**request)))
        command = [sys.executable, "-m", "tests.gpu_path.engine", json.dumps(request)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


# The second: prompts in chunks and observation windows that span them.
CHUNKS = ({}, {"max_num_batched_tokens": 160, "long_prefill_token_threshold": 32})


CASES = [
    pytest.param("v1", 1, True, "attention", marks=pytest.mark.slow),
    ("v2", 1, True, "gate beside what is held"),
    pytest.param("v2 graphs", 1, False, "attention", marks=pytest.mark.slow),
    pytest.param("v2", 0, True, "attention", marks=pytest.mark.slow),
    pytest.param("v2", 1, False, "attention", marks=pytest.mark.slow),
    pytest.param("v2 graphs", 1, True, "attention", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("path", "chunks", "by_head", "prompt_score"), CASES)
@pytest.mark.rule("R7")
def test_equals_the_cpu_path(run, profile, path, chunks, by_head, prompt_score):
    policy = POLICY | {"head_budgets": str(profile) if by_head else "uniform"}
    options = CHUNKS[chunks]
    scoring, compressed, transitions = "observe", 2, 2  # the other two stay dense
    if prompt_score != "attention":
        policy = {"prompt_score": "gate", "prefill_chunk": 64, "keep": "end"} | policy
        policy |= {"budget": 32, "positions": "cache"}
        del policy["observation_window"], policy["pooling"]
        scoring, compressed, transitions = "score_by_gate", 3, 2 + 3 + 1
        # Keys move before the tokens 96, 120, 144 and 168, by 24.
        trained = {"hf_overrides": {"max_position_embeddings": 160}}
        options = options | {"enable_prefix_caching": True} | trained
    expected = run("cpu", policy, **options)
    actual = run(path, policy, **options)
    if "keep" in policy:
        assert actual["next"] == expected["next"]
        assert actual["next"]["continued"] == 90 + 9 - 1
        transitions += 2
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    assert len(actual["survivors"]) == compressed and len(actual["survivors"][0]) == 2
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    # Forced tokens, and what the model thought of them, on either runner.
    assert actual["given"] == [[7] * 3, [*range(9)]]
    assert actual["forced"] == pytest.approx(expected["forced"], abs=1e-4)
    assert actual["stats"] == expected["stats"]
    assert actual["stats"]["transitions"] == transitions
    assert actual["stats"]["tokens_evicted"] > 0
    # Compiled by now, on a GPU.
    used = ["decode_resident", scoring, "transition"]
    if "keep" in policy:
        used += ["compress_chunk", "move_keys", "read_on"]
    assert actual["warmed_up"] == sorted(used)
    check_runner(actual, path)
    if path == "v1" and chunks:
        # A prompt's last token beside decodes is no decode.
        assert [False, False] in actual["one_token_steps"]
        assert [True, True] in actual["one_token_steps"]
        assert [False, True] not in actual["one_token_steps"]


def check_runner(actual, path):
    v2 = "vllm.v1.worker.cpu.model_runner"
    assert (actual["runner"] == v2) == path.startswith("v2")
    if "graphs" in path:
        replays, padded, _ = actual["graphs"]
        assert replays >= 4 and padded >= 1


@pytest.mark.parametrize(
    ("path", "by_head"),
    [("v2 graphs", True), ("v1", False)],
)
@pytest.mark.slow
def test_int8_is_near_the_cpu_path(run, profile, path, by_head):
    """Rounding makes steps of the last digits of keys and values, which differ."""
    policy = POLICY | {"resident_dtype": "int8"}
    policy |= {"head_budgets": str(profile) if by_head else "uniform"}
    expected, actual = run("cpu", policy), run(path, policy)
    assert actual["tokens"] == expected["tokens"]
    kept = zip(_heads(actual), _heads(expected), strict=True)
    common = [len({*ours} & {*theirs}) / len(theirs) for ours, theirs in kept]
    assert sum(common) >= 0.98 * len(common)
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)
    assert actual["stats"] == expected["stats"]
    assert actual["stats"]["transitions"] == 2, "the other two stay dense"
    check_runner(actual, path)
    if "graphs" in path:
        assert actual["graphs"][2] >= 3, "steps with rows that stay dense"


def _heads(result):
    return [
        head for request in result["survivors"] for layer in request for head in layer
    ]


# Of what requests have, from 64 slots on: budgets of 64, 96, 128 and 160 for up to 96,
# 160, 192 and 256 tokens. The first two prompts outgrow theirs in a step in which the
# third decodes by another.
SHARE = {
    "policy": "h2o",
    "budget": "60%",
    "min_budget": 64,
    "resident_dtype": "model",
}


@pytest.mark.parametrize(
    ("path", "by_head"),
    [
        pytest.param("v2 graphs", True, marks=pytest.mark.slow),
        pytest.param("v1", False, marks=pytest.mark.slow),
        pytest.param("v2", False, marks=pytest.mark.slow),
    ],
)
def test_budgets_follow_requests(run, profile, path, by_head):
    policy = SHARE | {"head_budgets": str(profile), "prompt_score": "gate"}
    if not by_head:
        policy |= {"head_budgets": "uniform", "prompt_score": "attention"}
    case = policy, (76, 77, 120), 28
    expected = run("cpu", *case, **CHUNKS[1])
    actual = run(path, *case, **CHUNKS[1])
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    held = [[len(kept) for kept in actual["survivors"][i][0]] for i in range(3)]
    # All alike, the first two go on to fill what has grown from 64 to 96 slots.
    alike = [[71, 71], [72, 72], [96, 96]]
    assert held == ([[32, 103], [32, 104], [32, 147]] if by_head else alike)
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert actual["stats"] == expected["stats"]
    assert actual["stats"]["transitions"] == 3
    assert "order_rings" in actual["warmed_up"]
    check_runner(actual, path)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "by_head"), [("v2 graphs", True), ("v1", False)])
def test_requests_ask_for_numbers(run, profile, monkeypatch, path, by_head):
    """Beside one that asks for none: 70 is rounded up to 96."""
    policy = SHARE | {"head_budgets": str(profile), "prompt_score": "gate"}
    if not by_head:
        policy |= {"head_budgets": "uniform", "prompt_score": "attention"}
    case, asked = (policy, (120, 150, 76), 28), (70, 128)
    of_device, name = H2OAttentionSpec.limits, "limits"
    with monkeypatch.context() as patch:  # Its budgets, and how heads split them.
        patch.setattr(H2OAttentionSpec, name, lambda x, _: of_device(x, "cuda"))
        expected = run("cpu", *case, asked=asked, **CHUNKS[1])
    actual = run(path, *case, asked=asked, **CHUNKS[1])
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    held = [[len(kept) for layer in x for kept in layer] for x in actual["survivors"]]
    if not by_head:
        assert held[:2] == [[96] * 4, [128] * 4]
    assert actual["stats"] == expected["stats"]
    check_runner(actual, path)


@pytest.mark.parametrize(
    ("path", "dtype", "grows"),
    [
        ("v2 graphs", "model", False),
        pytest.param("v2 graphs", "model", True, marks=pytest.mark.slow),
        pytest.param("v1", "model", True, marks=pytest.mark.slow),
        pytest.param("v2 graphs", "int8", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.rule("R26")
def test_drafts_are_taken_back(run, profile, tmp_path, monkeypatch, path, dtype, grows):
    """Also by head, where two requests outgrow their budgets and one stays dense."""
    policy, lengths, num_tokens = POLICY | {"head_budgets": "uniform"}, (90, 129), 8
    if grows:
        policy = SHARE | {"head_budgets": str(profile), "prompt_score": "gate"}
        lengths, num_tokens = (76, 77, 120, 10), 28
    case = policy | {"resident_dtype": dtype}, lengths, num_tokens
    expected = run("cpu", *case)
    prompts = random_prompts(*lengths)
    texts = [
        prompt + answer
        for prompt, answer in zip(prompts, expected["tokens"], strict=True)
    ]
    speculation = speculating(texts, tmp_path / "texts", monkeypatch, 2)
    speculation["distributed_executor_backend"] = "uni"
    if path != "v1":  # its own drafter is put aside, see `InterpretedWorker`
        ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        speculation["speculative_config"] = ngram
    actual = run(path, *case, **speculation)
    assert actual["tokens"] == expected["tokens"]
    for name in ("transitions", "tokens_evicted"):
        assert actual["stats"][name] == expected["stats"][name] > 0
    if dtype == "model":  # rounding makes steps of the last digits, which differ
        assert actual["survivors"] == expected["survivors"]
    assert "take_back" in actual["warmed_up"]
    assert (actual["runner"] == "vllm.v1.worker.cpu.model_runner") == (path != "v1")
    if path != "v1":
        assert actual["graphs"][0] >= 2


@pytest.mark.slow
def test_graphs_beside_layers_with_a_window(run, tmp_path):
    """They have no rows of ours in the graph's metadata."""
    model = save_hybrid(tmp_path, windowed=1)
    policy = POLICY | {"head_budgets": "uniform"}
    expected, actual = (
        run(path, policy, lengths=(20, 100), num_tokens=5, of=model)
        for path in ("cpu", "v2 graphs")
    )
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    assert actual["stats"] == expected["stats"]
    check_runner(actual, "v2 graphs")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "grows"), [("v2 graphs", False), ("v1", True)])
def test_heads_share_out_parts_of_blocks(run, profile, path, grows):
    """As long as beside layers with a state: pages of 48 slots, two of a block."""
    policy = POLICY | {"budget": 192, "head_budgets": str(profile)}
    case, options = (policy, (330, 20, 100), 20), {"block_size": 96}
    if grows:
        policy = SHARE | {"head_budgets": str(profile), "prompt_score": "gate"}
        case = policy, (150, 152, 240), 60
    options["max_model_len"] = 384
    expected, actual = run("cpu", *case, **options), run(path, *case, **options)
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    held = [[len(kept) for layer in x for kept in layer] for x in actual["survivors"]]
    assert actual["stats"] == expected["stats"]
    if grows:
        assert "order_rings" in actual["warmed_up"]
        assert actual["stats"]["transitions"] == 3
    else:
        assert sum(held[0]) == 4 * 192
        assert any(n % 96 for n in held[0]) and not any(n % 48 for n in held[0])
        assert actual["stats"]["transitions"] == 1, "the other two stay dense"
    check_runner(actual, path)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "by_head"), [("v2 graphs", False), ("v1", True)])
def test_queries_read_a_part(run, profile, path, by_head):
    """Where heads are alike as the preset `mpcache` does, of requests that grow."""
    policy = {"policy": "mpcache", "min_budget": 64}
    if by_head:
        policy = POLICY | {"head_budgets": str(profile), "read": "40%"}
    case = policy, (150, 20, 240), 40
    expected, actual = run("cpu", *case), run(path, *case)
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert actual["stats"] == expected["stats"]
    assert actual["stats"]["transitions"] == 2
    check_runner(actual, path)


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        ("v2 graphs", {"policy": "cake", "budget": 96, "observation_window": 8}),
        pytest.param(
            "v1", {"policy": "cake", "budget": "60%", "min_budget": 64},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "v2",
            {"policy": "d2o", "budget": 64, "merge": "none", "prefill_chunk": 128},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_each_request_splits_its_slots(run, uneven, path, policy):
    """One fills its budget while it generates, one never does; some grow or read on.
    Those that come later have the places of the first, which are gone."""
    case, of = (policy, (100, 20, 129, 90), 8), {"of": uneven}
    expected, actual = (run(x, *case, **of) for x in ("cpu", path))
    assert actual["tokens"] == expected["tokens"]
    assert actual["survivors"] == expected["survivors"]
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert actual["forced"] == pytest.approx(expected["forced"], abs=1e-4)
    assert actual["stats"] == expected["stats"]
    held = [[len(kept) for layer in x for kept in layer] for x in actual["survivors"]]
    assert len(held) == 3
    if policy["policy"] == "cake":  # which the model's two heads are made for
        assert len({tuple(of_heads) for of_heads in held}) > 1, held
        assert all(of_heads[0] < of_heads[2] for of_heads in held), held
    check_runner(actual, path)


def test_runner_v2_measures_the_heads_that_v1_does(run):
    policy = POLICY | {"head_budgets": "measure"}
    expected, actual = (
        run(path, policy, lengths=(20,), max_model_len=512) for path in ("cpu", "v2")
    )
    assert actual["runner"] == "vllm.v1.worker.cpu.model_runner"
    for ours, theirs in zip(actual["errors"], expected["errors"], strict=True):
        for ours_of_head, theirs_of_head in zip(ours, theirs, strict=True):
            assert ours_of_head == pytest.approx(theirs_of_head, rel=0.02)
