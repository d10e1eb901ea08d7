"""A model, its cache and an engine around them, for one run of prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec, ceil_div
from kvpool.engine.model_source import ModelSource
from kvpool.engine.prompts import encode_prompts
from kvpool.engine.report import GenerateReport
from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from kvpool.worker.executor import Executor
    from kvpool.worker.models.pretrained import ModelFacts
    from kvpool.worker.models.transformers_model import TransformersModel

START_SECONDS = 600.0
"""Until workers have loaded the model and reported."""

STEP_SECONDS = 300.0
"""Until workers have answered a step."""

OnTokens = Callable[[int, list[int], bool], None]


@dataclass(frozen=True)
class GenerateSettings:
    """Limits and options of a run.

    Attributes:
        block_size: tokens per block.
        num_blocks: of the pool, the null block included; None: what all prompts need at once, as far as memory goes.
        max_num_batched_tokens, max_num_seqs: tokens and requests of a step.
        max_new_tokens: per prompt.
        dtype, device: of weights and cache.
        attention: backend, see ``kvpool.worker.attention``; None for the best that is here.
        tensor_parallel: ranks.
        enable_prefix_caching: share and keep prefixes.
        ignore_eos: generate on behind the model's end of sequence.
        sampling_params: of all prompts.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_new_tokens: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    attention: str | None = None
    tensor_parallel: int = 1
    enable_prefix_caching: bool = True
    ignore_eos: bool = False
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


def num_blocks_needed(prompts: Sequence[Sequence[int]], settings: GenerateSettings, num_groups: int) -> int:
    """Blocks with which as many prompts run as may, without shared prefixes; the null block included."""
    longest = sorted(map(len, prompts), reverse=True)[: settings.max_num_seqs]
    blocks = [ceil_div(length + settings.max_new_tokens, settings.block_size) for length in longest]
    return 1 + num_groups * sum(blocks)


class GenerateSession:
    """Loads a model, makes the cache, and generates. A context manager: what it has started ends with it.

    With several ranks the model is in workers on this machine, and this process schedules.

    Args:
        source: the model.
        texts: prompts as texts or token ids.
        settings: limits and options.

    Attributes:
        tokenizer: the model's.
        prompts: token ids of each prompt.
        num_blocks: of the pool, the null block included.
        description: where the model runs and how, for the user.

    Raises:
        InvalidArgumentError: a prompt that is empty or too long, or outside of the vocabulary; a model that isn't
            supported; too few blocks.
        MemoryError: the cache doesn't fit.
    """

    def __init__(self, source: ModelSource, texts: Sequence[str | list[int]], settings: GenerateSettings) -> None:
        from kvpool.worker.models.tokenizer import load_tokenizer

        self.settings, self._source = settings, source
        self.tokenizer = load_tokenizer(source.path)
        self._model: TransformersModel | None = None  # where it is in this process
        self._exit_stack = ExitStack()
        try:
            self._start(texts)
        except BaseException:
            self._exit_stack.__exit__(*sys.exc_info())
            raise

    def _start(self, texts: Sequence[str | list[int]]) -> None:
        from kvpool.engine.engine import Engine
        from kvpool.worker.models.transformers_model import read_model_facts

        settings, facts = self.settings, read_model_facts(self._source.path)
        self.prompts = encode_prompts(texts, self.tokenizer, facts.vocab_size)
        self.stop_token_ids = [] if settings.ignore_eos else self._end_tokens(facts)
        max_model_len = max(map(len, self.prompts)) + settings.max_new_tokens
        if max_model_len > facts.max_model_len:
            raise InvalidArgumentError(
                f"a prompt of {max_model_len - settings.max_new_tokens} tokens and {settings.max_new_tokens} new ones: "
                f"the model has room for {facts.max_model_len}"
            )
        executor, config = self._start_model(max_model_len)
        self.num_blocks = config.num_blocks
        self.engine = Engine(
            config,
            executor,
            max_model_len=max_model_len,
            scheduler_config=SchedulerConfig(settings.max_num_batched_tokens, settings.max_num_seqs),
            enable_caching=settings.enable_prefix_caching,
        )

    def _end_tokens(self, facts: ModelFacts) -> list[int]:
        """Tokens that end a text, wherever the model or its tokenizer says so."""
        of_tokenizer = [token_id for token_id in self.tokenizer.eos_token_ids if token_id < facts.vocab_size]
        return list(dict.fromkeys(facts.eos_token_ids + of_tokenizer))

    @property
    def max_tokens(self) -> int:
        """New tokens of all prompts together, if none ends early."""
        return len(self.prompts) * self.settings.max_new_tokens

    def __enter__(self) -> GenerateSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # With the error, if there is one: workers are then ended at once.
        self._exit_stack.__exit__(kind, error, traceback)

    def run(self, on_tokens: OnTokens = lambda prompt, token_ids, is_last: None) -> GenerateReport:
        """Generates for all prompts at once, as they fit.

        Args:
            on_tokens: called with the prompt's number, its new tokens, and whether they are its last.

        Returns:
            What was generated; why a prompt could not be computed to its end, where the others were.

        After an exception, of ``on_tokens`` or by Ctrl-C, nothing is queued any more.
        """
        engine, settings = self.engine, self.settings
        ids = [
            engine.add_request(
                prompt,
                max_tokens=settings.max_new_tokens,
                sampling_params=settings.sampling_params,
                stop_token_ids=self.stop_token_ids,
            )
            for prompt in self.prompts
        ]
        number_of = {request_id: number for number, request_id in enumerate(ids)}
        tokens: list[list[int]] = [[] for _ in ids]
        first_token_seconds = [0.0] * len(ids)
        num_hit_tokens = [0] * len(ids)
        errors: dict[int, str] = {}
        start = time.perf_counter()
        try:
            while engine.scheduler.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter() - start
                for output in outputs:
                    number = number_of[output.request_id]
                    if not tokens[number]:
                        first_token_seconds[number] = now
                    tokens[number] += output.new_token_ids
                    num_hit_tokens[number] = output.num_cached_tokens
                    if output.error is not None:
                        errors[number] = output.error
                    on_tokens(number, output.new_token_ids, output.finish_reason is not None)
        except BaseException:
            engine.scheduler.finish_requests(None)
            raise
        seconds = time.perf_counter() - start
        stats, manager = engine.scheduler.make_stats(), engine.scheduler.kv_cache_manager
        return GenerateReport(
            tokens=tokens,
            num_prompt_tokens=[len(prompt) for prompt in self.prompts],
            num_hit_tokens=num_hit_tokens,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            num_blocks=manager.kv_cache_config.num_blocks,
            num_free_blocks=manager.get_num_free_blocks(),
            seconds=seconds,
            first_token_seconds=first_token_seconds,
            errors=errors,
        )

    def compare_with_transformers(self, report: GenerateReport) -> None:
        """Has transformers generate the same, greedily, and enters into the report whether it does."""
        from kvpool.worker.models.transformers_generate import generate_greedily
        from kvpool.worker.models.transformers_model import TransformersModel

        settings = self.settings
        model = self._model or TransformersModel.load(self._source.path, dtype=settings.dtype, device=settings.device)
        with model.own_attention() as own_model:
            expected = generate_greedily(own_model, self.prompts, settings.max_new_tokens, self.stop_token_ids)
        report.compare(expected)

    # ---- where the model runs ----

    def _start_model(self, max_model_len: int) -> tuple[Executor, KVCacheConfig]:
        if self.settings.tensor_parallel > 1:
            return self._start_workers(max_model_len)
        from kvpool.worker.model_runner import ModelRunner, RunnerConfig
        from kvpool.worker.models.transformers_model import TransformersModel

        settings = self.settings
        model = TransformersModel.load(self._source.path, dtype=settings.dtype, device=settings.device)
        self._model = model
        groups = model.kv_cache_groups(settings.block_size)
        config = KVCacheConfig(self._choose_num_blocks(groups), groups)
        limits = RunnerConfig(settings.max_num_seqs, settings.max_num_batched_tokens, max_model_len, settings.attention)
        runner = ModelRunner(model, config, limits)
        self._exit_stack.callback(runner.close)
        self.description = f"{settings.dtype} on {settings.device}, attention: {runner.backend.name}"
        return runner, config

    def _choose_num_blocks(self, groups: list[KVCacheGroupSpec]) -> int:
        """As many as were asked for, else as the prompts need or the memory has room for."""
        from kvpool.worker.memory.device_memory import num_blocks_that_fit

        if self.settings.num_blocks is not None:
            return self.settings.num_blocks
        needed = num_blocks_needed(self.prompts, self.settings, len(groups))
        fitting = num_blocks_that_fit(groups, self.settings.device, self.settings.tensor_parallel)
        return needed if fitting is None else min(needed, fitting)

    def _start_workers(self, max_model_len: int) -> tuple[Executor, KVCacheConfig]:
        from kvpool.worker.models.transformers_model import read_kv_cache_groups
        from kvpool.worker.transport.broadcaster import Broadcaster
        from kvpool.worker.transport.local_workers import LocalWorkers
        from kvpool.worker.transport.scratch_folder import scratch_folder

        settings = self.settings
        # Before any worker loads the model: what can't be divided is known without its weights.
        ranks = settings.tensor_parallel
        groups = read_kv_cache_groups(self._source.path, settings.block_size, settings.dtype, ranks)
        scratch = self._exit_stack.enter_context(scratch_folder())
        arguments = {
            "address": f"ipc://{scratch}/scheduler",
            "model": self._source.path,
            "num-blocks": self._choose_num_blocks(groups),
            "block-size": settings.block_size,
            "dtype": settings.dtype,
            "device": settings.device,
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
            "max-model-len": max_model_len,
            **({"attention": settings.attention} if settings.attention else {}),
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        workers = self._exit_stack.enter_context(LocalWorkers(ranks, words))
        broadcaster = Broadcaster(
            str(arguments["address"]),
            ranks,
            timeout_seconds=STEP_SECONDS,
            check_workers=workers.check,
        )
        self._exit_stack.callback(broadcaster.close)
        info = broadcaster.wait_for_workers(START_SECONDS)
        self.description = f"{settings.dtype} on {settings.device}, heads on {ranks} ranks"
        return broadcaster, info.kv_cache_config()
