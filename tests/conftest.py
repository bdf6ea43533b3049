"""Before anything imports triton: without a GPU its kernels are interpreted.

Triton decides when its own library is imported, and vLLM imports triton, so no
test module is early enough.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
