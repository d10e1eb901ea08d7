"""A bucket that leaks: spent when too much came at once, and usable again before long."""

from __future__ import annotations

from kvpool.network.byte_budget import ByteBudget


def test_it_is_spent_beyond_its_size_and_until_half_has_leaked_out() -> None:
    budget = ByteBudget(1000, 100)
    budget.leak(50.0)
    assert not budget.is_in_use
    budget.add(1000)
    assert budget.is_in_use and not budget.is_spent
    budget.add(1)
    assert budget.is_spent and budget.num_bytes == 1001
    budget.leak(55.0)
    assert budget.is_spent, "501 are left"
    budget.leak(55.1)
    assert not budget.is_spent and budget.is_in_use
    budget.leak(61.0)
    assert not budget.is_in_use
    assert budget.num_bytes == 1001


def test_a_steady_trickle_never_spends_it() -> None:
    budget = ByteBudget(1000, 100)
    for second in range(10_000):
        budget.leak(float(second))
        budget.add(100)
        assert not budget.is_spent
    assert budget.num_bytes == 1_000_000


def test_however_much_came_it_is_usable_again_in_time() -> None:
    budget = ByteBudget(1000, 100)
    budget.leak(0.0)
    for _ in range(1000):
        budget.add(10**9)
    budget.leak(9.9)
    assert budget.is_spent
    budget.leak(10.1)  # five seconds for half of it, and five more
    assert not budget.is_spent
