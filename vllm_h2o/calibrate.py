"""Measure a model's head profile: which KV heads need how much of the past.

    python -m vllm_h2o.calibrate path/to/model [--texts a.txt b.txt] [vLLM's options]

Starts an engine, and so measures any model that vLLM loads; takes vLLM's options for
the model and its workers (--dtype, --quantization, --tensor-parallel-size). Without
--texts it reads the package's own, as `--h2o-head-budgets measure` does. The profile
goes next to the model's weights (the default), where `auto` finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_h2o.calibration.loaded_model import FEWEST_TOKENS
from vllm_h2o.calibration.texts import MOST_TOKENS
from vllm_h2o.files import check_output, text_of, write_output
from vllm_h2o.policy.options import UNIFORM, shown
from vllm_h2o.policy.presets import OPTION_NAMES
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    output = _output(parser, args)
    _check(parser, args)
    contents = [text_of(parser, "--texts", path) for path in args.texts or ()]
    args.model = args.model_tag
    engine_args = EngineArgs.from_cli_args(args)
    texts = _texts(parser, args, contents, engine_args)
    ours = {
        "kv_policy": "h2o",
        "h2o_head_budgets": UNIFORM,
        "max_model_len": args.context,
        "max_num_batched_tokens": args.context,
        "enforce_eager": True,
    }
    llm = LLM(**(vars(engine_args) | ours))
    first, *_ = llm.collective_rpc("h2o_measure", args=(texts, args.context))
    profile = HeadProfile(**first)
    llm.llm_engine.engine_core.shutdown(timeout=30)
    write_output(parser, output, profile.as_json())
    print(f"H2O measured {profile.measured_on}, and wrote the profile to {output}")


def _parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(
        prog="python -m vllm_h2o.calibrate",
        description="Measure which KV heads of a model need how much of the past.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder, or name on the hub")
    parser.add_argument(
        "--texts", type=Path, nargs="+", help="files to read; default: the package's"
    )
    parser.add_argument(
        "--context", type=int, default=MOST_TOKENS, help="tokens of a text"
    )
    parser.add_argument("--output", type=Path, help=f"default: MODEL/{FILE_NAME}")
    return EngineArgs.add_cli_args(parser)


def _output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    if args.output is None and not Path(args.model_tag).is_dir():
        parser.error(
            f"{args.model_tag} is no folder to write {FILE_NAME} into: give --output "
            "FILE, and that file to the engine by --h2o-head-budgets FILE"
        )
    output = args.output or Path(args.model_tag) / FILE_NAME
    check_output(parser, output)
    return output


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what this command sets itself, and texts of a length that can not be."""
    ours = ["kv_policy", "enable_h2o", *(f"h2o_{name}" for name in OPTION_NAMES)]
    for name in (*ours, "max_model_len", "max_num_batched_tokens"):
        given = getattr(args, name)
        if given != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is {shown(given)}: drop it, this command has its own")
    most = MOST_TOKENS if args.texts is None else None
    if args.context < FEWEST_TOKENS or (most and args.context > most):
        upto = f" to {most}, or longer --texts of your own" if most else " or more"
        parser.error(f"--context is {args.context}: use {FEWEST_TOKENS}{upto}")


def _texts(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    contents: Sequence[str],
    engine_args: Any,
) -> list[list[int]] | None:
    """Token ids of the user's texts, each of --context tokens; None: the package's."""
    if args.texts is None:
        return None
    tokenizer = cached_tokenizer_from_config(engine_args.create_model_config())
    texts = []
    for path, content in zip(args.texts, contents, strict=True):
        ids = list(tokenizer.encode(content))
        if len(ids) >= args.context:
            texts.append(ids[: args.context])
        else:
            print(f"left out: {path} has {len(ids)} tokens, less than --context")
    if not texts:
        parser.error(
            f"--texts: no file has {args.context} tokens: give longer texts or a "
            "smaller --context"
        )
    return texts


if __name__ == "__main__":
    main()
