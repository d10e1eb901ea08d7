"""A process that publishes events at a steady pace, as an engine does, and tells how it fares.

``python event_engine_child.py PARAMETERS`` (JSON of ``ZmqEventPublisher``'s, and ``tokens``, ``pause_seconds``,
``max_files``) writes a line of JSON each 50 ms, until its standard input ends.
"""

from __future__ import annotations

import json
import resource
import select
import sys
import time
from pathlib import Path
from typing import Any

from kvpool.events.publisher import ZmqEventPublisher
from kvpool.events.wire import BlockStored, KVEventBatch

REPORT_SECONDS = 0.05


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(parameters: dict[str, Any]) -> None:
    tokens = list(range(70_000, 70_000 + parameters.pop("tokens", 200)))
    pause_seconds = parameters.pop("pause_seconds", 0.002)
    max_files = parameters.pop("max_files", None)
    if max_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    publisher = ZmqEventPublisher(0, **parameters)
    step, worst_seconds, most_queued, next_report = 0, 0.0, 0, 0.0
    while True:
        start = time.monotonic()
        publisher.publish(KVEventBatch(start, [BlockStored([step], None, tokens, 16, None, "GPU", None)]))
        worst_seconds = max(worst_seconds, time.monotonic() - start)
        most_queued = max(most_queued, publisher.queued_batches)
        step += 1
        if start >= next_report:
            next_report = start + REPORT_SECONDS
            report = {
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "step": step,
                "rss": rss_bytes(),
                "files": len(list(Path("/proc/self/fd").iterdir())),  # needs a descriptor itself
                "worst_seconds": worst_seconds,
                "most_queued": most_queued,
                "cpu_seconds": time.process_time(),
                **{
                    name: getattr(publisher, name)
                    for name in (
                        "published_batches",
                        "dropped_batches",
                        "overflows",
                        "refused_peers",
                        "refused_requests",
                        "abandoned_replays",
                    )
                },
            }
            print(json.dumps(report), flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                break
        time.sleep(pause_seconds)
    publisher.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
