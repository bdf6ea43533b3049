"""Say whether a model starts with H2O, before anything of it is loaded.

    python -m vllm_h2o.check path/to/model [vLLM's engine options]

Takes a folder or its config.json, and the engine options of `vllm serve`; without a
policy it asks for h2o. The model is made as the engine makes it, without memory for its
weights, so that its own layers say what they are. Prints what would be compressed and
what the longest request takes; or, with exit status 1, what is refused. Exit status 3
says that this model can not be made so.

What only a start shows is not looked at: whether there is memory for it, what its heads
measure, more ranks than one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from vllm_h2o.core.compat import kv_cache_config
from vllm_h2o.core.settings import CONFIG_KEY, h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec, with_equal_pages
from vllm_h2o.plugin.engine_args import needed_worker_cls
from vllm_h2o.plugin.validate import check_kv_cache_config
from vllm_h2o.policy.options import shortened, shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_POLICY = "h2o"
NOT_KNOWN = 3
"""Exit status where a model can not be made without its weights."""
_ONE_RANK = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes",
)  # fmt: skip
_ENOUGH_BYTES = 2**50
"""Of memory for any model's longest request: only its share of it is asked for."""
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
_MOST_NUMBERS = 2**24
"""Of a tensor that is really made, if not to be filled later: as of positions."""


@dataclass(frozen=True)
class Plan:
    """The work of an engine with a model, by counts and bytes.

    Attributes:
        architecture: vLLM's name of the model's class.
        layers: Layers by what they keep, those that H2O compresses first.
        num_kv_heads: Of a layer that is compressed.
        head_size: Of its keys and values.
        block_size: Tokens of a block.
        longest: Tokens of the longest request.
        budget: Slots of a KV head that the longest request has after its prompt.
        stock_bytes: Of the longest request in all layers, without H2O.
        reading_bytes: With H2O, in the step in which it is compressed.
        resident_bytes: With H2O, after that.
    """

    architecture: str
    layers: dict[str, int]
    num_kv_heads: int
    head_size: int
    block_size: int
    longest: int
    budget: int
    stock_bytes: int
    reading_bytes: int
    resident_bytes: int

    def kinds(self) -> tuple[str, str]:
        """Name what is compressed, and what is left alone."""
        compressed, *others = (f"{n} with {kind}" for kind, n in self.layers.items())
        return compressed, ", ".join(others) or "none"

    def lines(self) -> list[str]:
        """Lines for people to read."""
        compressed, others = self.kinds()
        return [
            f"{self.architecture} starts with H2O",
            f"layers that are compressed: {compressed}, {self.num_kv_heads} KV heads "
            f"of size {self.head_size}",
            f"layers that are left alone: {others}",
            f"blocks: {self.block_size} tokens",
            f"the longest request, {self.longest} tokens: {_mib(self.stock_bytes)} of "
            f"KV cache with stock vLLM; with H2O {_mib(self.resident_bytes)} after its "
            f"prompt ({self.budget} tokens), {_mib(self.reading_bytes)} for a moment "
            "at the prompt's end",
        ]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.model = _model(parser, args.model_tag)
    args.skip_tokenizer_init, args.load_format = True, "dummy"
    asks = args.kv_policy is not None or args.enable_h2o is not None
    if not asks and CONFIG_KEY not in args.additional_config:
        args.kv_policy = DEFAULT_POLICY
    ranks = _only_one_rank(parser, args)
    logging.disable(logging.WARNING)
    try:
        plan = plan_of(EngineArgs.from_cli_args(args))
    except Refusal as error:
        sys.exit(f"refused: {error}")
    except Exception as error:  # whatever a model's class may do
        said = f"{type(error).__name__}: {shortened(error)}"
        print(f"not known, as it can not be made without weights: {said}; start it")
        sys.exit(NOT_KNOWN)
    print("\n".join(plan.lines()))
    if ranks:
        print(f"for one rank: {ranks} is not looked at")


def _parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(
        prog="python -m vllm_h2o.check",
        description="Say whether a model starts with H2O, and what it would compress.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder, or its config.json")
    return EngineArgs.add_cli_args(parser)


def _model(parser: argparse.ArgumentParser, given: str) -> str:
    """The model as vLLM takes it: the folder of a config.json, else as it is."""
    path = Path(given)
    if path.is_file():
        if path.name != "config.json":
            parser.error(f"MODEL is {shown(given)}: give a folder or its config.json")
        return str(path.parent)
    is_path = given.startswith((".", os.sep)) or given.endswith(".json")
    if is_path and not path.is_dir():
        parser.error(f"MODEL is {shown(given)}: there is no such folder or file")
    return given


def _only_one_rank(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Ask for one rank, which this process is; what was asked for, in words."""
    given = []
    for name in _ONE_RANK:
        if getattr(args, name) != parser.get_default(name):
            given.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
            setattr(args, name, parser.get_default(name))
    return ", ".join(given)


class Refusal(ValueError):
    """What H2O or vLLM says of a model or an option that it does not serve."""


def plan_of(engine_args: EngineArgs) -> Plan:
    """Plan what an engine of one rank would do with a model, on this platform.

    Raises:
        Refusal: H2O or vLLM refuses the model, or an option.
    """
    with _refusals():
        vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if h2o_config(vllm_config) is None:
            said = "--kv-policy is 'full': it compresses nothing, use another"
            raise ValueError(said)
    specs = _specs(vllm_config)
    with _refusals(NotImplementedError):
        cache = kv_cache_config(vllm_config, specs, _ENOUGH_BYTES)
        check_kv_cache_config(vllm_config, cache)
        return _plan(vllm_config, cache.kv_cache_groups)


@contextmanager
def _refusals(*others: type[Exception]) -> Iterator[None]:
    """Turn errors of values, and others, into refusals by their own words."""
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise Refusal(first) from error
    except kinds as error:
        raise Refusal(str(error)) from error


def _plan(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> Plan:
    specs = [group.kv_cache_spec for group in groups]
    ours = [spec for spec in specs if isinstance(spec, H2OAttentionSpec)]
    if not ours:
        raise ValueError(
            f"{vllm_config.model_config.model} has no layer with full attention, there "
            "is nothing to compress: use stock vLLM"
        )
    spec, longest = ours[0], vllm_config.model_config.max_model_len
    limits = spec.limits(vllm_config.device_config.device_type)
    budget = min(limits.climb(None, longest, longest).budget, longest)
    dense, resident = cdiv(longest, spec.block_size), cdiv(budget, spec.block_slots)
    beside = sum(
        cdiv(x.max_memory_usage_bytes(vllm_config), x.page_size_bytes)
        for x in specs
        if not isinstance(x, H2OAttentionSpec)
    )
    if budget == longest:  # It stays dense.
        resident = dense
    reading = spec.blocks_while_reading(longest, budget, spec.h2o.prefill_chunk)
    # Of a block a group has a page in each of its layers, and all groups as many.
    width = max(len(group.layer_names) for group in groups)
    before, after, stock = (
        (blocks * len(ours) + beside) * width for blocks in (reading, resident, dense)
    )
    return Plan(
        architecture=vllm_config.model_config.architecture,
        layers=_kinds(groups),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        longest=longest,
        budget=budget,
        stock_bytes=stock * spec.unpadded_page_size_bytes,
        reading_bytes=before * spec.page_size_bytes,
        resident_bytes=after * spec.page_size_bytes,
    )


def _specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The specs of a model's layers, as H2O's worker has them before it measures.

    Raises:
        Refusal: A layer is refused.
    """
    worker = resolve_obj_by_qualname(needed_worker_cls())
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    register_backend(worker.overridden, worker.choose_backend(vllm_config))
    _cached_get_attn_backend.cache_clear()
    try:
        with _refusals(), set_current_vllm_config(vllm_config), _one_rank():
            with set_default_torch_dtype(dtype), _NoMemoryForWeights():
                initialize_model(vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)
            specs = with_equal_pages(get_kv_cache_spec(vllm_config))
            backends = get_current_attn_backends(vllm_config)
            layouts = [x.name for x in get_supported_kv_cache_layouts(backends)]
            resolve_kv_cache_layout(vllm_config, [layouts], specs.values())
        return specs
    finally:
        worker.overridden.clear_override()
        _cached_get_attn_backend.cache_clear()


class _NoMemoryForWeights(TorchFunctionMode):
    """A shape only for what layers make to be filled later, and for what is large.

    Not for all that they make: some compute with it, such as the slopes of ALiBi.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            shape_only = func(*args, **kwargs | {"device": "meta", "pin_memory": False})
            if func is torch.empty or shape_only.numel() > _MOST_NUMBERS:
                return shape_only
        return func(*args, **kwargs)


@contextmanager
def _one_rank() -> Iterator[None]:
    """The groups of ranks that layers ask for when they are made."""
    with tempfile.TemporaryDirectory(prefix="vllm_h2o_") as folder:
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _kinds(groups: list[KVCacheGroupSpec]) -> dict[str, int]:
    """Count layers by what they keep, those that are compressed first."""
    names: Counter[str] = Counter()
    for group in sorted(
        groups, key=lambda x: not isinstance(x.kv_cache_spec, H2OAttentionSpec)
    ):
        names[_kind(group.kv_cache_spec)] += len(group.layer_names)
    return dict(names)


def _kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, H2OAttentionSpec):
        return "full attention"
    if isinstance(spec, MambaSpec):
        return "a state"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"chunks of {spec.attention_chunk_size} tokens"
    if isinstance(spec, SlidingWindowSpec):
        return f"a window of {spec.sliding_window} tokens"
    return type(spec).__name__


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


if __name__ == "__main__":
    main()
