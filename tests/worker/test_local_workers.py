"""Workers as processes: who can reach them, and that none is left, however the process that started them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("zmq")

from broadcast_workers import make_step
from tiny_models import make_model
from typer.testing import CliRunner

from kvpool.errors import InvalidArgumentError
from kvpool.network.curve import make_key_folder
from kvpool.worker import __main__ as worker
from kvpool.worker.models.random_model import write_random_llama
from kvpool.worker.models.tensor_parallel import Ranks
from kvpool.worker.transport.broadcaster import Broadcaster
from kvpool.worker.transport.lifeline import Lifeline, end_with
from kvpool.worker.transport.local_workers import LocalWorkers, WorkersEndedError, loopback_interface

pytestmark = pytest.mark.dataplane

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
END_SECONDS = 10.0
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short enough for the path of a socket
        yield Path(name)


def wait_until(is_true: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def is_alive(process_id: int) -> bool:
    """Whether it runs, or could; one that has ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status not in "ZX"


def sessions_of(process_id: int) -> list[int]:
    """Processes that this one has started, but for those that remove its folders: each rank leads a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            is_remover = b"rm -rf" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == process_id and not is_remover:
            found.append(int(path.parent.name))
    return found


def listeners_of(process_ids: list[int]) -> list[str]:
    """Addresses on which these processes accept TCP connections, IPv4 and IPv6, in the kernel's hexadecimal form."""
    inodes = set()
    for process_id in process_ids:
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.append(fields[1].partition(":")[0])
    return addresses


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}


def arguments(model: Path, address: str) -> list[str]:
    return ["--model", str(model), "--address", address, "--num-blocks", "30", "--block-size", "4", "--device", "cpu"]


# ---- who can reach them ----


@needs_proc
def test_ranks_on_one_machine_listen_on_the_loopback_interface_only(folder: Path) -> None:
    make_model("llama").save_pretrained(folder / "model")
    address = f"ipc://{folder}/s"
    with (
        LocalWorkers(2, arguments(folder / "model", address)) as workers,
        Broadcaster(address, 2, check_workers=workers.check) as broadcaster,
    ):
        broadcaster.wait_for_workers(START_SECONDS)
        assert set(broadcaster.execute(make_step(1, [1])).tokens) == {"r"}
        addresses = listeners_of([os.getpid(), *workers.process_ids])
        assert len(addresses) >= 2, "gloo's listeners were not found"
        assert set(addresses) <= LOOPBACK


@needs_proc
def test_a_listener_on_every_interface_would_be_seen() -> None:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as listener:
                listener.bind((host, 0))
                listener.listen()
                assert not set(listeners_of([os.getpid()])) <= LOOPBACK
        except OSError:
            assert family == socket.AF_INET6


def test_what_was_set_for_several_machines_does_not_reach_ranks_on_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GLOO_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_IFNAME", "eth0"), ("MASTER_ADDR", "10.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEST_FOLDER", str(folder))
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME MASTER_ADDR"
    code = f"""
import os, pathlib, sys
values = [os.environ.get(name, "-") for name in {names.split()!r}]
place = pathlib.Path(sys.argv[sys.argv.index("--rendezvous") + 1]).parent
values.append(oct(place.stat().st_mode & 0o777))
pathlib.Path(os.environ["TEST_FOLDER"], os.environ["RANK"]).write_text(" ".join(values))
"""
    with LocalWorkers(2, [], command=[sys.executable, "-c", code]) as workers:
        assert workers.wait() == 0
    lo = loopback_interface()
    told = [(folder / str(rank)).read_text() for rank in range(2)]
    assert told == [f"{rank} 2 {rank} 2 {lo} ={lo} - 0o700" for rank in range(2)]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_ranks_do_not_meet_where_others_may_write(mode: int, folder: Path) -> None:
    folder.chmod(mode)
    with (
        pytest.raises(InvalidArgumentError, match="nobody else may write to it"),
        Ranks(0, 2, 0, 2).connected(worker_device(), folder / "ranks"),
    ):
        pass
    folder.chmod(0o700)
    with (
        pytest.raises(InvalidArgumentError, match="No such file"),
        Ranks(0, 2, 0, 2).connected(worker_device(), folder / "nowhere" / "ranks"),
    ):
        pass


def worker_device() -> object:
    return Ranks().device("cpu")


# ---- failures and ends ----


def test_the_first_rank_that_ends_is_named_with_what_it_said() -> None:
    code = "import os, sys; sys.stderr.write('noise\\nerror: no luck\\n'); sys.exit(3)"
    with LocalWorkers(1, [], command=[sys.executable, "-c", code]) as workers:
        assert workers.wait() == 3
        with pytest.raises(WorkersEndedError, match=r"^rank 0 has ended \(exit code 3\): no luck$"):
            workers.check()
    with LocalWorkers(2, [], command=[sys.executable, "-c", "import time; time.sleep(600)"]) as workers:
        workers.check()
        os.kill(workers.process_ids[1], signal.SIGKILL)
        assert workers.wait() == -signal.SIGKILL
        with pytest.raises(WorkersEndedError, match=r"^rank 1 has ended \(killed by SIGKILL\): it said nothing$"):
            workers.check()
        workers.kill()
    with pytest.raises(InvalidArgumentError, match="0 workers"):
        LocalWorkers(0, [])
    with pytest.raises(OSError, match="No such file"):
        LocalWorkers(2, [], command=["/nowhere/python"])


def test_ranks_of_the_worker_command_end_as_they_are_told(folder: Path) -> None:
    """``--tensor-parallel``: ended by the scheduler it is a success, by a rank that can't start a failure."""
    make_model("llama").save_pretrained(folder / "model")
    with Broadcaster(f"ipc://{folder}/s", 2) as broadcaster:
        command = [sys.executable, "-m", "kvpool.worker", "--tensor-parallel", "2"]
        process = subprocess.Popen([*command, *arguments(folder / "model", broadcaster.address)], cwd=ROOT)
        try:
            broadcaster.wait_for_workers(START_SECONDS)
            assert set(broadcaster.execute(make_step(1, [1])).tokens) == {"r"}
            broadcaster.close()
            assert process.wait(END_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    ran = subprocess.run(
        [*command, *arguments(folder / "none", f"ipc://{folder}/s")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        timeout=START_SECONDS,
        check=False,
    )
    assert ran.returncode == 2 and b"is neither a folder with" in ran.stderr


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(worker.app, ["--tensor-parallel", "2", *arguments(folder, f"ipc://{folder}/s")])
    assert result.exit_code == 2
    assert result.stderr == "error: --tensor-parallel starts ranks, but RANK says that this is one already\n"


# ---- the starter is gone ----

BUSY = """
import os, sys
sys.path.insert(0, {root!r})
from kvpool.worker.transport.lifeline import end_with
end_with(int(sys.argv[sys.argv.index("--parent-pipe") + 1]))
open(os.path.join({folder!r}, "ready" + os.environ["RANK"]), "w").close()
{work}
"""
WORK = {
    "python": "while True: pass",
    "holds the interpreter": "import re; re.match('(a*)*b', 'a' * 64)",
    "stopped": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "waits for a child": "import subprocess; subprocess.run(['sleep', '600'])",
    "ignores signals": "import signal, time\nfor n in range(1, 32):\n"
    "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
}


@needs_proc
@pytest.mark.parametrize("work", WORK)
def test_what_a_killed_process_started_ends_whatever_it_does(work: str, folder: Path) -> None:
    code = BUSY.format(root=str(ROOT), folder=str(folder), work=WORK[work])
    starter = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from kvpool.worker.transport.local_workers import LocalWorkers
workers = LocalWorkers(2, [], command=[sys.executable, "-c", {code!r}])
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", starter])
    children: list[int] = []
    try:
        wait_until(lambda: len(list(folder.glob("ready*"))) == 2, START_SECONDS, "both run")
        time.sleep(0.3)  # and do their work
        children = sessions_of(process.pid)
        children += [grandchild for child in children for grandchild in sessions_of(child)]
        assert len(children) == (4 if work == "waits for a child" else 2)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_alive, children)), END_SECONDS, f"{children} have ended")


GENERATION = """
import sys
from kvpool.cli import app
app(["generate", "--tensor-parallel", "2", "--ignore-eos", "--max-new-tokens", "60", *sys.argv[1:]])
"""
STARTER = """
import sys, time
from kvpool.worker.transport.local_workers import LocalWorkers
workers = LocalWorkers(2, sys.argv[1:])
time.sleep(600)
"""


@needs_proc
@pytest.mark.parametrize("moment", [0.0, 0.5, 3.0, "model is loaded", "generating"])
def test_nothing_is_left_of_a_run_that_is_killed(moment: float | str, folder: Path) -> None:
    """While ranks are started, import, load the model (without a scheduler, they then wait for it), and generate."""
    write_random_llama(folder / "model", num_hidden_layers=8, hidden_size=512, intermediate_size=4096)
    (folder / "p.jsonl").write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    if moment == "generating":
        words = [GENERATION, "--model", str(folder / "model"), "--prompts", str(folder / "p.jsonl")]
    else:
        words = [STARTER, *arguments(folder / "model", f"ipc://{folder}/s")]
    process = subprocess.Popen(
        [sys.executable, "-c", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    children: list[int] = []
    try:
        wait_until(
            lambda: process.poll() is not None or len(sessions_of(process.pid)) == 2, START_SECONDS, "ranks are there"
        )
        assert process.poll() is None, "it has ended before it was killed"
        children = sessions_of(process.pid)
        if isinstance(moment, float):
            time.sleep(moment)
        elif moment == "generating":
            assert process.stdout.read(1)
        else:
            wait_until(lambda: len(listeners_of(children)) >= 2, START_SECONDS, "ranks have met")
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not any(map(is_alive, children)), END_SECONDS, f"{children} have ended")
    wait_until(lambda: not [*folder.glob("kvpool-*")], END_SECONDS, "its temporary folders are gone")


@needs_proc
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_copy_of_the_starter_keeps_nothing_alive(folder: Path) -> None:
    code = BUSY.format(root=str(ROOT), folder=str(folder), work="import time; time.sleep(600)")
    starter = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from kvpool.worker.transport.local_workers import LocalWorkers
workers = LocalWorkers(1, [], command=[sys.executable, "-c", {code!r}])
copy = os.fork()
if copy == 0:
    time.sleep(30)
    os._exit(0)
print(workers.process_ids[0], copy, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank, copy = map(int, process.stdout.readline().split())
    try:
        wait_until((folder / "ready0").exists, START_SECONDS, "it runs")
        process.kill()
        process.wait()
        wait_until(lambda: not is_alive(rank), END_SECONDS, "it has ended")
        assert is_alive(copy)
    finally:
        os.kill(copy, signal.SIGKILL)


def test_only_a_pipe_is_watched(folder: Path) -> None:
    with (folder / "file").open("w") as file, pytest.raises(InvalidArgumentError, match=r"is no pipe to the process"):
        end_with(file.fileno())
    for descriptor in (-1, 2**40, 10**6):
        with pytest.raises(InvalidArgumentError, match=f"descriptor {descriptor} is no pipe"):
            end_with(descriptor)


def test_lifelines_leave_no_descriptors() -> None:
    line = Lifeline()
    ends = line.child_end, line._parent_end
    line.close()
    line.close()
    for descriptor in ends:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_the_worker_command_takes_keys_or_a_word(folder: Path) -> None:
    invoke = CliRunner().invoke
    words = ["--model", str(folder), "--timeout", "0.1", "--address"]
    refused = invoke(worker.app, [*words, "tcp://10.0.0.1:5600"])
    assert refused.exit_code == 2 and "can be reached from other machines" in refused.stderr
    refused = invoke(worker.app, [*words, "tcp://10.0.0.1:5600", "--keys", str(folder / "none")])
    assert refused.exit_code == 2 and "is no folder of keys" in refused.stderr
    make_key_folder(folder / "keys")
    for more in (["--keys", str(folder / "keys")], ["--insecure"]):
        taken = invoke(worker.app, [*words, "tcp://10.0.0.1:5600", *more])
        assert taken.exit_code == 2 and "is neither a folder with" in taken.stderr  # of the model
