"""Requests as the cache manager and the scheduler see them: base class, status, token ids, sampling parameters."""
