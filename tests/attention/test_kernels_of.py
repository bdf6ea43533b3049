"""Kernels are those of the device, unless they are named."""

import pytest
import torch

from tests.policy.packages import example_of, install_kernels
from vllm_h2o.attention.ops import cpu, kernels_of, named_kernels, reference

CPU = torch.device("cpu")


def test_the_device_says_which(monkeypatch):
    monkeypatch.delenv("VLLM_H2O_KERNELS", raising=False)
    assert named_kernels() is None
    assert kernels_of(CPU) is cpu


def test_the_reference_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_KERNELS", "reference")
    assert kernels_of(CPU) is reference


def test_a_package_brings_kernels_by_its_entry_point(tmp_path, monkeypatch):
    install_kernels(tmp_path, monkeypatch, "mine", example_of("kernels.md"))
    monkeypatch.setenv("VLLM_H2O_KERNELS", "mine")
    kernels = kernels_of(CPU)
    assert kernels.__name__ == "mine"
    assert kernels.decode_resident is not reference.decode_resident
    assert kernels.transition is reference.transition


@pytest.mark.parametrize(
    "code, said",
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (
            "from vllm_h2o.attention.ops.reference import FORMS, observe, start",
            "lacks CAPABILITIES, attend_observed, compress_chunk, decode_resident, mov",
        ),
    ],
)
def test_a_package_that_can_not_be_used_is_refused(code, said, tmp_path, monkeypatch):
    install_kernels(tmp_path, monkeypatch, "odd", code)
    monkeypatch.setenv("VLLM_H2O_KERNELS", "odd")
    with pytest.raises(
        ValueError, match=f"is 'odd', but its entry point 'odd'.*{said}"
    ):
        kernels_of(CPU)


def test_what_nobody_brings_is_refused_with_what_is_there(tmp_path, monkeypatch):
    install_kernels(tmp_path, monkeypatch, "odd", "")
    monkeypatch.setenv("VLLM_H2O_KERNELS", "fast")
    with pytest.raises(ValueError, match="is 'fast': unset it.*'reference'.*, 'odd'"):
        kernels_of(CPU)
