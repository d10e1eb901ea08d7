"""Messages between a scheduler and its workers, both directions, altered: decoded to what they say, or refused."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec
from scheduler_runs import BLOCK_SIZE, Run, make_scheduler

from fuzz.decisions import Decisions, Finding
from fuzz.mutations import MSGPACK_PIECES, altered_bytes, altered_value
from kvpool.errors import KvpoolError
from kvpool.native.block_rows import BlockRowGroups, BlockRows
from kvpool.worker.transport import messages
from kvpool.worker.transport.messages import (
    CacheGroupInfo,
    Refusal,
    Shutdown,
    StepAnswer,
    StepMessage,
    Welcome,
    WorkerFailure,
    WorkerInfo,
    WorkerReturn,
)

MAX_SECONDS = 2.0
NUM_ROWS, WIDTH, NUM_BLOCKS = 8, 50, 20


def _steps() -> list[StepMessage]:
    run = Run(make_scheduler("native", num_blocks=NUM_BLOCKS, max_num_seqs=NUM_ROWS), "native")
    for number in range(5):
        run.add(f"r{number}", list(range(number, number + 6 + 3 * number)), max_tokens=3)
    for _ in range(6):
        run.step()
    decode = msgspec.msgpack.Decoder(messages.SchedulerOutput).decode
    return [StepMessage(number, decode(message)) for number, message in enumerate(run.messages)]


GROUP = CacheGroupInfo(["layer 0"], 16, 2, 8, "float16", None)
INFO = WorkerInfo(0, 2, 100, 16, 32000, 4096, 64, 2048, [GROUP])
SAMPLES: dict[str, list[Any]] = {
    "from worker": [
        INFO,
        WorkerReturn(7),
        StepAnswer(3, [1, 2**40], {"r0": [5], "r1": [6, 7]}),
        StepAnswer(3, [1], None),
        WorkerFailure(1, "ValueError: no", "Traceback"),
    ],
    "to worker": [Welcome(), Refusal("no"), Shutdown(), *_steps()],
}
DECODERS: dict[str, Any] = {
    "from worker": msgspec.msgpack.Decoder(messages.FromWorker),
    "to worker": msgspec.msgpack.Decoder(messages.ToWorker),
}


def use_info(info: WorkerInfo) -> None:
    with suppress(KvpoolError, ValueError, TypeError):
        info.kv_cache_config()
    messages.find_disagreements([INFO, info])


def use_step(step: StepMessage) -> None:
    """A worker's tables take the step whole, or refuse it."""
    tables = BlockRowGroups([BlockRows(NUM_ROWS, WIDTH, BLOCK_SIZE, 1, NUM_BLOCKS)])
    row_of = {f"r{number}": number for number in range(5)}
    try:
        tables.apply_step(step.output, row_of)
    except (KvpoolError, KeyError, TypeError, IndexError, OverflowError):
        if tables.groups[0].num_blocks_per_row.any():
            raise Finding(f"a refused step has changed a table: {step}") from None
    tables.groups[0].check()


def run(d: Decisions) -> None:
    direction = d.choose(list(SAMPLES))
    sample = d.choose(SAMPLES[direction])
    payload = msgspec.msgpack.encode(sample)
    if d.chance(50):
        try:
            payload = msgspec.msgpack.encode(altered_value(d, msgspec.msgpack.decode(payload)))
        except OverflowError:  # msgpack has no larger numbers
            return
    if d.chance(60):
        payload = altered_bytes(d, payload, MSGPACK_PIECES)
    start = time.process_time()
    for decoder in (DECODERS[direction], d.choose(list(DECODERS.values()))):
        try:
            message = messages.decode(decoder, payload)
        except messages.MalformedMessageError:
            continue
        again = decoder.decode(msgspec.msgpack.encode(message))
        if again != message and "nan" not in repr(message):
            raise Finding(f"{message} is sent on as {again}")
        if isinstance(message, WorkerInfo):
            use_info(message)
        elif isinstance(message, StepMessage):
            use_step(message)
    if time.process_time() - start > MAX_SECONDS:
        raise Finding(f"{len(payload)} bytes took {time.process_time() - start:.1f} s")
