"""The head profile is measured, not made up: on a tiny model it is what it must be."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.helpers import engine
from tests.engine.tiny_models import save_reading_llama
from tests.reference.heads_by_transformers import measure
from vllm_h2o.calibrate import main
from vllm_h2o.calibration.sensitivity import GRID_SHARES, OBSERVED, SINKS
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile

LENGTH = 2 * OBSERVED + 64


def model_of(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def text():
    return torch.randint(64, (LENGTH,)).tolist()


def test_errors_fall_and_a_head_that_writes_nothing_has_none():
    model = model_of()
    # KV head 1 of layer 0: query heads 2 and 3.
    model.model.layers[0].self_attn.o_proj.weight.data[:, 64:] = 0.0
    profile = measure(model, [text(), text()], "tiny")
    assert (profile.num_layers, profile.num_kv_heads) == (2, 2)
    grid = profile.grid_tokens
    assert grid[0] == 2 * SINKS and grid[-1] == round(GRID_SHARES[-1] * LENGTH)
    assert profile.errors[0][1] == [0.0] * len(grid)
    for layer, head in ((0, 0), (1, 0), (1, 1)):
        curve = profile.errors[layer][head]
        assert curve[0] > 2 * curve[-1] > 0.0


def test_the_measured_model_computes_what_it_did():
    model, tokens = model_of(), torch.tensor([text()])
    with torch.no_grad():
        before = model(tokens).logits
        measure(model, [text()], "tiny")
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)


def test_an_unknown_output_projection_is_refused():
    model = model_of()
    for layer in model.model.layers:
        layer.self_attn.mixed = layer.self_attn.o_proj
        del layer.self_attn.o_proj
    with pytest.raises(ValueError, match="LlamaAttention has no output projection"):
        measure(model, [text()], "tiny")


def test_texts_must_be_long_and_alike():
    with pytest.raises(ValueError, match=f"more than {2 * OBSERVED} tokens"):
        measure(model_of(), [text(), text()[:-1]], "tiny")
    with pytest.raises(ValueError, match=r"\[40\] tokens"):
        measure(model_of(), [text()[:40]], "tiny")


def refused(capsys, *arguments):
    """What is said on stderr before any engine starts; all of what is said."""
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return said.err.splitlines()[-1], said.out


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_reading_llama(tmp_path_factory.mktemp("llama"))


def test_short_texts_are_named(llama, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("A few words.")
    error, said = refused(capsys, llama, "--texts", tmp_path / "a.txt")
    assert "a.txt has" in said and "give longer texts" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--context", "100"], "--context is 100: use 512 to 2048, or longer --texts"),
        (["--context", "4096"], "--context is 4096: use 512 to 2048"),
        (["--context", "100", "--texts", "a.txt"], "use 512 or more"),
        (["--kv-policy", "h2o"], "--kv-policy is 'h2o': drop it"),
        (["--h2o-read", "20%"], "--h2o-read is '20%': drop it"),
        (["--max-model-len", "4096"], "--max-model-len is 4096: drop it"),
    ],
)
def test_bad_options_are_named(llama, capsys, arguments, complaint):
    assert complaint in refused(capsys, llama, *arguments)[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--output", "/proc/none/heads.json"],
            "--output is /proc/none/heads.json, which",
        ),
        (["--output", "/proc/heads.json"], "--output is /proc/heads.json, which can"),
        (["--output", "/tmp"], "--output is /tmp, a folder: give --output"),
        (["--output", "/tmp/" + 250 * "x" + "/a"], "which can not be written (No such"),
        (["--output", "/tmp/" + 300 * "x"], "which can not be written (File name too"),
        (["--texts", "none.txt"], "--texts is none.txt, which can not be read as text"),
        (
            ["--texts", "/bin/sh"],
            "--texts is /bin/sh, which can not be read as text in",
        ),
    ],
)
def test_files_are_looked_at_first(llama, capsys, monkeypatch, arguments, complaint):
    monkeypatch.setattr("vllm_h2o.calibrate.LLM", None)
    assert complaint in refused(capsys, llama, *arguments)[0]


def test_a_name_on_the_hub_needs_an_output(capsys):
    assert "--output FILE" in refused(capsys, "some/model")[0]


@pytest.mark.engine
def test_the_command_measures_what_transformers_do(llama, tmp_path, capsys):
    """Texts of a user's; an engine that serves then finds the profile."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = "the king counted his gold and the queen her sheep while it rained".split()
    shuffled, paths = random.Random(0), [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(" ".join(shuffled.choices(words, k=1500)))
    command = [llama, "--texts", *paths, "--context", 640, "--dtype", "float32"]
    main([str(argument) for argument in command])
    assert f"wrote the profile to {llama / FILE_NAME}" in capsys.readouterr().out
    found = HeadProfile.load(llama / FILE_NAME)
    assert found.measured_on == "2 texts of 640 tokens, read by an engine"
    tokenizer = AutoTokenizer.from_pretrained(llama)
    texts = [tokenizer.encode(path.read_text())[:640] for path in paths]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    expected = measure(model, texts, "tiny")
    assert (found.grid_tokens, found.context_tokens) == (expected.grid_tokens, 640)
    errors = (torch.tensor(profile.errors) for profile in (found, expected))
    torch.testing.assert_close(*errors, rtol=0.02, atol=1e-7)
    with engine(llama, kv_policy="h2o", h2o_budget=256, max_model_len=1024) as llm:
        (in_force,) = llm.collective_rpc("h2o_profile")
    assert in_force == found
