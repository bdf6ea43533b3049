"""vLLM's own tests, with H2O in stock's place: `python -m tests.vllm_suite.run`."""
