"""See what each KV head of a model keeps of a text, as a page for a browser.

    python -m vllm_h2o.inspect path/to/model text.txt [vLLM's options]

Starts an engine, lets it read the text and go on with it, and writes one self-contained
HTML page: which tokens are held by which heads, from the end of the text on, step by
step. Takes vLLM's options, H2O's among them (--kv-policy, --h2o-budget).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers.detokenizer_utils import detokenize_incrementally
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_h2o.core.settings import h2o_config
from vllm_h2o.files import check_output, text_of, write_output
from vllm_h2o.policy.presets import FULL

TEMPLATE = Path(__file__).with_name("inspect.html")
DATA = "/* data */"
"""Where the template has room for what the page shows."""


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    text = _text(parser, args)
    args.model = args.model_tag
    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    config = h2o_config(llm.llm_engine.vllm_config)
    assert config is not None, args.kv_policy
    tokenizer, model = llm.get_tokenizer(), llm.llm_engine.vllm_config.model_config
    ids = list(tokenizer.encode(text))
    most = model.max_model_len - args.max_tokens
    if not ids or most < 1:
        parser.error(
            f"TEXT has {len(ids)} tokens, and --max-tokens leaves {most} of "
            f"--max-model-len {model.max_model_len}: both have to be 1 or more"
        )
    prompt = ids[: min(most, args.prompt_tokens or most)]
    params = SamplingParams(
        temperature=0, max_tokens=args.max_tokens, ignore_eos=True, detokenize=False
    )
    answer, record = watched_answer(llm, prompt, params)
    llm.llm_engine.engine_core.shutdown(timeout=30)
    if record is None:
        parser.error(
            f"TEXT has {len(prompt)} tokens, which with --max-tokens {args.max_tokens} "
            f"fit --h2o-budget {config.budget}: use a longer text or a smaller budget"
        )
    shown = record | {
        "model": Path(args.model).resolve().name,
        "policy": config.policy,
        "budget": str(config.budget),
        "tokens": pieces(tokenizer, prompt + answer),
    }
    write_output(parser, args.output, page(shown))
    read = f"{len(prompt)} of the text's {len(ids)} tokens"
    print(f"H2O has read {read}, and wrote what is kept to {args.output}")


def _parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(
        prog="python -m vllm_h2o.inspect",
        description="See what each KV head of a model keeps of a text.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder, or name on the hub")
    parser.add_argument("text", metavar="TEXT", type=Path, help="file to read")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        help="of the text to read; default: as many as the model takes",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="to go on with it (default: 64)"
    )
    parser.add_argument("--output", type=Path, default=Path("inspect.html"))
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(kv_policy="h2o", enforce_eager=True)
    return parser


def _text(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The text, once the options have been found right."""
    if args.kv_policy == FULL:
        parser.error(f"--kv-policy is {FULL!r}, which evicts nothing: use another")
    if args.max_tokens < 2:
        parser.error(f"--max-tokens is {args.max_tokens}: use 2 or more")
    if args.prompt_tokens is not None and args.prompt_tokens < 1:
        parser.error(f"--prompt-tokens is {args.prompt_tokens}: use 1 or more")
    check_output(parser, args.output)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if (given := getattr(args, name)) > 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is {given}: drop it, this command follows one stage")
    return text_of(parser, "TEXT", args.text)


def watched_answer(
    llm: Any, prompt: list[int], params: SamplingParams
) -> tuple[list[int], dict[str, Any] | None]:
    """Let an engine that runs nothing else go on with a prompt.

    Args:
        llm: A `vllm.LLM` with a KV policy.
        prompt: Token ids.
        params: For one answer.

    Returns:
        The token ids of the answer, and what was kept: `ends`, the length of the
        sequence at each look, and `heads`, by layer and KV head, see
        `vllm_h2o.plugin.worker.H2OWorker.h2o_recorded`. None: it fits the budget.
    """
    llm.collective_rpc("h2o_record")
    outputs = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    ranks = llm.collective_rpc("h2o_recorded")
    answer = list(outputs[0].outputs[0].token_ids)
    return answer, joined([records[0] for records in ranks if records])


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the ranks of tensor parallelism have recorded, each of its own KV heads."""
    if not ranks:
        return None
    heads = {(x["layer"], x["head"]): x for rank in ranks for x in rank["heads"]}
    return {"ends": ranks[0]["ends"], "heads": [heads[at] for at in sorted(heads)]}


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several is the last one's."""
    tokens: list[str] = []
    texts, prefix, read = [], 0, 0
    for token in ids:
        new, text, prefix, read = detokenize_incrementally(
            tokenizer, [token], tokens, prefix, read
        )
        tokens += new
        texts.append(text)
    return texts


def page(shown: dict[str, Any]) -> str:
    """The HTML page.

    Args:
        shown: What `watched_answer` returns of a request, with `model`, `policy`,
            `budget` and `tokens`, the text of each.
    """
    data = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    # Nothing in a text may end the script.
    return TEMPLATE.read_text("utf-8").replace(DATA, data.replace("<", "\\u003c"))


if __name__ == "__main__":
    main()
