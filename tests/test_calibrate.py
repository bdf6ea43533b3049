"""The head profile is measured, not made up: on a tiny model it is what it must be."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.smollm2 import ensure_model
from vllm_h2o.calibrate import main, measure
from vllm_h2o.policy.errors import GRID_SHARES, OBSERVED, SINKS

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


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()


def test_short_texts_are_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("A few words.")
    run_main(monkeypatch, ensure_model(), "--texts", tmp_path / "a.txt")
    said = capsys.readouterr()
    assert "a.txt has" in said.out and "give longer texts" in said.err


def test_a_name_on_the_hub_needs_an_output(monkeypatch, tmp_path, capsys):
    run_main(monkeypatch, "some/model", "--texts", tmp_path / "a.txt")
    assert "--output FILE" in capsys.readouterr().err
