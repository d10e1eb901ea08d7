"""Plays recordings of a KV cache manager's calls (``kvpool.recording``) on the native pool and on its twin.

``reader`` reads a file from a stranger; ``requests`` and ``calls`` make each call again; ``player`` compares what the
two return with one another and with what was recorded, and names the first operation at which they part.
"""
