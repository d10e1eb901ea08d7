"""Counts and times of the cache: prefix cache statistics, residency of blocks, the Prometheus exporter."""
