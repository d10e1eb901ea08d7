"""Recordings of what is asked of a KV cache manager, for reports of a fault: ``KVPOOL_RECORD=FILE``.

``calls`` puts itself in front of a manager's public calls and of its pool's; ``recorder`` makes messages of them
(``operations``), with what has changed in the requests; ``snapshot`` is the whole state, which every file begins with;
``files`` writes them. Nothing of it is imported unless recording is asked for. ``kvpool.playback`` plays recordings.
"""
