"""Keys of connections: who is admitted, which addresses need keys, and what files of keys have to look like."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.errors import InvalidArgumentError
from kvpool.network.curve import (
    KEYS_VARIABLE,
    ClientGate,
    CurveKeys,
    find_keys_folder,
    is_loopback,
    make_key_folder,
    require_protection,
)

zmq = pytest.importorskip("zmq")

PATIENCE_MS = 10_000
SILENCE_MS = 300

LOOPBACK = (
    "ipc:///run/kv",
    "inproc://kv",
    "tcp://127.0.0.1:5557",
    "tcp://127.255.0.9:*",
    "tcp://[::1]:5557",
    "tcp://localhost:5557",
    "tcp://LOCALHOST:5557",
    "tcp://[::ffff:127.0.0.1]:5557",
)
BEYOND = (
    "tcp://*:5557",
    "tcp://0.0.0.0:5557",
    "tcp://[::]:5557",
    "tcp://10.0.0.1:5557",
    "tcp://[fe80::1]:5557",
    "tcp://router:5557",
    "tcp://127.example:5557",
    "tcp://localhost.example:5557",
    "tcp://eth0:5557",
    "tcp://127.0.0.1:0;10.0.0.1:5557",
    "tcp://:5557",
    "tcp://",
    "udp://127.0.0.1:5557",
    "",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_key_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[Any]:
    """A ROUTER that admits the folder's clients: its gate, itself, its address."""
    with zmq.Context() as context:
        gate = ClientGate(context, CurveKeys.load_server(folder))
        router = context.socket(zmq.ROUTER)
        gate.protect(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield gate, router, f"tcp://127.0.0.1:{port}"
        router.close(0)
        gate.close()
        gate.close()


def is_heard(router: Any, address: str, keys: CurveKeys | None, patience_ms: int = SILENCE_MS) -> bool:
    """Whether what a peer with such keys says comes through."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if keys is not None:
            keys.protect_client(dealer)
        dealer.connect(address)
        dealer.send(b"hello")
        is_there = bool(router.poll(patience_ms))
        if is_there:
            assert router.recv_multipart()[1] == b"hello"
        return is_there


# Who is admitted


def test_listed_clients_are_admitted_and_nobody_else(folder: Path, server: Any, tmp_path: Path) -> None:
    gate, router, address = server
    mine = CurveKeys.load_client(folder)
    make_key_folder(tmp_path / "others")
    others = CurveKeys.load_client(tmp_path / "others")
    no_client = CurveKeys(others.public, others.secret, mine.peers)
    assert is_heard(router, address, mine, PATIENCE_MS)
    assert not is_heard(router, address, None), "a peer without keys"
    assert not is_heard(router, address, others), "a peer that expects another server"
    assert gate.num_refused == 0
    assert not is_heard(router, address, no_client), "a peer that knows the server and is not listed"
    assert gate.num_refused >= 1
    assert is_heard(router, address, mine, PATIENCE_MS)


def test_nobody_is_admitted_when_nobody_watches(folder: Path, server: Any) -> None:
    """ZeroMQ alone would let every key in once its authenticator is gone."""
    gate, router, address = server
    gate.close()
    assert not is_heard(router, address, CurveKeys.load_client(folder))


def test_a_client_speaks_to_its_server_alone(folder: Path, tmp_path: Path) -> None:
    """Whoever took the server's address hears nothing, even with keys of his own."""
    make_key_folder(tmp_path / "others")
    theirs, client = CurveKeys.load_server(tmp_path / "others"), CurveKeys.load_client(folder)
    impostor_keys = CurveKeys(theirs.public, theirs.secret, frozenset([client.public]))
    with zmq.Context() as context:
        gate = ClientGate(context, impostor_keys)
        with context.socket(zmq.ROUTER) as router:
            gate.protect(router)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            assert not is_heard(router, f"tcp://127.0.0.1:{port}", client)
        gate.close()


def test_a_further_client(folder: Path) -> None:
    before = CurveKeys.load_server(folder).peers
    make_key_folder(folder, "node-2")
    after = CurveKeys.load_server(folder).peers
    assert after - before == {CurveKeys.load_client(folder, "node-2").public} and before < after


def test_each_side_needs_only_its_own_files(folder: Path, tmp_path: Path) -> None:
    for side, names, load in (
        ("server", ("server.key_secret", "client.key"), CurveKeys.load_server),
        ("client", ("client.key_secret", "server.key"), CurveKeys.load_client),
    ):
        (tmp_path / side).mkdir()
        for name in names:
            os.link(folder / name, tmp_path / side / name)
        assert load(tmp_path / side) == load(folder)
    assert CurveKeys.load_server(folder).peers == {CurveKeys.load_client(folder).public}
    assert CurveKeys.load_client(folder).peers == {CurveKeys.load_server(folder).public}


def test_secrets_are_not_shown(folder: Path) -> None:
    keys = CurveKeys.load_server(folder)
    assert keys.secret.decode() not in repr(keys)


# Which addresses need keys


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_needs_nothing(address: str) -> None:
    assert is_loopback(address)
    require_protection(address, None, insecure=False)


@pytest.mark.parametrize("address", BEYOND)
def test_other_addresses_need_keys_or_a_word(address: str, folder: Path) -> None:
    assert not is_loopback(address)
    with pytest.raises(InvalidArgumentError) as raised:
        require_protection(address, None, insecure=False)
    for told in (repr(address), "kvpool keygen", "--keys", "--insecure", KEYS_VARIABLE):
        assert told in str(raised.value)
    require_protection(address, None, insecure=True)
    if address.startswith("tcp://"):
        require_protection(address, CurveKeys.load_server(folder), insecure=False)
    else:
        with pytest.raises(InvalidArgumentError, match="can't be protected"):
            require_protection(address, folder, insecure=False)


def test_the_folder_is_named_by_an_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert find_keys_folder(None) is None
    monkeypatch.setenv(KEYS_VARIABLE, "")
    assert find_keys_folder(None) is None
    monkeypatch.setenv(KEYS_VARIABLE, "/from/environment")
    assert find_keys_folder(None) == Path("/from/environment")
    assert find_keys_folder("/from/option") == Path("/from/option")


# Files


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in ("keygen", *arguments)])


def test_keygen_makes_files_for_their_owner(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        result = invoke(tmp_path / "a" / "b")
    finally:
        os.umask(old_umask)
    assert result.exit_code == 0
    made = sorted((tmp_path / "a" / "b").iterdir())
    assert [path.name for path in made] == ["client.key", "client.key_secret", "server.key", "server.key_secret"]
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in made] == ["0o644", "0o600", "0o644", "0o600"]
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert sorted(result.stdout.split()) == [str(path) for path in made]


@pytest.mark.parametrize("name", ["client.key", "client.key_secret", "server.key", "server.key_secret"])
def test_keygen_overwrites_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    result = invoke(tmp_path)
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert f"{tmp_path / name} is there already" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_keygen_adds_a_client(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert invoke(folder, "--client", "node-2").exit_code == 0
    after = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.name for path in after.keys() - before.keys()} == {"node-2.key", "node-2.key_secret"}
    assert before.items() <= after.items()
    assert stat.S_IMODE((folder / "node-2.key_secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "server", "../x", "a/b", ".hidden", "a b", "ä"])
def test_a_client_needs_a_name(folder: Path, name: str) -> None:
    result = invoke(folder, "--client", name)
    assert result.exit_code == 2 and "no name for a client" in result.output


def test_a_client_needs_a_server(tmp_path: Path) -> None:
    result = invoke(tmp_path / "new", "--client", "node")
    assert result.exit_code == 2 and "no key of a server" in result.output
    assert not (tmp_path / "new").exists()


def test_keygen_tells_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke(tmp_path / "file")
    assert result.exit_code == 2 and result.output.count("\n") == 1 and str(tmp_path / "file") in result.output


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes, num_read = Path.read_bytes, 0

    def fail_at_third(path: Path) -> bytes:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            raise OSError(28, "No space left on device")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail_at_third)
    with pytest.raises(InvalidArgumentError, match="No space left on device"):
        make_key_folder(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777, 0o610])
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    for side, load in (("server", CurveKeys.load_server), ("client", CurveKeys.load_client)):
        path = folder / f"{side}.key_secret"
        path.chmod(mode)
        with pytest.raises(InvalidArgumentError, match=f"{path} has mode {mode:04o}"):
            load(folder)
        path.chmod(0o400)
        load(folder)


def test_files_that_hold_no_key_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    secret, public = folder / "server.key_secret", folder / "client.key"
    good_secret, good_public = secret.read_text(), public.read_text()
    own_key = CurveKeys.load_server(folder).public.decode()
    for path, text, reason in (
        (secret, "", "no public key"),
        (secret, (folder / "server.key").read_text(), "no secret key"),
        (secret, good_secret.replace(own_key, CurveKeys.load_client(folder).public.decode()), "belong together"),
        (secret, good_secret.replace(own_key, own_key[:-1]), "no CURVE key"),
        (public, "\0\xff" * 100, "no public key"),
        (public, "metadata\ncurve\n    public-key\n", "no public key"),
        (public, "public-key = ", "no CURVE key"),
        (public, 'public-key = "' + "ä" * 20 + '"', "no CURVE key"),
        (public, 'public-key = "' + "#" * 40 + '"', "no CURVE key"),
        (public, 'public-key = "' + "x" * 41 + '"', "no CURVE key"),
        (public, (folder / "client.key_secret").read_text(), "holds a secret key"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidArgumentError, match=reason) as raised:
            CurveKeys.load_server(folder)
        assert str(path) in str(raised.value)
        secret.write_text(good_secret)
        public.write_text(good_public)
    CurveKeys.load_server(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="kvpool keygen"):
        CurveKeys.load_server(tmp_path / "nowhere")
    (folder / "client.key").unlink()
    with pytest.raises(InvalidArgumentError, match="no public key of a client"):
        CurveKeys.load_server(folder)
    (folder / "server.key").unlink()
    with pytest.raises(InvalidArgumentError, match=r"server\.key: No such file"):
        CurveKeys.load_client(folder)
    (folder / "client.key_secret").unlink()
    with pytest.raises(InvalidArgumentError, match=r"client\.key_secret: No such file"):
        CurveKeys.load_client(folder)
    with pytest.raises(InvalidArgumentError, match="no public key of the other side"):
        CurveKeys.from_files(folder / "server.key_secret", [])


def test_missing_pyzmq_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match=r"pip install kvpool\[events\]"):
        CurveKeys.load_server(folder)
    result = invoke(folder / "more")
    assert result.exit_code == 2 and "pip install kvpool[events]" in result.output


def test_pyzmq_is_imported_when_it_is_needed() -> None:
    code = "import sys, kvpool, kvpool.network.curve, kvpool.cli; print('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"
