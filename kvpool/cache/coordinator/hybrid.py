"""Several KV cache groups over one pool, and the longest prefix that all of them have cached.

Each group answers "how far does your hit go, if it may not go beyond this length", and a shorter answer makes the
length shorter for all the others. The length only falls, so asking in rounds until nobody objects ends with the
longest length that all agree on. Full attention comes first and is asked once: any shorter prefix of its hit is a hit.

An EAGLE group has to recompute the last block of a hit. It is asked for one block more than the length, and drops
it. It does so once per length: asked again at the length that it has proved, it would drop another block each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvpool.cache.coordinator.base import CacheHit, CoordinatorSettings, KVCacheCoordinator
from kvpool.cache.coordinator.block_sizes import eagle_proof_margin, partial_hash_hits_enabled
from kvpool.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, ceil_div
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock
    from kvpool.cache.managers import SingleTypeKVCacheManager
    from kvpool.hashing.block_hash import BlockHash


class SpecGroup(NamedTuple):
    """KV cache groups with the same spec: cached together, looked up in one call.

    Attributes:
        spec: their spec.
        group_ids: their ids, ascending.
        manager_cls: class of their managers.
        use_eagle: whether one of them is an EAGLE group; the drop counts for all.
    """

    spec: KVCacheSpec
    group_ids: list[int]
    manager_cls: type[SingleTypeKVCacheManager]
    use_eagle: bool

    @property
    def is_full_attention(self) -> bool:
        return isinstance(self.spec, FullAttentionSpec)


class _Search:
    """State of one search: what each group has answered last."""

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[list[KVCacheBlock] | None] = [None] * num_groups
        self.lengths = [0] * num_groups
        self.longest = 0
        # Spec groups whose drop has been made at the present length.
        self.eagle_verified: set[int] = set()


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Groups of different kinds and block sizes over one pool.

    vLLM: ``HybridKVCacheCoordinator``.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        super().__init__(settings)
        groups, hash_block_size = settings.kv_cache_config.kv_cache_groups, settings.hash_block_size
        for manager in self.single_type_managers:
            if manager.kv_cache_spec.prefix_cacheable and manager.block_size % hash_block_size:
                raise InvalidArgumentError(
                    f"the block size {manager.block_size} of group {manager.kv_cache_group_id} is not a multiple of "
                    f"the hash block size {hash_block_size}"
                )
        self.enable_partial_hash_hits = settings.allow_partial_hash_hits and partial_hash_hits_enabled(
            groups, hash_block_size, [type(manager) for manager in self.single_type_managers]
        )
        self._alignment_tokens = hash_block_size if self.enable_partial_hash_hits else self.scheduler_block_size
        for manager in self.single_type_managers:
            manager.cache_hit_alignment_tokens = self._alignment_tokens
        self.attention_groups = self._make_attention_groups()
        # Full attention and one other kind: the second answer is final, there is nobody to ask again.
        self._needs_one_round = len(self.attention_groups) == 2 and self.attention_groups[0].is_full_attention
        # With a look-ahead of several modules, what is published ends before the place where prompts part.
        self.keeps_shared_prefix_checkpoints = (
            settings.enable_mamba_shared_prefix_checkpoint
            and bool(self.eagle_group_ids)
            and self.enable_partial_hash_hits
            and self.num_reprefillable_tokens == 0
        )
        for manager in self.single_type_managers:
            manager.shared_prefix_checkpoint = self.keeps_shared_prefix_checkpoints and isinstance(
                manager.kv_cache_spec, MambaSpec
            )

    def _make_attention_groups(self) -> list[SpecGroup]:
        """Groups to look up, by spec, full attention first; their managers are told of EAGLE."""
        found: list[SpecGroup] = []
        for group_id, manager in enumerate(self.single_type_managers):
            spec = self.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
            if not spec.prefix_cacheable:
                continue
            use_eagle = group_id in self.eagle_group_ids
            for i, group in enumerate(found):
                if group.spec == spec and group.manager_cls is type(manager):
                    group.group_ids.append(group_id)
                    found[i] = group._replace(use_eagle=group.use_eagle or use_eagle)
                    break
            else:
                found.append(SpecGroup(spec, [group_id], type(manager), use_eagle))
        if not found:
            raise InvalidArgumentError("none of the KV cache groups can be cached: caching must be off")
        found.sort(key=lambda group: not group.is_full_attention)
        for group in found:
            if group.use_eagle:
                for group_id in group.group_ids:
                    self.single_type_managers[group_id].use_eagle = True
        return found

    def _align_cacheable(self, num_tokens: int) -> int:
        """Tokens of the longest hit within ``num_tokens``. Hits inside blocks leave it as it is: rounded down, the
        last hash of a Mamba state would be published a second time."""
        if self.enable_partial_hash_hits:
            return num_tokens
        return num_tokens - num_tokens % self.scheduler_block_size

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        """Computed tokens whose blocks in the group can serve a hit; with EAGLE, one block more, which is matched to
        be dropped."""
        num_aligned = self._align_cacheable(num_computed_tokens)
        manager = self.single_type_managers[kv_cache_group_id]
        if num_aligned > 0 and manager.use_eagle:
            num_final = max(0, num_computed_tokens - self.num_reprefillable_tokens)
            return min(num_final, self._align_cacheable(num_final) + manager.block_size)
        return num_aligned

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The longest hit that all groups agree on. O(hashes) per round; rounds are few, and one for full attention
        with one other kind."""
        search = _Search(len(self.single_type_managers))
        hit_length = max_cache_hit_length
        while True:
            agreed_length = self._ask_all_groups(search, block_hashes, hit_length)
            is_agreed = agreed_length >= hit_length
            hit_length = min(hit_length, agreed_length)
            if is_agreed or self._needs_one_round:
                break
        for group in self.attention_groups:
            if group.is_full_attention:
                num_blocks = ceil_div(hit_length, self.single_type_managers[group.group_ids[0]].block_size)
                for group_id in group.group_ids:
                    del (search.blocks[group_id] or [])[num_blocks:]
        return tuple(blocks or [] for blocks in search.blocks), hit_length, search.longest - hit_length

    def _ask_all_groups(self, search: _Search, block_hashes: Sequence[BlockHash], length: int) -> int:
        """One round: the length that is left when every group has been asked."""
        for index, group in enumerate(self.attention_groups):
            first_id = group.group_ids[0]
            if group.is_full_attention and search.blocks[first_id] is not None:
                length = min(length, search.lengths[first_id])
                continue
            drops_block = group.use_eagle and index not in search.eagle_verified
            blocks, found_length = self._ask_group(group, block_hashes, length, drops_block)
            if drops_block:
                search.eagle_verified.add(index)
            elif found_length < length:
                search.eagle_verified.clear()
            length = found_length
            for group_id, group_blocks in zip(group.group_ids, blocks):
                search.blocks[group_id] = group_blocks
                search.lengths[group_id] = found_length
            search.longest = max(search.longest, found_length)
        return length

    def _ask_group(
        self, group: SpecGroup, block_hashes: Sequence[BlockHash], length: int, drops_block: bool
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        # Draft models have no Mamba layers: those never drop, and with a margin they would go beyond the length.
        if drops_block and not isinstance(group.spec, MambaSpec):
            margin = eagle_proof_margin(
                self.single_type_managers[group.group_ids[0]].block_size,
                self.hash_block_size,
                self.enable_partial_hash_hits and group.manager_cls.supports_fine_grained_hash_lookup,
            )
            length = min(length + margin, len(block_hashes) * self.hash_block_size)
        return group.manager_cls.find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=length,
            kv_cache_group_ids=group.group_ids,
            block_pool=self.block_pool,
            kv_cache_spec=group.spec,
            drop_eagle_block=drops_block,
            alignment_tokens=self._alignment_tokens,
        )
