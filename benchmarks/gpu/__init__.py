"""Kernel benchmarks on a GPU: `python -m benchmarks.gpu`."""
