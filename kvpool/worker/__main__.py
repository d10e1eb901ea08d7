"""A worker process: one rank of a model, for the scheduler at an address.

One rank::

    python -m kvpool.worker --address ipc:///tmp/kvpool --model DIR --num-blocks 1000

Several on one machine, which share the heads of the model::

    python -m kvpool.worker --tensor-parallel 2 --address ipc:///tmp/kvpool --model DIR

Ranks on several machines are started by torchrun, ``torchrun --nnodes 2 ... -m kvpool.worker --address
tcp://10.0.0.1:5600 --keys KEYS --model DIR``. The keys protect the connection to the scheduler alone: whoever can
connect to torchrun's rendezvous, or to the ports of gloo and NCCL, can take the ranks over. These belong on a network
that only trusted machines are in.

Ends when the scheduler says so or is gone, and when the process that has started the ranks is gone. Exit codes: 0 the
scheduler has ended it; 1 a failure; 2 wrong usage; 130 interrupted. Errors are one line on stderr; a failure's
traceback goes to the scheduler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvpool.cache.sizing import num_blocks_per_request
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec
from kvpool.common.clean_exit import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, CleanCommand, fail
from kvpool.errors import InvalidArgumentError
from kvpool.network.curve import KEYS_VARIABLE
from kvpool.worker.transport.connection import WorkerConnection
from kvpool.worker.transport.lifeline import end_with
from kvpool.worker.transport.local_workers import MAX_RANKS, LocalWorkers
from kvpool.worker.transport.messages import CacheGroupInfo, WorkerInfo

if TYPE_CHECKING:
    from kvpool.worker.model_runner import ModelRunner
    from kvpool.worker.models.tensor_parallel import Ranks

MAX_NUM_BLOCKS = 2**31 - 1  # block ids are int32
MAX_BLOCK_SIZE = 2**20  # tokens
MAX_SEQS = 2**16
MAX_BATCHED_TOKENS = 2**20
MAX_MODEL_LEN = 2**31 - 1
MAX_TIMEOUT = 7 * 24 * 3600.0  # seconds

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker computes with; the options of the command, see there."""

    model: Path
    num_blocks: int | None
    block_size: int
    dtype: str
    device: str | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    attention: str | None


@app.command(cls=CleanCommand)
def main(
    context: typer.Context,
    address: Annotated[str, typer.Option("--address", help="Of the scheduler: ipc://PATH or tcp://HOST:PORT.")],
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Folder of a model, or a .gguf file.")],
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            min=2,
            max=MAX_NUM_BLOCKS,
            help="Blocks of the cache, the null block included. Default: what --max-num-seqs sequences of"
            " --max-model-len need, or as many as fit on every rank.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, max=MAX_BLOCK_SIZE, help="Tokens per block.")] = 16,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and cache.")] = "float32",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: cuda if there is one.", show_default=False)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, max=MAX_SEQS, help="Requests at a time.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, max=MAX_BATCHED_TOKENS, help="Tokens of a step.")
    ] = 2048,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=1,
            max=MAX_MODEL_LEN,
            help="Tokens of a sequence. Default: the model's limit.",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help="Backend. Default: the best that is here.", show_default=False)
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.1, max=MAX_TIMEOUT, help="Seconds to wait for the scheduler and the other ranks."
        ),
    ] = 600.0,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel", min=1, max=MAX_RANKS, help="Ranks to start on this machine; they share the heads."
        ),
    ] = 1,
    rendezvous: Annotated[
        Path | None,
        typer.Option(
            "--rendezvous",
            metavar="FILE",
            help="Where ranks on one machine meet: a new file in a private folder. Default: as torchrun says.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            metavar="DIR",
            help=f"CURVE keys of `kvpool keygen`, for tcp. Default: the folder that {KEYS_VARIABLE} names.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do without keys where other machines can reach the connection.")
    ] = False,
    parent_pipe: Annotated[int | None, typer.Option("--parent-pipe", hidden=True)] = None,
) -> None:
    """Execute the steps of a kvpool scheduler with one rank of a model, or with several on this machine."""
    if tensor_parallel > 1:
        _start_ranks(context)
        return
    options = WorkerOptions(
        model,
        num_blocks,
        block_size,
        dtype,
        device,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        attention,
    )
    with _clean_errors():
        if parent_pipe is not None:
            end_with(parent_pipe)
        from kvpool.worker.models.tensor_parallel import Ranks

        ranks = Ranks.from_environment()
        with WorkerConnection(address, ranks.rank, timeout_seconds=timeout, keys=keys, insecure=insecure) as connection:
            _run(connection, ranks, rendezvous, options)


def _start_ranks(context: typer.Context) -> None:
    """Runs this command once for each rank, and ends as they do."""
    with _clean_errors():
        if "RANK" in os.environ:
            raise InvalidArgumentError("--tensor-parallel starts ranks, but RANK says that this is one already")
        options = {name: value for name, value in context.params.items() if value is not None}
        num_ranks = options.pop("tensor_parallel")
        words = ["--insecure"] if options.pop("insecure") else []
        words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with LocalWorkers(num_ranks, words, keeps_errors=False) as workers:
            code = workers.wait()
            if code:
                workers.kill()
    if code:
        raise typer.Exit(code if code > 0 else EXIT_FAILURE)


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Turns every failure into one line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except InvalidArgumentError as error:
        fail(f"error: {error}", EXIT_USAGE)
    except Exception as error:
        fail(f"error: {type(error).__name__}: {error}", EXIT_FAILURE)


def _run(connection: WorkerConnection, ranks: Ranks, rendezvous: Path | None, options: WorkerOptions) -> None:
    from kvpool.worker.memory.device_memory import check_device, default_device

    with ExitStack() as stack:
        try:
            name = default_device() if options.device is None else options.device
            check_device(name)
            device = ranks.device(name)
            stack.enter_context(ranks.connected(device, rendezvous))
            runner = _make_runner(ranks, device, options)
            stack.callback(runner.close)
        except BaseException as error:
            connection.report_failure(error)
            raise
        connection.say_hello(_describe(runner, ranks))
        connection.serve(runner.execute, runner.block_digests)


def _make_runner(ranks: Ranks, device: Any, options: WorkerOptions) -> ModelRunner:
    """Loads the model into the host's memory and keeps this rank's part of it: on a GPU there may be no room for all
    of it. Weights that are saved in the dtype asked for are mapped from their files, and of them only this part is
    read."""
    from transformers.utils import logging

    from kvpool.worker.model_runner import ModelRunner, RunnerConfig
    from kvpool.worker.models.pretrained import load_pretrained
    from kvpool.worker.models.tensor_parallel import shard_model
    from kvpool.worker.models.transformers_model import TransformersModel

    be_quiet: Any = logging.disable_progress_bar
    be_quiet()
    whole = load_pretrained(options.model, dtype=options.dtype)
    shard_model(whole, ranks.rank, ranks.world_size)
    model = TransformersModel(whole.to(device))
    config = RunnerConfig(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len or model.max_model_len,
        options.attention,
    )
    groups = model.kv_cache_groups(options.block_size)
    num_blocks = options.num_blocks or _choose_num_blocks(groups, ranks, device, config)
    return ModelRunner(model, KVCacheConfig(num_blocks, groups), config)


def _choose_num_blocks(groups: list[KVCacheGroupSpec], ranks: Ranks, device: Any, config: Any) -> int:
    """Enough for all sequences at their longest, or the most for which every rank has memory."""
    from kvpool.worker.memory.device_memory import num_blocks_that_fit

    needed = 1 + config.max_num_seqs * num_blocks_per_request(
        groups, config.max_model_len, config.max_num_batched_tokens
    )
    fitting = num_blocks_that_fit(groups, str(device), ranks.local_world_size)
    return ranks.minimum(needed if fitting is None else min(needed, fitting), device)


def _describe(runner: ModelRunner, ranks: Ranks) -> WorkerInfo:
    groups = runner.kv_cache_config.kv_cache_groups
    return WorkerInfo(
        rank=ranks.rank,
        world_size=ranks.world_size,
        num_blocks=runner.kv_cache_config.num_blocks,
        block_size=groups[0].kv_cache_spec.block_size,
        vocab_size=runner.model.vocab_size,
        max_model_len=runner.config.max_model_len,
        max_num_seqs=runner.config.max_num_seqs,
        max_num_batched_tokens=runner.config.max_num_batched_tokens,
        kv_cache_groups=[CacheGroupInfo.from_spec(group) for group in groups],
    )


def run_process() -> NoReturn:
    """The command as a process of its own. It ends without torch's clean-up: a thread of a process group that is gone
    may still run then, and C++ aborts the process for it."""
    try:
        app()
        code: object = 0
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else EXIT_FAILURE)


if __name__ == "__main__":
    run_process()
