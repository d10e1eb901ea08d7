"""Replay of request traces: size a KV cache, and compare implementations of its manager and its block pool.

``trace`` reads traces and makes block hashes, ``synthetic`` generates them, ``simulator`` runs them as a discrete-event
simulation over one of the ``implementations``, ``policies`` gives the bounds that no policy can pass, ``report`` shows
the results. The modules import numpy; nothing here is imported by ``import kvpool``.
"""
