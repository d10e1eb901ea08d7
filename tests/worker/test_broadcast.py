"""Scheduler and workers over ZeroMQ, with threads as workers: agreement, errors, lost and late ranks, old answers."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import BACKEND_NAMES
from scheduler_runs import BLOCK_SIZE, STACKS, Workers, full_attention, generated, make_scheduler, sliding_window

from kvpool.cache.spec import KVCacheGroupSpec, MambaSpec
from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.requests.status import RequestStatus
from kvpool.scheduler import SchedulerOutput, StepResult

zmq = pytest.importorskip("zmq")

from broadcast_workers import (  # noqa: E402
    NUM_BLOCKS,
    SHORT,
    TIMEOUT,
    Relay,
    ThreadWorker,
    answer_with,
    fail_in_step,
    make_info,
    make_step,
    raw_socket,
)
from table_digests import TableDigests  # noqa: E402

from kvpool.worker.transport import broadcaster as broadcast  # noqa: E402
from kvpool.worker.transport import connection, link, messages  # noqa: E402
from kvpool.worker.transport.broadcaster import Broadcaster, WorkerConnection  # noqa: E402
from kvpool.worker.transport.errors import (  # noqa: E402
    BroadcasterStateError,
    SchedulerLostError,
    WorkerError,
    WorkerLostError,
    WorkerMismatchError,
    WorkerRefusedError,
    WorkerTimeoutError,
)
from kvpool.worker.transport.messages import CacheGroupInfo, FromWorker, StepMessage, ToWorker, WorkerInfo  # noqa: E402

pytestmark = pytest.mark.dataplane

STACK = BACKEND_NAMES[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short enough for the path of a socket
        yield Path(name)


@pytest.fixture
def address(folder: Path) -> str:
    return f"ipc://{folder}/s"


@pytest.fixture
def bind(address: str) -> Iterator[Callable[..., Broadcaster]]:
    """Makes broadcasters, and closes them."""
    made: list[Broadcaster] = []

    def make(world_size: int, where: str = address, timeout_seconds: float = TIMEOUT, **options: Any) -> Broadcaster:
        made.append(Broadcaster(where, world_size, timeout_seconds=timeout_seconds, **options))
        return made[-1]

    yield make
    for broadcaster in made:
        broadcaster.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without a connection is lost soon."""
    for module in (broadcast, connection):
        monkeypatch.setattr(module, "RECONNECT_SECONDS", SHORT)
        monkeypatch.setattr(module, "_POLL_SECONDS", SHORT / 6)


# ---- all goes well ----


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_all_ranks_get_each_step_and_the_tokens_of_rank_0_come_back(
    transport: str, address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(3, address if transport == "ipc" else "tcp://127.0.0.1:*")
    if transport == "tcp":
        assert broadcaster.address.startswith("tcp://127.0.0.1:") and not broadcaster.address.endswith("*")
    workers = [ThreadWorker(broadcaster.address, rank, 3) for rank in (2, 0, 1)]
    info = broadcaster.wait_for_workers()
    assert info == make_info(0, 3) and broadcaster.num_blocks == NUM_BLOCKS
    assert broadcaster.wait_for_workers() is info
    steps = [make_step(1, [1, 2]), make_step(2), make_step(3)]
    assert [broadcaster.execute(step).tokens for step in steps] == [{"r": [0]}] * 3
    broadcaster.close()
    for worker in workers:
        assert worker.end() is None
        assert worker.seen == steps


def test_a_schedule_with_preemptions_runs_on_workers(bind: Callable[..., Broadcaster], address: str) -> None:
    """The made-up workers fail where a request would read somebody else's tokens."""
    num_blocks = 12
    scheduler = make_scheduler(STACK, num_blocks, max_num_batched_tokens=20)
    hasher = STACKS[STACK].BlockHasher("sha256", BLOCK_SIZE)

    def make_execute() -> Callable[[SchedulerOutput], dict[str, list[int]]]:
        made_up = Workers([full_attention()])
        return lambda output: made_up.execute(msgspec.msgpack.encode(output))

    broadcaster = bind(2)
    workers = [ThreadWorker(address, rank, 2, make_execute(), num_blocks=num_blocks) for rank in range(2)]
    broadcaster.wait_for_workers()
    prompts = {str(user): [1, 2, 3, 4, 5, 6, user, user] for user in range(6)}
    for request_id, prompt in prompts.items():
        scheduler.add_request(STACKS[STACK].Request(request_id, prompt, hasher, max_tokens=12))
    texts: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while scheduler.has_requests():
        output = scheduler.schedule()
        for result in scheduler.update_from_output(output, broadcaster.execute(output).tokens):
            texts[result.request_id] += result.new_token_ids
    assert texts == {request_id: generated(prompt, 12) for request_id, prompt in prompts.items()}
    assert scheduler.make_stats().num_preemptions > 0
    broadcaster.close()
    assert [worker.end() for worker in workers] == [None, None]
    assert workers[0].seen == workers[1].seen


def test_workers_may_be_there_first(address: str, bind: Callable[..., Broadcaster]) -> None:
    ThreadWorker(address, 0)
    time.sleep(SHORT)
    broadcaster = bind(1)
    broadcaster.wait_for_workers()
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}


def test_nothing_is_left_behind(folder: Path, address: str) -> None:
    def num_open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    for turn in range(4):
        with Broadcaster(address, 1, timeout_seconds=TIMEOUT) as broadcaster:
            worker = ThreadWorker(address, 0)
            broadcaster.wait_for_workers()
            broadcaster.execute(make_step(1, [1]))
            assert os.listdir(folder) == ["s"]
        assert worker.end() is None
        broadcaster.close()
        assert os.listdir(folder) == []
        if turn == 0:
            before, num_threads = num_open_files(), threading.active_count()
    assert (num_open_files(), threading.active_count()) == (before, num_threads)


def test_messages_survive_the_wire() -> None:
    step = make_step(1, [5, 6], ("a", "b"))
    step.scheduled_new_requests[0].sampling_params = SamplingParams(0.5, 3, 0.9, 7)
    step.block_copies.append((1, 2))
    sent: list[Any] = [
        StepMessage(9, step),
        messages.Welcome(),
        messages.Refusal("y"),
        messages.Shutdown(),
        make_info(1, 2),
        messages.WorkerReturn(8),
        messages.StepAnswer(9, [2**32 - 1, 0], {"a": [1]}),
        messages.WorkerFailure(1, "text", "traceback"),
    ]
    for message in sent:
        kinds = ToWorker if isinstance(message, ToWorker) else FromWorker
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kinds) == message


def test_kv_cache_groups_survive_the_wire() -> None:
    groups = [
        KVCacheGroupSpec(["a", "b"], full_attention()),
        KVCacheGroupSpec(["c"], sliding_window(9)),
    ]
    info = make_info(0, 1, kv_cache_groups=[CacheGroupInfo.from_spec(group) for group in groups])
    assert info.num_kv_cache_groups == 2
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=WorkerInfo).kv_cache_config()
    assert config.kv_cache_groups == groups and config.num_blocks == NUM_BLOCKS
    mamba = MambaSpec(block_size=4, shapes=((8,),), dtypes=("float32",))
    padded = full_attention().__class__(
        block_size=4, num_kv_heads=1, head_size=8, dtype="float32", page_size_padded=512
    )
    for spec in (mamba, padded):
        with pytest.raises(InvalidArgumentError, match="can't report"):
            CacheGroupInfo.from_spec(KVCacheGroupSpec(["d"], spec))


# ---- the workers come ----


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_blocks": 19}, "num_blocks (rank 0: 20, rank 1: 19)"),
        ({"block_size": 8}, "block_size (rank 0: 4, rank 1: 8)"),
        ({"vocab_size": 51}, "vocab_size (rank 0: 50, rank 1: 51)"),
        ({"version": "0.0.0"}, "version (rank 0: "),
        ({"max_model_len": 100}, "max_model_len (rank 0: 200, rank 1: 100)"),
        ({"kv_cache_groups": [CacheGroupInfo(["layer"], 4, 2, 8, "float32")]}, "kv_cache_groups (rank 0: "),
        ({"world_size": 3}, "world_size is 3 for rank 1, and 2 for the scheduler"),
    ],
)
def test_ranks_that_differ_are_refused(
    changes: dict[str, Any], told: str, address: str, bind: Callable[..., Broadcaster], impatient: None
) -> None:
    broadcaster = bind(2)
    worker = ThreadWorker(address, 0, 2)
    other = ThreadWorker(address, 1, **{"world_size": 2, **changes})
    with pytest.raises(WorkerMismatchError) as raised:
        broadcaster.wait_for_workers()
    assert told in str(raised.value)
    broadcaster.close()
    assert isinstance(other.end(), WorkerRefusedError) and told in str(other.error)
    assert isinstance(worker.end(), (WorkerRefusedError, SchedulerLostError))
    with pytest.raises(BroadcasterStateError):
        broadcaster.wait_for_workers()


def test_a_worker_of_another_version_alone_is_refused(address: str, bind: Callable[..., Broadcaster]) -> None:
    worker = ThreadWorker(address, 0, version="0.0.0")
    with pytest.raises(WorkerMismatchError, match=r"version .*'0\.0\.0'"):
        bind(1).wait_for_workers()
    assert isinstance(worker.end(), WorkerRefusedError)


def test_a_second_worker_of_a_rank_and_an_unknown_rank_are_refused(
    address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(2)
    first = ThreadWorker(address, 0, 2)
    with pytest.raises(WorkerTimeoutError, match="rank 1 of 2 did not report"):
        broadcaster.wait_for_workers(SHORT)
    second, unknown = ThreadWorker(address, 0, 2), ThreadWorker(address, 5, 2)
    with pytest.raises(WorkerTimeoutError) as raised:
        broadcaster.wait_for_workers(2 * SHORT)
    assert raised.value.ranks == [1]
    assert "there is a worker of rank 0 already" in str(raised.value) and "there is no rank 5" in str(raised.value)
    assert isinstance(second.end(), WorkerRefusedError) and "a worker of rank 0 already" in str(second.error)
    assert isinstance(unknown.end(), WorkerRefusedError) and "no rank 5, but 0 to 1" in str(unknown.error)
    ThreadWorker(address, 1, 2)
    broadcaster.wait_for_workers()
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    assert first.is_alive()


def test_a_worker_that_went_away_before_all_were_there_may_be_replaced(
    address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(2)
    gone = ThreadWorker(address, 0, 2, timeout_seconds=SHORT)
    with pytest.raises(WorkerTimeoutError):
        broadcaster.wait_for_workers(SHORT / 2)
    assert isinstance(gone.end(), SchedulerLostError) and "has not got all its workers" in str(gone.error)
    for rank in range(2):
        ThreadWorker(address, rank, 2)
    broadcaster.wait_for_workers()
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}


def test_missing_ranks_are_named(bind: Callable[..., Broadcaster], address: str) -> None:
    ThreadWorker(address, 1, 4)
    with pytest.raises(WorkerTimeoutError, match=r"ranks 0, 2, 3 of 4 did not report to .* within 0\.3 s") as raised:
        bind(4).wait_for_workers(SHORT)
    assert raised.value.ranks == [0, 2, 3]


def test_a_worker_without_a_scheduler_ends(address: str) -> None:
    worker = ThreadWorker(address, 0, timeout_seconds=SHORT)
    assert isinstance(worker.end(), SchedulerLostError)
    assert "can't be reached within 0.3 s (rank 0)" in str(worker.error)


def test_a_worker_that_can_not_start_is_told_at_once(address: str, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(2)
    waiting = ThreadWorker(address, 0, 2)
    with WorkerConnection(address, 1) as failing:
        failing.report_failure(InvalidArgumentError("9 heads"))
    with pytest.raises(WorkerError, match=r"rank 1 can't start: .*InvalidArgumentError: 9 heads") as raised:
        broadcaster.wait_for_workers()
    assert raised.value.rank == 1
    broadcaster.close()
    assert isinstance(waiting.end(), SchedulerLostError)


def test_waiting_ends_when_the_caller_knows_better(bind: Callable[..., Broadcaster]) -> None:
    def check() -> None:
        raise RuntimeError("torchrun has ended")

    broadcaster = bind(1, check_workers=check)
    with pytest.raises(RuntimeError, match="torchrun has ended"):
        broadcaster.wait_for_workers()
    with pytest.raises(BroadcasterStateError, match="torchrun has ended"):
        broadcaster.wait_for_workers()


def test_calls_out_of_order(address: str, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    for call in (lambda: broadcaster.execute(make_step(1)), lambda: broadcaster.num_blocks):
        with pytest.raises(BroadcasterStateError, match="wait_for_workers first"):
            call()
    broadcaster.close()
    with pytest.raises(BroadcasterStateError, match="is closed"):
        broadcaster.execute(make_step(1))
    with WorkerConnection(address, 0) as worker:
        with pytest.raises(InvalidArgumentError, match="say_hello comes before"):
            worker.serve(answer_with(0), TableDigests().apply)
        with pytest.raises(InvalidArgumentError, match="rank 1 from the worker of rank 0"):
            worker.say_hello(make_info(1, 2))


@pytest.mark.parametrize(
    "wrong",
    ["", "s", "udp://host:1", "ipc://", "ipc://*", "tcp://host", "tcp://:5", "tcp://host:x", "tcp://host:65536"],
)
def test_wrong_addresses_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError, match="address is"):
        Broadcaster(wrong, 1)
    with pytest.raises(InvalidArgumentError, match="address is"):
        WorkerConnection(wrong, 0)


def test_addresses_that_can_not_be_used(address: str, folder: Path, bind: Callable[..., Broadcaster]) -> None:
    bind(1)
    with pytest.raises(InvalidArgumentError, match="another scheduler listens at 'ipc://"):
        Broadcaster(address, 1)
    taken = bind(1, "tcp://127.0.0.1:*").address
    with pytest.raises(InvalidArgumentError, match=f"can't bind '{taken}'"):
        Broadcaster(taken, 1)
    with pytest.raises(InvalidArgumentError, match="can't bind"):
        Broadcaster(f"ipc://{folder}/{'x' * 200}", 1)
    for wildcard in ("tcp://127.0.0.1:*", "tcp://*:5555", "tcp://127.0.0.1:0"):
        with pytest.raises(InvalidArgumentError, match="no place to connect to"):
            WorkerConnection(wildcard, 0)
    assert bind(1, "tcp://localhost:*").address.rpartition(":")[0] in ("tcp://127.0.0.1", "tcp://[::1]")


@pytest.mark.parametrize("options", [{"world_size": 0}, {"world_size": 1, "timeout_seconds": 0}])
def test_wrong_sizes_are_refused(options: dict[str, Any], address: str, folder: Path) -> None:
    with pytest.raises(InvalidArgumentError):
        Broadcaster(address, **options)
    assert os.listdir(folder) == []


def test_the_file_of_a_scheduler_that_was_killed_is_no_obstacle(address: str, bind: Callable[..., Broadcaster]) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.removeprefix("ipc://"))
    ThreadWorker(address, 0)
    bind(1).wait_for_workers()


# ---- steps that fail ----


def test_an_exception_of_a_worker_reaches_the_scheduler(address: str, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(3)
    error = ZeroDivisionError("by\nzero")
    workers = [ThreadWorker(address, rank, 3, fail_in_step(2, error) if rank == 1 else None) for rank in range(3)]
    broadcaster.wait_for_workers()
    broadcaster.execute(make_step(1, [1]))
    with pytest.raises(WorkerError, match=r"^step 2: rank 1 failed: ZeroDivisionError: by zero$") as raised:
        broadcaster.execute(make_step(2))
    assert raised.value.rank == 1 and "in execute" in raised.value.remote_traceback
    with pytest.raises(BroadcasterStateError, match="rank 1 failed: ZeroDivisionError"):
        broadcaster.execute(make_step(3))
    broadcaster.close()
    assert [worker.end() for worker in workers] == [None, error, None]


def test_errors_of_rank_0_come_with_its_tokens(address: str, bind: Callable[..., Broadcaster]) -> None:
    workers = [
        ThreadWorker(
            address, rank, 2, lambda output, rank=rank: StepResult({"a": [rank]}, {"b": f"error of rank {rank}"})
        )
        for rank in range(2)
    ]
    broadcaster = bind(2)
    broadcaster.wait_for_workers()
    step = make_step(1, [1], ("a", "b"))
    assert broadcaster.execute(step) == StepResult({"a": [0]}, {"b": "error of rank 0"})
    broadcaster.close()
    assert [worker.end() for worker in workers] == [None, None]


@pytest.mark.parametrize(
    "result",
    [
        StepResult({}),
        StepResult({"r": [1], "other": [2]}),
        StepResult({"r": [1]}, {"other": "an error"}),
        StepResult({"r": [1]}, {"r": "an error"}),
    ],
)
def test_results_of_other_requests_are_refused(
    result: StepResult, address: str, bind: Callable[..., Broadcaster]
) -> None:
    ThreadWorker(address, 0, 1, lambda output: result)
    broadcaster = bind(1)
    broadcaster.wait_for_workers()
    with pytest.raises(WorkerError, match="rank 0 sent no tokens, or not those asked for"):
        broadcaster.execute(make_step(1, [1]))


def test_tokens_that_can_not_be_sent_are_an_error_of_the_worker(address: str, bind: Callable[..., Broadcaster]) -> None:
    worker = ThreadWorker(address, 0, 1, lambda output: {"r": [object()]})  # type: ignore[list-item]
    broadcaster = bind(1)
    broadcaster.wait_for_workers()
    with pytest.raises(WorkerError, match="rank 0 failed: TypeError"):
        broadcaster.execute(make_step(1, [1]))
    assert isinstance(worker.end(), TypeError)


def wrong_steps() -> dict[str, tuple[SchedulerOutput, str]]:
    """Steps that workers with a vocabulary of 50, 200 tokens a sequence, 8 requests and 64 tokens a step refuse."""
    steps = {}
    for token in (50, -1, 2**31, 2**64, -(2**64), 10**5000):
        new, known = make_step(1, [1]), make_step(1, request_ids=("s", "r"))
        new.scheduled_new_requests[0].prompt_token_ids[1] = token
        known.scheduled_cached_requests.new_token_ids[1] = [3, token]
        told = f"request 'r' has the token {show(token)}, in a vocabulary of 50"
        steps |= {f"prompt with {show(token)}": (new, told), f"generated {show(token)}": (known, told)}
    long, longer, large = make_step(1, [1]), make_step(200), make_step(1)
    long.scheduled_new_requests[0].prompt_token_ids[:] = [1] * 201
    steps["long prompt"] = (long, "request 'r' has 201 tokens; 200 is the most")
    steps["long text"] = (longer, "request 'r' has 201 tokens; 200 is the most")
    large.total_num_scheduled_tokens = 65
    steps["large step"] = (large, "step 1 has 1 requests and 65 tokens; 8 and 64 are the most")
    many = make_step(1, request_ids=tuple("abcdefghi"))
    steps["many requests"] = (many, "step 1 has 9 requests and 9 tokens; 8 and 64 are the most")
    return steps


WRONG_STEPS = wrong_steps()


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_step_that_workers_can_not_execute_is_not_sent(
    name: str, address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    step, told = WRONG_STEPS[name]
    with pytest.raises(InvalidArgumentError) as caught:
        broadcaster.execute(step)
    assert str(caught.value) == told
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    broadcaster.close()
    assert worker.end() is None and worker.seen == [make_step(1, [1])]


def test_a_token_outside_the_vocabulary_costs_one_request(address: str, bind: Callable[..., Broadcaster]) -> None:
    """A scheduler knows no vocabulary: the step is withdrawn, the request ends, and the others get their tokens."""
    scheduler = make_scheduler(STACK)
    stack = STACKS[STACK]
    hasher = stack.BlockHasher("sha256", BLOCK_SIZE)
    made_up = Workers([full_attention()])
    ThreadWorker(address, 0, execute=lambda output: made_up.execute(msgspec.msgpack.encode(output)))
    broadcaster = bind(1)
    broadcaster.wait_for_workers()
    prompts = {"a": list(range(9)), "wrong": [1, 2, 50, 3], "b": list(range(10))}
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        scheduler.add_request(stack.Request(name, prompt, hasher, max_tokens=6))
    num_refused = 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        try:
            tokens = broadcaster.execute(step).tokens
        except InvalidArgumentError as error:
            assert str(error) == "request 'wrong' has the token 50, in a vocabulary of 50"
            num_refused += 1
            scheduler.withdraw(step)
            scheduler.finish_requests("wrong", RequestStatus.FINISHED_ERROR)
            continue
        for output in scheduler.update_from_output(step, tokens):
            texts[output.request_id] += output.new_token_ids
        scheduler.check()
    assert num_refused == 1
    assert texts == {"a": generated(range(9), 6), "wrong": [], "b": generated(range(10), 6)}


def test_ranks_with_different_blocks_are_noticed(address: str, bind: Callable[..., Broadcaster]) -> None:
    """Each rank digests what it was told, and rank 2 was told something else."""
    digests = TableDigests()

    def digest_wrong_block(output: SchedulerOutput) -> list[int]:
        for new in output.scheduled_new_requests:
            new.block_ids = ([3 if new.request_id == "b" else 1],)
        return digests.apply(output)

    broadcaster = bind(3)
    for rank in range(3):
        ThreadWorker(address, rank, 3, digest_blocks=digest_wrong_block if rank == 2 else None)
    broadcaster.wait_for_workers()
    with pytest.raises(WorkerMismatchError, match=r"^step 1: ranks 0 and 2 have different block ids for 'b'$"):
        broadcaster.execute(make_step(1, [1], ("a", "b", "c")))
    with pytest.raises(BroadcasterStateError):
        broadcaster.execute(make_step(2))


def test_a_late_rank_is_named_and_its_old_answer_is_not_taken_for_the_next(
    address: str, bind: Callable[..., Broadcaster]
) -> None:
    release = threading.Event()

    def be_late(output: SchedulerOutput) -> dict[str, list[int]]:
        if output.step == 1:
            assert release.wait(TIMEOUT)
        return {"r": [40 + output.step]}

    broadcaster = bind(2, timeout_seconds=SHORT)
    ThreadWorker(address, 0, 2, be_late)
    ThreadWorker(address, 1, 2)
    broadcaster.wait_for_workers(TIMEOUT)
    with pytest.raises(WorkerTimeoutError, match=r"^step 1: rank 0 did not answer within 0\.3 s$") as raised:
        broadcaster.execute(make_step(1, [1]))
    assert raised.value.ranks == [0] and not isinstance(raised.value, WorkerLostError)
    broadcaster.timeout_seconds = TIMEOUT
    release.set()
    assert broadcaster.execute(make_step(2)).tokens == {"r": [42]}
    assert broadcaster.execute(make_step(1)).tokens == {"r": [41]}  # another scheduler, which counts from 1 again


def test_a_lost_rank_is_named_before_the_time_is_over(
    address: str, bind: Callable[..., Broadcaster], impatient: None
) -> None:
    broadcaster = bind(2)
    workers: list[ThreadWorker] = []

    def hang_up(output: SchedulerOutput) -> dict[str, list[int]]:
        workers[1].connection.close()
        return {}

    workers += [ThreadWorker(address, 0, 2), ThreadWorker(address, 1, 2, hang_up)]
    broadcaster.wait_for_workers()
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"^step 1: the connection of rank 1 is gone$") as raised:
        broadcaster.execute(make_step(1, [1]))
    assert raised.value.ranks == [1] and time.monotonic() - start < TIMEOUT / 2
    with pytest.raises(BroadcasterStateError):
        broadcaster.execute(make_step(2))
    broadcaster.close()
    assert workers[0].end() is None


def test_a_rank_that_is_gone_between_steps_is_named(
    address: str, bind: Callable[..., Broadcaster], impatient: None
) -> None:
    broadcaster = bind(2)
    end = threading.Event()
    ThreadWorker(address, 0, 2)
    with WorkerConnection(address, 1) as gone:
        thread = threading.Thread(target=gone.say_hello, args=[make_info(1, 2)])
        thread.start()
        broadcaster.wait_for_workers()
        thread.join(TIMEOUT)
    end.wait(SHORT)
    with pytest.raises(WorkerLostError, match=r"^step 4: the connection of rank 1 is gone$"):
        broadcaster.execute(make_step(4, [1]))


def test_a_new_worker_does_not_take_the_place_of_a_lost_one(address: str, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    intruder: list[ThreadWorker] = []

    def let_in(output: SchedulerOutput) -> dict[str, list[int]]:
        intruder.append(ThreadWorker(address, 0))
        time.sleep(SHORT)
        return {"r": [1]}

    ThreadWorker(address, 0, 1, let_in)
    broadcaster.wait_for_workers()
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [1]}
    assert isinstance(intruder[0].end(), WorkerRefusedError) and "has an empty cache" in str(intruder[0].error)


# ---- connections that break ----


@pytest.mark.parametrize("num_ends", [2, 1])
@pytest.mark.parametrize("what", ["nothing", "step", "answer"])
def test_a_connection_that_comes_back_goes_on(what: str, num_ends: int, bind: Callable[..., Broadcaster]) -> None:
    """Whatever was lost with the old one, and whether the scheduler has noticed or not."""
    broadcaster = bind(1, "tcp://127.0.0.1:*")
    relay = Relay(broadcaster.address)

    def answer(output: SchedulerOutput) -> dict[str, list[int]]:
        if what == "answer" and output.step == 2:
            relay.swallow_and_cut(num_ends)
        return {"r": [output.step]}

    worker = ThreadWorker(relay.address, 0, 1, answer)
    broadcaster.wait_for_workers()
    for number in range(1, 5):
        if what == "step" and number == 3:
            relay.swallow_and_cut(num_ends)
        elif what == "nothing" and number == 3:
            relay.cut(num_ends)
        assert broadcaster.execute(make_step(number, [1] if number == 1 else None)).tokens == {"r": [number]}
    assert [step.step for step in worker.seen] == [1, 2, 3, 4]
    broadcaster.close()
    assert worker.end() is None
    relay.close()


def test_machines_that_fall_silent_are_lost(
    bind: Callable[..., Broadcaster], impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_HEARTBEAT_SECONDS", SHORT / 3)
    monkeypatch.setattr(link, "_SILENCE_SECONDS", SHORT)
    broadcaster = bind(1, "tcp://127.0.0.1:*")
    relay = Relay(broadcaster.address)
    worker = ThreadWorker(relay.address, 0)
    broadcaster.wait_for_workers()
    time.sleep(4 * SHORT)  # idle is no silence
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    time.sleep(SHORT)  # a heartbeat comes after the answer
    relay.is_silent = True
    with pytest.raises(WorkerLostError, match="the connection of rank 0 is gone"):
        broadcaster.execute(make_step(2))
    assert isinstance(worker.end(), SchedulerLostError)
    relay.close()


def test_a_step_that_did_not_arrive_is_sent_once_more(address: str, bind: Callable[..., Broadcaster]) -> None:
    """So are welcomes; what arrives twice is executed once."""
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    while not worker.connection._is_welcome:
        time.sleep(0.01)
    link_of_worker = worker.connection._link
    for report in (make_info(0, 1), messages.WorkerReturn(0)):
        link_of_worker.send(msgspec.msgpack.encode(report))
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    assert broadcaster.execute(make_step(2)).tokens == {"r": [0]}
    assert [step.step for step in worker.seen] == [1, 2]


def test_a_worker_whose_scheduler_is_gone_ends(address: str, bind: Callable[..., Broadcaster], impatient: None) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    broadcaster._link.close()  # as by a kill: without a word
    assert isinstance(worker.end(), SchedulerLostError)
    assert str(worker.error) == f"the scheduler at {address} is gone (rank 0)"


def test_a_scheduler_at_the_same_address_refuses_the_workers_of_the_one_before(
    address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    broadcaster._link.close()
    with pytest.raises(WorkerTimeoutError, match="belongs to another scheduler"):
        bind(1).wait_for_workers(1.0)
    assert isinstance(worker.end(), WorkerRefusedError)


def test_a_step_that_is_lost_for_good_ends_the_worker(address: str, bind: Callable[..., Broadcaster]) -> None:
    """The next one must not be computed without it, on keys and values that are not there."""
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    broadcaster._sequence += 1
    with pytest.raises(WorkerError, match=r"rank 0 failed: .*: step 3 came, but one before it did not"):
        broadcaster.execute(make_step(3))
    assert isinstance(worker.end(), SchedulerLostError)
    assert [step.step for step in worker.seen] == [1]


# ---- what is no message ----


@pytest.mark.parametrize("garbage", [[b"\xc1"], [b""], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"type": "info"})]])
def test_strangers_do_not_disturb_the_handshake(
    garbage: list[bytes], address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    raw = raw_socket(address)
    raw.send_multipart(garbage)
    with pytest.raises(WorkerTimeoutError):
        broadcaster.wait_for_workers(SHORT)
    ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    raw.send_multipart(garbage)
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    raw.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"\xc1", "rank 0 sent what is no answer"),
        (msgspec.msgpack.encode(messages.StepAnswer(99, [])), "rank 0 answered a step that was not sent"),
        (msgspec.msgpack.encode(messages.WorkerReturn(99)), "rank 0 answered a step that was not sent"),
        (msgspec.msgpack.encode({"type": "answer", "sequence": "x"}), "rank 0 sent what is no answer"),
    ],
)
def test_a_worker_that_sends_what_is_no_answer(
    answer: bytes, told: str, address: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    raw = raw_socket(address)
    raw.send(msgspec.msgpack.encode(make_info(0, 1)))
    broadcaster.wait_for_workers()
    raw.send(answer)
    with pytest.raises(WorkerError, match=told):
        broadcaster.execute(make_step(1, [1]))
    raw.close()


def test_a_scheduler_that_sends_what_is_no_message(address: str) -> None:
    raw = zmq.Context.instance().socket(zmq.ROUTER)
    raw.linger = 0
    raw.bind(address)
    worker = ThreadWorker(address, 0)
    identity, payload = raw.recv_multipart()
    assert msgspec.msgpack.decode(payload, type=FromWorker) == make_info(0, 1)
    raw.send_multipart([identity, b"\x80"])
    assert isinstance(worker.end(), SchedulerLostError) and "is no message" in str(worker.error)
    raw.close()


def test_steps_have_a_largest_size(
    address: str, bind: Callable[..., Broadcaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "MAX_MESSAGE_BYTES", 2000)
    broadcaster = bind(1)
    worker = ThreadWorker(address, 0)
    broadcaster.wait_for_workers()
    with pytest.raises(InvalidArgumentError, match=r"step 1 is a message of \d+ bytes; 2000 is the most"):
        broadcaster.execute(make_step(1, [1], ("r",) * 200))
    assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
    assert len(worker.seen) == 1


def test_steps_and_answers_of_many_frames(address: str, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(2)
    workers = [
        ThreadWorker(address, rank, 2, lambda output: StepResult({}, {"r": "x" * output.step})) for rank in range(2)
    ]
    broadcaster.wait_for_workers()
    for size in (2**16 - 40, 2**16, 3 * 2**16 + 7):
        step = make_step(size, list(range(size)))
        assert broadcaster.execute(step).errors == {"r": "x" * size}
    assert workers[0].seen == workers[1].seen and workers[0].seen[-1] == step


def test_answers_have_a_largest_size(address: str, bind: Callable[..., Broadcaster]) -> None:
    """That of the requests that may be answered, whatever the worker says or sends."""
    broadcaster = bind(1)
    ThreadWorker(address, 0, 1, lambda output: StepResult({}, {"r": "x" * (300_000 if output.step == 2 else 70_000)}))
    broadcaster.wait_for_workers()
    assert len(broadcaster.execute(make_step(1, [1])).errors["r"]) == 70_000
    with pytest.raises(WorkerError, match=r"rank 0 failed: .* an answer of 300\d+ bytes; \d+ is the most"):
        broadcaster.execute(make_step(2))
    other = bind(1, "tcp://127.0.0.1:*")
    raw = raw_socket(other.address)
    raw.send(msgspec.msgpack.encode(make_info(0, 1)))
    other.wait_for_workers()
    raw.send_multipart([bytes(2**16)] * 3)
    with pytest.raises(WorkerError, match=r"rank 0 sent what is no answer: 196608 bytes, of 131072 at most"):
        other.execute(make_step(1, [1]))
    raw.close()
