"""The block pool alone: take blocks, give their contents a name, free them, find them again.

python examples/pool.py
"""

from hashlib import sha256

from kvpool import BlockHash, BlockPool, BlockStateError

BLOCK_SIZE = 16


class Prompt:
    """What the pool reads of a request: one digest per full block, each covering all tokens up to its end."""

    def __init__(self, text: bytes, num_blocks: int) -> None:
        self.block_hashes = [BlockHash(sha256(text + bytes([i])).digest()) for i in range(num_blocks)]


def main() -> None:
    pool = BlockPool(num_gpu_blocks=1000, enable_caching=True, hash_block_size=BLOCK_SIZE)
    prompt = Prompt(b"the system prompt", num_blocks=4)

    blocks = pool.get_new_blocks(4)  # KVCacheBlock, each with ref_cnt 1
    print("taken:", [block.block_id for block in blocks])
    # A kernel has written the keys and values of 64 tokens into these blocks; now others may find them.
    pool.cache_full_blocks(prompt, blocks, 0, 4, block_size=BLOCK_SIZE, kv_cache_group_id=0)
    pool.free_blocks(reversed(blocks))  # the last block first: it is the first one to be reused
    print("free again:", pool.get_num_free_blocks(), "of 999, and 4 of them can still be found")

    hits = []
    for digest in prompt.block_hashes:
        found = pool.get_cached_block(digest, [0])
        if found is None:
            break
        hits.append(found[0])
    pool.touch(hits)  # another request uses the same prefix: ref_cnt 1 again, nothing is computed twice
    print("found:", [block.block_id for block in hits])

    ids = pool.allocate_ids(256)  # the same without an object per block: an int32 array
    pool.free_ids(ids)

    pool.free_blocks(hits)
    try:
        pool.free_blocks(hits)
    except BlockStateError as error:
        print("refused, and nothing has changed:", error)
    pool.check()  # recomputes all nine invariants


if __name__ == "__main__":
    main()
