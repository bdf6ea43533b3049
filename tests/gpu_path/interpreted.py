"""vLLM's own Triton kernels on CPU tensors: import this before anything else.

A CPU build of vLLM puts placeholders for triton, unless triton has a backend "cpu".
Naming one makes it take the real package, whose interpreter then runs every kernel.
Only for processes of their own: a CPU engine would take other paths too.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace  # noqa: E402

from triton.backends import backends  # noqa: E402


class _NoDriver:
    @staticmethod
    def is_active():
        return False


backends.setdefault("cpu", SimpleNamespace(driver=_NoDriver, compiler=None))

from vllm.triton_utils import HAS_TRITON  # noqa: E402

assert HAS_TRITON

import torch  # noqa: E402

# vLLM's Triton kernels choose tile sizes by it.
torch.cuda.get_device_capability = lambda device=None: (8, 0)
