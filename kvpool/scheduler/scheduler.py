"""Scheduler: which requests compute how many tokens in the next step, and in which blocks.

There is no model in it. A step is one round trip: ``schedule()`` says what to compute, the caller computes it and
samples, ``update_from_output()`` takes the tokens. A loop around it, with a model that continues any text with the
numbers that follow::

    from kvpool.backend import BlockHasher
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from kvpool.backend import Request
    from kvpool.scheduler import Scheduler, SchedulerConfig

    BLOCK_SIZE = 16
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(num_blocks=64, kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)])
    scheduler = Scheduler(KVCacheManager(config, max_model_len=512), SchedulerConfig(max_num_batched_tokens=128))
    hasher = BlockHasher("sha256", BLOCK_SIZE)
    system_prompt = list(range(100))
    for user in range(8):
        prompt = system_prompt + [1000 * user] * 20
        scheduler.add_request(Request(f"user {user}", prompt, hasher, max_tokens=60))

    texts, block_tables = {}, {}
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        for new in step.scheduled_new_requests:
            texts[new.request_id], block_tables[new.request_id] = new.prompt_token_ids, new.block_ids[0]
        cached = step.scheduled_cached_requests
        for request_id, resumed, block_ids in zip(cached.request_ids, cached.resumed, cached.new_block_ids):
            if resumed:
                block_tables[request_id] = block_ids[0]
            elif block_ids is not None:
                block_tables[request_id] += block_ids[0]
        # Here a model computes step.num_scheduled_tokens of each request, reading and writing block_tables.
        sampled = {request_id: [texts[request_id][-1] + 1] for request_id in step.sampled_request_ids}
        for output in scheduler.update_from_output(step, sampled):
            texts[output.request_id] += output.new_token_ids
    print(scheduler.make_stats())

Rules of a step, in the order in which they apply:

1. Requests that run go first, in the order of service: that of their admission, or with the policy "priority" the
   smallest (priority, arrival time) first. Each gets what is left of its known tokens: one to decode, more while its
   prompt is being computed; never more than the token budget of the step.
2. When blocks run out, the last of the running requests is preempted. Its blocks are freed, the last one first, and it
   goes back to the front of the waiting queue (to its place there, by priority). What the prefix cache still has of it
   is a hit when it resumes. A step that preempts admits nobody.
3. Waiting requests are admitted from the front while there is budget, a free seat (``max_num_seqs``) and room for the
   request beside the manager's watermark. The first that doesn't get in keeps the others out: nobody is overtaken for
   ever.

Every request ends: what would not fit into the empty cache at its full length is refused when it is added, and the
first in the order of service is never preempted, because then it would be alone, and fits.

Who is preempted has never been scheduled in the same step, as the order of service is also the order of scheduling.
That matters: blocks become findable when they are allocated, and those of a request that leaves the step would be
found, but never be computed. (vLLM schedules in the order of admission under either policy, and has this gap under
"priority".)

Steps may overlap: ``schedule()`` can be called again before the tokens of earlier steps are known; tokens come back in
the order of the steps. A request that was preempted or aborted meanwhile is taken care of. A scheduler is for one
thread at a time.

A step that fails is taken back by ``withdraw()``: its blocks were findable from the start, and nobody has computed
them. A call that is ended by an exception, also by Ctrl-C in the middle of it, has happened or has not. (Over the
native pool; the twin's calls can be interrupted half-way.) A scheduler owns its manager's blocks: what is left of an
interrupted call is found by counting, so that a reference of somebody else's to a block in use would be taken for one
that is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError
from kvpool.requests.status import RequestStatus
from kvpool.scheduler.check import check_scheduler
from kvpool.scheduler.config import SchedulerConfig
from kvpool.scheduler.in_flight import Admission, News, StepUnderWay, read_sampled_tokens
from kvpool.scheduler.mamba_split import MambaSplit
from kvpool.scheduler.output import BlockIds, RequestOutput, SchedulerOutput
from kvpool.scheduler.step import Step
from kvpool.scheduler.withdrawal import StepWithdrawal

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.kv_cache_manager import KVCacheBlocks, KVCacheManager

_FINISH_REASONS = {RequestStatus.FINISHED_STOPPED: "stop", RequestStatus.FINISHED_LENGTH_CAPPED: "length"}
_NO_ERRORS: Mapping[str, str] = {}


class Scheduler(StepWithdrawal):
    """Continuous batching over one KV cache manager (vLLM: the class of that name, without connectors, encoders,
    speculative tokens and structured output).

    Args:
        kv_cache_manager: owns the blocks; serves this scheduler alone.
        config: limits and policy.

    Attributes:
        requests: by id, all that were added and haven't finished.
        waiting: the queue of those that don't run, preempted ones included.
        running: those that do, in the order of service; the last one is the first to be preempted.
        steps_under_way: steps whose tokens are not known yet, oldest first.
        outputs: what ``update_from_output`` has not returned yet: empty, unless a call was interrupted.

    Raises:
        InvalidArgumentError: chunked prefill is off, and a step is too small for a sequence of ``max_model_len``; a
            cross-attention group, which would need encoder inputs.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        super().__init__(kv_cache_manager, config)
        self._mamba_split = None
        if MambaSplit.is_needed(kv_cache_manager):
            budget, threshold = self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold
            self._mamba_split = MambaSplit(kv_cache_manager, min(budget, threshold or budget))

    # ---- a step ----

    def schedule(self) -> SchedulerOutput:
        """Puts the next step together and takes the blocks for it.

        O(running requests + admitted requests + their blocks). Nothing to do is a step without tokens, which needs no
        ``update_from_output``. Where its tokens won't come, ``withdraw`` it. After an exception there is no step, but
        who was preempted for it waits.
        """
        self._settle()
        under_way = StepUnderWay(self._counts.of_steps())
        step = Step(self.config.max_num_batched_tokens, under_way)
        self._change = partial(self._take_back_planned, under_way)
        try:
            self.kv_cache_manager.new_step_starts()
            prefill_limit = self._prefill_limit()
            self._schedule_running(step, prefill_limit)
            if not step.has_preempted:
                self._schedule_waiting(step, prefill_limit)
            output = self._close(step)
            self._change = None
        except BaseException:
            self._settle()
            raise
        return output

    def _prefill_limit(self) -> int:
        """Tokens one request gets at most in this step, beside the budget."""
        threshold = self.config.long_prefill_token_threshold
        is_alone = len(self.running) + len(self.waiting) <= 1
        return self.config.max_num_batched_tokens if threshold == 0 or is_alone else threshold

    def _num_tokens(self, request: Request, num_computed_tokens: int, prefill_limit: int, step: Step) -> int:
        """How many tokens a request computes now, from ``num_computed_tokens`` on."""
        num_tokens = min(request.num_tokens - num_computed_tokens, prefill_limit, step.token_budget)
        if self._mamba_split is not None:
            num_tokens = self._mamba_split.clip(request, num_computed_tokens, num_tokens)
        return num_tokens

    def _schedule_running(self, step: Step, prefill_limit: int) -> None:
        running = self.running
        position = 0
        while position < len(running) and step.token_budget:
            num_decoding = self._num_decoding_from(position, step.token_budget)
            if num_decoding > 1 and not self._resent_ids and self._has_blocks_for_decode(num_decoding):
                self._schedule_decode(running[position : position + num_decoding], step)
                position += num_decoding
                continue
            end = position + max(num_decoding, 1)
            while position < min(end, len(running)):
                if not self._schedule_one(running[position], step, prefill_limit):
                    return
                position += 1

    def _num_decoding_from(self, position: int, token_budget: int) -> int:
        """How many running requests in a row, from that position on, have one token to compute."""
        num_decoding = 0
        for request in islice(self.running, position, position + token_budget):
            if request.num_tokens - request.num_computed_tokens != 1:
                break
            num_decoding += 1
        return num_decoding

    def _has_blocks_for_decode(self, num_requests: int) -> bool:
        """Whether that many requests get a token each without a preemption, even if all need a new block."""
        manager = self.kv_cache_manager
        return manager.get_num_free_blocks() >= num_requests * manager.num_kv_cache_groups

    def _schedule_decode(self, requests: list[Request], step: Step) -> None:
        """One token for each, in one call of the manager."""
        manager = self.kv_cache_manager
        nothing = manager.empty_kv_cache_blocks
        scheduled: list[Request] = []
        new_block_ids: list[BlockIds | None] = []
        step.under_way.touched = requests
        for request, blocks in zip(requests, manager.allocate_decode(requests)):
            if blocks is None:
                continue  # not when there are enough blocks; it waits for the next step
            scheduled.append(request)
            new_block_ids.append(None if blocks is nothing else blocks.get_block_ids(allow_none=True))
        step.add_decoding(scheduled, new_block_ids)

    def _schedule_one(self, request: Request, step: Step, prefill_limit: int) -> bool:
        """Schedules a running request, if need be at the expense of those behind it; False if it was preempted."""
        num_tokens = self._num_tokens(request, request.num_computed_tokens, prefill_limit, step)
        if num_tokens == 0:  # its next token is being sampled by a step under way, or a Mamba state is out of reach
            return True
        manager = self.kv_cache_manager
        step.under_way.touched = (request,)
        blocks = manager.allocate_slots(request, num_tokens)
        while blocks is None:
            step.has_preempted = True
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
            blocks = manager.allocate_slots(request, num_tokens)
        if request.request_id in self._resent_ids:
            step.add_resent(request, num_tokens, manager.get_block_ids(request.request_id))
        else:
            step.add_running(request, num_tokens, blocks.get_block_ids(allow_none=True))
        return True

    def _schedule_waiting(self, step: Step, prefill_limit: int) -> None:
        while self.waiting and step.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek_request()
            if request.num_in_flight_tokens:
                break  # preempted while a step was under way: its token has to come first, or it is sampled twice
            if not any(self._admit(request, *hit, step, prefill_limit) for hit in self._hits_to_try(request)):
                break

    def _hits_to_try(self, request: Request) -> Iterator[tuple[KVCacheBlocks, int]]:
        """The prefix hit, and after it none at all if nothing runs: a hit that ends inside a block needs a copy of it,
        one block more than a miss, which may be one too many for a request that fills the cache."""
        manager = self.kv_cache_manager
        blocks, num_hit_tokens, request.shared_prefix_boundary = manager.get_computed_blocks_and_boundary(request)
        yield blocks, num_hit_tokens
        if num_hit_tokens and not self.running:
            yield manager.empty_kv_cache_blocks, 0

    def _admit(self, request: Request, hit: KVCacheBlocks, num_hit_tokens: int, step: Step, prefill_limit: int) -> bool:
        """Moves the front of the queue to ``running`` if budget and blocks allow it."""
        manager = self.kv_cache_manager
        num_tokens = self._num_tokens(request, num_hit_tokens, prefill_limit, step)
        is_cut = step.token_budget < min(request.num_tokens - num_hit_tokens, prefill_limit)
        if num_tokens == 0 or (is_cut and not self.config.enable_chunked_prefill):
            return False
        is_resumed = request.num_preemptions > 0
        is_new = not is_resumed or request.request_id in self._introduced_ids
        admission = Admission(request, request.status, num_hit_tokens, request.num_preemptions, is_new)
        admitted = step.under_way.admitted
        admitted.append(admission)
        new_blocks = manager.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=hit,
            full_sequence_must_fit=self.config.reserve_full_sequence,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            admitted.pop()
            return False
        manager.record_prefix_cache_stats(request, num_hit_tokens)
        self._counts.add_lookup(request.num_tokens, num_hit_tokens, is_resumed=is_resumed)
        self._move_to_running(request, num_hit_tokens)
        step.add_admitted(request, num_tokens, manager.get_block_ids(request.request_id), is_new=is_new)
        return True

    def _close(self, step: Step) -> SchedulerOutput:
        """Makes the output, then counts the step's tokens as computed."""
        under_way = step.under_way
        new, cached = step.new_request_data(), step.cached_request_data()
        under_way.number = self._step_number = self._step_number + 1
        under_way.num_tokens = list(step.num_scheduled_tokens.values())
        news = under_way.news = self._news
        self._news = News()
        # Where all ran before, the message has the counts already.
        under_way.num_computed_tokens = (
            [request.num_computed_tokens for request in under_way.requests]
            if step.new or step.resumed
            else list(cached.num_computed_tokens)
        )
        sampled_request_ids = self._start_computing(step)
        # Noted before they are taken: an interrupt in between would leave them with hashes that nobody knows of.
        under_way.copied_block_ids = self.kv_cache_manager.find_copy_target_ids()
        copies = self._take_block_copies()
        output = SchedulerOutput(
            step=self._step_number,
            scheduled_new_requests=new,
            scheduled_cached_requests=cached,
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.token_budget,
            sampled_request_ids=sampled_request_ids,
            finished_request_ids=list(news.finished_request_ids),
            preempted_request_ids=list(news.preempted_request_ids),
            new_block_ids_to_zero=self.kv_cache_manager.take_new_block_ids(),
            block_copies=copies,
        )
        if self._resent_ids or self._introduced_ids:
            self._note_told(step)
        if under_way.requests:
            self.steps_under_way.append(under_way)
        return output

    def _note_told(self, step: Step) -> None:
        """Workers know again what a withdrawn step had left in doubt."""
        under_way = step.under_way
        under_way.resent_ids = [request.request_id for request in step.resent]
        under_way.introduced_ids = [
            request.request_id for request in step.new if request.request_id in self._introduced_ids
        ]
        self._resent_ids.difference_update(under_way.resent_ids)
        self._introduced_ids.difference_update(under_way.introduced_ids)

    def _take_block_copies(self) -> list[tuple[int, int]]:
        """Copies to make before the step. Both ends go back to the pool at once: who gets them writes in a later step,
        after the copy."""
        copies, retained_blocks = self.kv_cache_manager.take_kv_cache_block_copies()
        if retained_blocks:
            self.kv_cache_manager.free_copied_blocks(retained_blocks)
        return [(copy.src_block_id, copy.dst_block_id) for copy in copies]

    def _start_computing(self, step: Step) -> list[str]:
        """Counts the scheduled tokens as computed and under way; returns the ids of the requests to sample."""
        under_way = step.under_way
        requests, num_scheduled, is_sampled = under_way.requests, under_way.num_tokens, under_way.is_sampled
        for request, num_tokens in zip(requests, num_scheduled):
            num_computed_tokens = request.num_computed_tokens + num_tokens
            request.num_computed_tokens = num_computed_tokens
            request.num_in_flight_tokens += num_tokens
            is_sampled.append(num_computed_tokens == request.num_tokens)
        if num_scheduled:
            self._counts.steps += 1
            self._counts.scheduled_tokens += sum(num_scheduled)
        return list(compress(step.num_scheduled_tokens, is_sampled))

    # ---- its tokens ----

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Mapping[str, Iterable[int]],
        errors: Mapping[str, str] = _NO_ERRORS,
    ) -> list[RequestOutput]:
        """Takes the tokens of a step; requests that stop finish, and their blocks are free. O(requests of the step).

        Args:
            scheduler_output: the oldest step whose tokens are not known yet, as ``schedule()`` returned it or a decoded
                copy.
            sampled_token_ids: by request id, for ``sampled_request_ids``; one token each, or more if the caller knows
                what follows (they are computed in the next steps). Nothing is needed for requests that were aborted
                meanwhile.
            errors: by request id, why a request of the step could not be computed. It ends with this text; cached
                blocks that it alone uses can't be hit any more, as nobody knows what is in them.

        Returns:
            The new tokens of each request, in the order of the step; before them those of a call that was interrupted
            after it had taken its tokens.

        Raises:
            InvalidArgumentError: another step is the oldest; a token is missing, superfluous, below 0 or above
                ``MAX_TOKEN_ID``.
            TypeError: a token is no int. After an error, also one of a hasher, nothing has changed.
        """
        self.take_tokens(scheduler_output, sampled_token_ids, errors)
        outputs = self.outputs
        self.outputs = []
        return outputs

    def take_tokens(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Mapping[str, Iterable[int]],
        errors: Mapping[str, str] = _NO_ERRORS,
    ) -> None:
        """``update_from_output`` that leaves what it has to say in ``outputs``: for callers that Ctrl-C must not cost a
        token, which it may do while a returned list is on its way."""
        self._settle()
        if not scheduler_output.num_scheduled_tokens:
            return
        if not self.steps_under_way or self.steps_under_way[0].number != scheduler_output.step:
            oldest = f"the oldest is {self.steps_under_way[0].number}" if self.steps_under_way else "none is under way"
            raise InvalidArgumentError(f"the tokens of step {scheduler_output.step} are not due: {oldest}")
        step = self.steps_under_way[0]
        tokens = read_sampled_tokens(step, self.requests, sampled_token_ids, errors)
        outputs = self.outputs
        ended: list[tuple[Request, RequestStatus]] = []
        self._change = partial(self._take_back_tokens_of, step, len(outputs))
        try:
            self.steps_under_way.popleft()
            for request, num_tokens, token_ids in zip(step.requests, step.num_tokens, tokens):
                request.num_in_flight_tokens -= num_tokens
                if token_ids is None:
                    continue
                status = self._cut_at_end(request, token_ids)
                request.append_output_token_ids(token_ids[0] if len(token_ids) == 1 else token_ids)
                output = RequestOutput(request.request_id, token_ids)
                outputs.append(output)
                if status is not None:
                    ended.append((request, status))
                    output.finish_reason = _FINISH_REASONS[status]
                    output.stop_token_id = token_ids[-1] if status is RequestStatus.FINISHED_STOPPED else None
            self._last_taken_step = step.number
            if errors:
                self._fail(step, errors, ended)
            if ended:
                self._end(ended)
            self._change = None
        except BaseException:
            self._settle()
            raise

    def _fail(
        self,
        step: StepUnderWay,
        errors: Mapping[str, str],
        ended: list[tuple[Request, RequestStatus]],
    ) -> None:
        """Adds to the ended requests, and to the outputs, those that could not be computed."""
        for request in step.requests:
            error = errors.get(request.request_id)
            if error is not None and self.requests.get(request.request_id) is request:
                ended.append((request, RequestStatus.FINISHED_ERROR))
                self.outputs.append(RequestOutput(request.request_id, [], finish_reason="error", error=error))

    def _take_back_tokens_of(self, step: StepUnderWay, num_outputs: int) -> None:
        """As if the step's tokens had not come."""
        self._last_taken_step = step.number - 1
        del self.outputs[num_outputs:]
        if not self.steps_under_way or self.steps_under_way[0] is not step:
            self.steps_under_way.appendleft(step)
        counts = step.num_computed_tokens or ()
        for request, num_computed_tokens, num_tokens, is_sampled in zip(
            step.requests, counts, step.num_tokens, step.is_sampled
        ):
            if is_sampled and self.requests.get(request.request_id) is request:
                request.truncate(num_computed_tokens + num_tokens)  # it was sampled after all of its tokens
        self._count_in_flight(step.requests)

    def _cut_at_end(self, request: Request, token_ids: list[int]) -> RequestStatus | None:
        """Drops new tokens that come after the last one of the request; the status it ends with, or None."""
        stop_token_ids = self._stop_token_ids.get(request.request_id, self.config.stop_token_ids)
        if stop_token_ids and not stop_token_ids.isdisjoint(token_ids):
            position = next(i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids)
            if position < self._room(request):
                del token_ids[position + 1 :]
                return RequestStatus.FINISHED_STOPPED
        room = self._room(request)
        if len(token_ids) < room:
            return None
        del token_ids[room:]
        return RequestStatus.FINISHED_LENGTH_CAPPED

    def _room(self, request: Request) -> int:
        """Tokens that the request may still get."""
        by_request = request.max_tokens - request.num_output_tokens
        by_model = self.max_model_len - request.num_tokens
        return by_request if by_request < by_model else by_model

    def check(self) -> None:
        """Recomputes the invariants of the scheduler, the block tables and the pool. O(requests + blocks of the pool).

        Raises:
            InvariantError: with the reason.
        """
        self._settle()
        check_scheduler(self)
