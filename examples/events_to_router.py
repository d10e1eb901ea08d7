"""KV cache events over ZeroMQ, and what a router makes of them: an index that tells which prefix an engine holds.

python examples/events_to_router.py     needs kvpool[events]
"""

import time
from itertools import takewhile

import msgspec
import zmq

from kvpool import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request
from kvpool.events.publisher import ZmqEventPublisher
from kvpool.events.wire import BlockRemoved, BlockStored, EventBatch, KVEventBatch, to_external_block_hash

BLOCK_SIZE = 16


class PrefixIndex:
    def __init__(self) -> None:
        self.hashes: set[int | bytes] = set()  # of the blocks that one engine holds

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.hashes.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.hashes.difference_update(event.block_hashes)
            else:  # AllBlocksCleared
                self.hashes.clear()

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request's prefix that the engine need not compute."""
        held = (to_external_block_hash(block_hash) in self.hashes for block_hash in request.block_hashes)
        return BLOCK_SIZE * sum(1 for _ in takewhile(bool, held))


def main() -> None:
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(num_blocks=100, kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)])
    manager = KVCacheManager(config, max_model_len=512, enable_kv_cache_events=True)
    hasher = BlockHasher("sha256", BLOCK_SIZE)
    index = PrefixIndex()
    with ZmqEventPublisher(0, "tcp://127.0.0.1:*") as publisher, zmq.Context().socket(zmq.SUB) as router:
        router.connect(publisher.endpoint)
        router.subscribe(b"")
        while not router.poll(10):  # a subscriber gets nothing until ZeroMQ has let it join
            publisher.publish(EventBatch(time.time(), []))
        manager.allocate_slots(Request("first", list(range(100)), hasher, max_tokens=1), 100)
        publisher.publish(EventBatch(time.time(), list(manager.take_events())))
        while not index.hashes:
            _topic, _number, payload = router.recv_multipart()
            index.apply(msgspec.msgpack.decode(payload, type=KVEventBatch))
    second = Request("second", [*range(70), 7, 7, 7], hasher, max_tokens=1)
    print(f"the engine holds {len(index.hashes)} blocks; of the second prompt {index.cached_tokens(second)} tokens")


if __name__ == "__main__":
    main()
