"""The engine arguments: `enable_h2o`, `kv_policy`, `h2o_*`.

Target: `vllm.engine.arg_utils.EngineArgs` and `AsyncEngineArgs`.
Why: a dataclass that rejects unknown names; vLLM offers plugins no way in.
How: fields are added to the dataclass; `__init__`, `__post_init__` (which also
    dataclasses derived later run) and `add_cli_args` are wrapped, and so is
    `create_engine_config`, within which the fields that vLLM reads are set: before
    and after, an instance has what it was given. A vLLM that has not what is wrapped
    is left alone, with a warning.
Upstream: patches/0001-engine-args-h2o.patch does the same in the source; this
    module then stands down.
Remove when: vLLM lets a plugin add engine arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import warnings
from types import ModuleType
from typing import Any

from vllm_h2o.core import compat
from vllm_h2o.core.settings import (
    CONFIG_KEY,
    h2o_config,
    note_longest,
    note_resident_dtype,
    parse_settings,
    settings_of,
)
from vllm_h2o.plugin.long_texts import lengthened
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.options import bad, shown
from vllm_h2o.policy.presets import POLICY_NAMES, resolve_config

SCHEDULER_CLS = "vllm_h2o.core.scheduler.H2OScheduler"
WORKER_CLS = {
    "cpu": "vllm_h2o.plugin.cpu_worker.H2OCPUWorker",
    "cuda": "vllm_h2o.plugin.gpu_worker.H2OGPUWorker",
}

_PREFIX = "h2o_"
_NEEDED = (
    "scheduler_cls",
    "worker_cls",
    "__post_init__",
    "add_cli_args",
    "create_engine_config",
)
"""What of `EngineArgs` is set or wrapped here."""
_OPTIONS = {f.name: f for f in dataclasses.fields(H2OConfig) if f.metadata}
H2OEngineArgs: Any = dataclasses.make_dataclass(
    "H2OEngineArgs",
    [
        ("enable_h2o", "bool | None", None),
        ("kv_policy", "str | None", None),
        *((_PREFIX + n, f"{f.type} | None", None) for n, f in _OPTIONS.items()),
    ],
    kw_only=True,
    namespace={"__module__": __name__},
)
"""H2O's engine arguments; None: not given, the preset's value holds."""
_FIELDS = tuple(field.name for field in dataclasses.fields(H2OEngineArgs))


def extend(module: ModuleType) -> None:
    """Add the arguments to the classes of `vllm.engine.arg_utils`; idempotent."""
    engine_args = module.EngineArgs
    present = set(engine_args.__dataclass_fields__)
    if present.issuperset(_FIELDS):
        return  # extended already, or built from patched sources
    lacking = [name for name in _NEEDED if not hasattr(engine_args, name)]
    if lacking or present.intersection(_FIELDS):
        # Raising here would break a vLLM that nobody asked to evict anything.
        warnings.warn(
            "vllm-h2o does not know this vLLM and adds no options to it: EngineArgs "
            f"lacks {lacking}, has {sorted(present.intersection(_FIELDS))}; "
            f"{compat.INSTALL}",
            stacklevel=2,
        )
        return
    for cls in (engine_args, module.AsyncEngineArgs):
        for name in _FIELDS:
            cls.__dataclass_fields__[name] = H2OEngineArgs.__dataclass_fields__[name]
            setattr(cls, name, None)
        cls.__init__ = _wrap_init(cls.__init__)
    engine_args.__post_init__ = _wrap_post_init(engine_args.__post_init__)
    engine_args.add_cli_args = staticmethod(_wrap_cli(engine_args.add_cli_args))
    engine_args.create_engine_config = configured(engine_args.create_engine_config)


def _wrap_init(init):
    @functools.wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any) -> None:
        for name in _FIELDS:
            setattr(self, name, kwargs.pop(name, None))
        init(self, *args, **kwargs)

    return wrapped


def _wrap_post_init(post_init):
    @functools.wraps(post_init)
    def wrapped(self) -> None:
        post_init(self)
        translate(self)

    return wrapped


def _wrap_cli(add_cli_args):
    @functools.wraps(add_cli_args)
    def wrapped(parser):
        parser = add_cli_args(parser)
        add_cli_group(parser)
        return parser

    return wrapped


def configured(create_engine_config):
    """Wrap `EngineArgs.create_engine_config`: our arguments count, and are checked.

    The translated ones do not stay: arguments may be changed, copied by
    `dataclasses.replace`, and made a config of again.
    """

    @functools.wraps(create_engine_config)
    def wrapped(self, *args: Any, **kwargs: Any):
        translated = translate(self)
        additional = translated.get("additional_config", self.additional_config)
        translated |= lengthened(self, additional)
        given = {name: getattr(self, name) for name in translated}
        vars(self).update(translated)
        try:
            vllm_config = create_engine_config(self, *args, **kwargs)
        finally:
            vars(self).update(given)
        if h2o_config(vllm_config) is not None:
            compat.settle_block_size(vllm_config)
            note_resident_dtype(vllm_config, _kernels_round())
        check(vllm_config)
        if h2o_config(vllm_config) is not None:
            note_longest(vllm_config)
            from vllm_h2o.plugin.metrics import add_metrics
            from vllm_h2o.plugin.requests import check_requests

            check_requests()
            add_metrics()
        return vllm_config

    return wrapped


def _kernels_round() -> bool:
    """Whether the kernels in force have int8."""
    from vllm_h2o.attention.ops import Capability, named_kernels

    named = named_kernels()
    able = {Capability.INT8, Capability.TORCH}
    return named is None or bool(able & set(named.CAPABILITIES))


def translate(engine_args: Any) -> dict[str, Any]:
    """Arguments of vLLM that ours stand for; none when H2O is not asked for.

    Raises:
        ValueError: Bad or contradictory arguments.
    """
    options = {
        name.removeprefix(_PREFIX): getattr(engine_args, name)
        for name in _FIELDS[2:]
        if getattr(engine_args, name) is not None
    }
    config = resolve_config(engine_args.kv_policy, engine_args.enable_h2o, options)
    _check_given(engine_args, config)
    if config is None:
        return {}
    check_version()
    # Merged, so that a user's own additional_config is kept.
    additional = engine_args.additional_config or {}
    settings = settings_of(config, options)
    translated: dict[str, Any] = {
        "additional_config": {**additional, CONFIG_KEY: settings},
        "scheduler_cls": _claim(engine_args, "scheduler_cls", None, SCHEDULER_CLS),
        "worker_cls": _claim(engine_args, "worker_cls", "auto", needed_worker_cls()),
    }
    if engine_args.speculative_config and engine_args.async_scheduling is None:
        from vllm.logger import init_logger

        said = "H2O schedules drafts synchronously (--no-async-scheduling)"
        init_logger(f"vllm.{__name__}").info_once(said)
        translated["async_scheduling"] = False
    return translated


def check_version() -> None:
    """Raise where classes of ours would meet others than those that they extend."""
    import vllm

    if compat.is_release(vllm.__version__):
        return
    if not compat.is_close(vllm.__version__):
        raise ValueError(
            "a KV policy (--kv-policy) is given, but vllm-h2o is for vLLM "
            f"{' and '.join(compat.RELEASES)} and this vLLM is {vllm.__version__}: "
            f"{compat.INSTALL}, or drop --kv-policy (kv_policy, enable_h2o)"
        )
    from vllm_h2o.plugin.seams import check_seams

    check_seams()


def _check_given(engine_args: Any, config: H2OConfig | None) -> None:
    """Raise when `additional_config` says something else than the arguments."""
    policy, additional = engine_args.kv_policy, engine_args.additional_config
    if policy is None and engine_args.enable_h2o is None:
        return  # additional_config alone is the official spelling
    if not isinstance(additional or {}, dict):
        raise ValueError(
            f"additional_config (--additional-config) is {shown(additional)}: H2O's "
            "settings travel in it, use a dictionary, or drop kv_policy (--kv-policy)"
        )
    given = (additional or {}).get(CONFIG_KEY)
    if given is not None and parse_settings(given) != config:
        asked = f"enable_h2o={engine_args.enable_h2o}"
        if policy is not None or config is not None:
            asked = f"kv_policy={shown(config.policy if config else policy)}"
        raise ValueError(
            f"additional_config['{CONFIG_KEY}']={shown(given)} contradicts {asked} "
            "and the h2o_* options: give one of them"
        )


def check(vllm_config: Any) -> None:
    """Refuse what H2O can not serve, before any weight is loaded."""
    from vllm_h2o.plugin.validate import check_vllm_config

    check_vllm_config(vllm_config)


def needed_worker_cls() -> str:
    """Name of H2O's worker for the current platform.

    Raises:
        ValueError: There is none.
    """
    from vllm.platforms import current_platform

    # Not by `device_type`: ROCm calls itself "cuda".
    for name, present in (
        ("cpu", current_platform.is_cpu()),
        ("cuda", current_platform.is_cuda()),
    ):
        if present:
            return WORKER_CLS[name]
    platform = type(current_platform)
    raise ValueError(
        "kv_policy (--kv-policy) is given, but H2O has no worker for vLLM's platform "
        f"{platform.__module__}.{platform.__qualname__} (device "
        f"{current_platform.device_name!r}): use vLLM's own for "
        f"{' or '.join(WORKER_CLS)}, or drop --kv-policy"
    )


def _claim(engine_args: Any, name: str, default: str | None, ours: str) -> str:
    given = getattr(engine_args, name)
    if given not in (default, ours):
        raise ValueError(
            f"{name}={shown(given)} (--{name.replace('_', '-')}) contradicts kv_policy "
            f"(--kv-policy), which needs {name}={ours!r}: drop one of them"
        )
    return ours


def add_cli_group(parser: Any) -> None:
    """Add the group `H2O` to vLLM's command line."""
    group = parser.add_argument_group(
        title="H2O",
        description="KV-cache eviction (vllm-h2o). A policy is a preset; an explicit "
        "option overrides it. Defaults in brackets are those of the preset h2o.",
    )
    group.add_argument(
        "--kv-policy",
        help="Which tokens keep their KV: full keeps all (stock vLLM). [full]",
        choices=POLICY_NAMES,
    )
    group.add_argument(
        "--enable-h2o",
        default=None,
        help="Same as --kv-policy h2o.",
        action=argparse.BooleanOptionalAction,
    )
    for name, option in _OPTIONS.items():
        parse, choices = option.metadata["parse"], option.metadata["choices"]
        summary = f"{option.metadata['summary']} [{option.default}]"
        group.add_argument(
            "--" + (_PREFIX + name).replace("_", "-"),
            help=summary.replace("%", "%%"),
            type=_cli(name, parse) if parse else None,
            choices=choices,
        )


def _cli(name, parse):
    """Let argparse show the parser's own message; Python's names no option."""
    fix = {int: "use a whole number", float: "use a number"}.get(parse)

    @functools.wraps(parse)
    def wrapped(text: str):
        try:
            return parse(text)
        except ValueError as error:
            said = bad(name, text, fix) if fix else error
            raise argparse.ArgumentTypeError(str(said)) from None

    return wrapped
