"""Benchmarks of the block pool: kvpool's native pool, its pure-Python twin and vLLM's pool under the same workloads.

``pytest bench/bench_pool.py bench/bench_cold.py bench/bench_memory.py``   all figures, grouped by workload
``python -m bench.table``                                                  the pool's rows of the target table
``python bench/ratios.py --check``                                         native to reference, against stored ratios
``bench/c/bench_pool.c``                                                   the same loops in C; how to build: its top
"""
