"""Worker methods for engines in which H2O is off: imports none of it."""

from __future__ import annotations

import sys


class InertProbe:
    """Tells what a stock worker is made of."""

    def probe_parts(self) -> dict:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        # Behind the extension that brings this method.
        worker = type(self).__mro__[0]
        return {
            "worker": _name(worker),
            "backends": sorted({_name(layer.attn_backend) for layer in layers}),
            "specs": sorted({_name(type(group.kv_cache_spec)) for group in groups}),
            "modules": [
                name
                for name in sys.modules
                if name.startswith(("vllm_h2o.attention", "vllm_h2o.core.scheduler"))
            ],
        }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
