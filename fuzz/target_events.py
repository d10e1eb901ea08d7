"""KV cache events as a consumer decodes them, and the server of replays under requests of every kind."""

from __future__ import annotations

from collections import deque

import msgspec

from fuzz.decisions import Decisions, Finding
from fuzz.mutations import MSGPACK_PIECES, altered_bytes, altered_value
from kvpool.events import replay
from kvpool.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

BATCHES: list[KVEventBatch] = [
    KVEventBatch(ts=1.0, events=[BlockRemoved(block_hashes=[1, b"x" * 32], medium="GPU"), AllBlocksCleared()]),
    KVEventBatch(
        ts=2.0,
        events=[
            BlockStored(
                block_hashes=[2**64 - 1, b"\0" * 32],
                parent_block_hash=None,
                token_ids=[1, 2, 3, 4],
                block_size=4,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
        ],
        data_parallel_rank=3,
    ),
]
DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def decode_altered(d: Decisions) -> None:
    payload = msgspec.msgpack.encode(d.choose(BATCHES))
    if d.chance(50):
        try:
            payload = msgspec.msgpack.encode(altered_value(d, msgspec.msgpack.decode(payload)))
        except OverflowError:  # msgpack has no larger numbers
            return
    payload = altered_bytes(d, payload, MSGPACK_PIECES)
    try:
        batch = DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return
    again = DECODER.decode(msgspec.msgpack.encode(batch))
    if again != batch and "nan" not in repr(batch):
        raise Finding(f"{batch} is published as {again}")


class Zmq:
    """What the server asks of pyzmq."""

    NOBLOCK = 1

    class ZMQError(Exception):
        pass

    class Again(ZMQError):
        pass

    class ContextTerminated(ZMQError):
        pass


class Router:
    """A ROUTER socket whose peers ask, fetch nothing, or are gone, as the decisions say."""

    def __init__(self, d: Decisions) -> None:
        self.d = d
        self.requests: deque[list[bytes]] = deque()
        self.sent: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.requests:
            raise Zmq.Again
        return self.requests.popleft()

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        how = self.d.byte()
        if how > 250:
            raise Zmq.ZMQError("no route")
        if how > 230:
            raise Zmq.Again
        identity, empty, _topic, number, payload = frames
        if empty:
            raise Finding(f"an answer of frames {frames}")
        self.sent.setdefault(identity, []).append((number, payload))


def serve_replays(d: Decisions) -> None:
    most, most_bytes = 1 + d.below(8), d.choose([10, 40, 1000])
    remembered = replay.RememberedBatches(most, most_bytes)
    router = Router(d)
    server = replay.ReplayServer(Zmq, router, remembered, b"topic")
    published: list[tuple[int, bytes]] = []
    number = 0
    for _ in range(60):
        if d.is_empty:
            break
        how = d.below(4)
        if how == 0:
            number += 1 + (d.below(3) if d.chance(20) else 0)
            published.append((number, bytes(d.below(20))))
            remembered.append(*published[-1])
        elif how < 3:
            wanted = d.choose([0, number, number + 5, 2**63, 2**64 - 1, max(number - 2, 0)])
            request = [bytes([d.below(4)]), b"", wanted.to_bytes(8, "big")]
            if d.chance(25):
                request = request[:1] + [d.bytes(d.choose([0, 1, 7, 8, 9, 300])) for _ in range(d.below(5))]
            router.requests.append(request)
        else:
            server._rests_until = 0.0  # the time that it rests is not the matter here
            server.work()
        check_remembered(remembered, published, most, most_bytes)
        if server._num_waiting != sum(len(client.answers) for client in server._clients.values()):
            raise Finding(f"{server._num_waiting} requests wait, counted otherwise")
        if server._num_waiting > replay.MAX_WAITING_REQUESTS:
            raise Finding(f"{server._num_waiting} requests wait")
    contents = dict(published)
    for frames in router.sent.values():
        for sent_number, payload in frames:
            if sent_number != replay.END_OF_REPLAY and contents[int.from_bytes(sent_number, "big")] != payload:
                raise Finding(f"batch {sent_number!r} was answered by {payload!r}")


def check_remembered(
    remembered: replay.RememberedBatches, published: list[tuple[int, bytes]], most: int, most_bytes: int
) -> None:
    kept: list[tuple[int, bytes]] = []
    for batch in reversed(published):
        if len(kept) == most or sum(len(payload) for _, payload in [*kept, batch]) > most_bytes:
            break
        kept.append(batch)
    kept.reverse()
    held = [remembered.at(place) for place in range(remembered.first_place, remembered.end_place)]
    if held != kept or remembered.num_bytes != sum(len(payload) for _, payload in kept):
        raise Finding(f"remembered {held}, not {kept}")
    for number in {0, *(number for number, _ in published), 2**64 - 1}:
        place = remembered.find(number) - remembered.first_place
        if place != sum(each < number for each, _ in kept):
            raise Finding(f"batch {number} is looked for at {place} of {kept}")


def run(d: Decisions) -> None:
    (serve_replays if d.below(2) else decode_altered)(d)
