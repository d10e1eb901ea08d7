"""Lets tests make an allocation of the native code fail, in debug builds (KVPOOL_DEBUG=1); in others nothing fails."""
from kvpool.native.memory cimport kvpool_fail_allocation, kvpool_memory_state, kvpool_num_live_allocations

__all__ = ["CAN_FAIL", "fail_allocation", "num_live_allocations"]

_state = kvpool_memory_state()
CAN_FAIL = _state is not None


def fail_allocation(n):
    """Make the n-th allocation of the native code from now on fail, once; 0: none.

    Returns:
        int: allocations that have failed since the call before.
    """
    return kvpool_fail_allocation(n)


def num_live_allocations():
    """Allocations of the native code that are not freed; 0 in other builds than debug ones."""
    return kvpool_num_live_allocations()
