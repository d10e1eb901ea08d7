"""Ranks as processes, and what they tell.

Run as a script, this is a worker that writes down the block ids it used: RECORD_FOLDER gets a file from each rank, with
a JSON line {"step", "ids"} for each step, the ids by request id. FAILING_RANK raises an exception when it is to compute
the request "fail". FITTING are the numbers of blocks that fit on the ranks, separated by commas.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
TIMEOUT = 100.0  # of a run that hangs; the machines of tests may be slow

BlockIds = dict[str, list[list[int]]]


class RankProcesses:
    """Runs this script on every rank, and ends it, whatever happens. A context manager.

    Args:
        num_ranks: started by torchrun, which chooses a free port for itself.
        arguments: of each.
    """

    def __init__(self, num_ranks: int, arguments: Sequence[str], **environment: str) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        path = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(Path(__file__).resolve()), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        )
        self.output = ""

    def check(self) -> None:
        """For ``Broadcaster``: raises if they have ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the workers have ended: {self.wait()}")

    def wait(self) -> str:
        """Waits until they have ended; what they have written."""
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.output = self.process.communicate(timeout=TIMEOUT)[0]
        return self.output

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *details: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def read_records(folder: Path) -> dict[int, list[tuple[int, BlockIds]]]:
    """What each rank has written: steps, and their block ids."""
    records = {}
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        records[int(path.stem)] = [(line["step"], line["ids"]) for line in lines]
    return records


def recording_runner(folder: Path, rank: int, *, fails: bool = False) -> type:
    """A ``ModelRunner`` that writes into ``folder`` what ``read_records`` reads."""
    from kvpool.worker.model_runner import ModelRunner

    class RecordingRunner(ModelRunner):
        def execute(self, output: Any) -> Any:
            if fails and "fail" in output.num_scheduled_tokens:
                raise RuntimeError("told to fail")
            result = super().execute(output)
            ids = {request_id: self.block_ids_of(request_id) for request_id in output.num_scheduled_tokens}
            with (folder / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": output.step, "ids": ids}) + "\n")
            return result

    return RecordingRunner


def run_worker() -> None:
    from kvpool.worker import __main__ as worker
    from kvpool.worker import model_runner
    from kvpool.worker.memory import device_memory

    rank = os.environ["RANK"]
    runner = recording_runner(
        Path(os.environ["RECORD_FOLDER"]), int(rank), fails=os.environ.get("FAILING_RANK") == rank
    )
    model_runner.ModelRunner = runner  # type: ignore[misc]
    if "FITTING" in os.environ:
        fitting = int(os.environ["FITTING"].split(",")[int(rank)])
        device_memory.num_blocks_for_memory = lambda groups, available_bytes: fitting
    worker.run_process()


if __name__ == "__main__":
    run_worker()
