"""Who may connect: CURVE keys, and when a socket needs them.

CURVE is ZeroMQ's own protection of a connection: each side proves that it holds its secret key, and what passes is
encrypted and can't be altered. The side that listens is the server here: it admits the clients whose public keys it
was given (by ZAP, ZeroMQ's authentication protocol), and a client talks to the one server whose public key it has.

Keys are files as pyzmq writes them, ``NAME.key`` with a public key and ``NAME.key_secret`` with both. A server's
folder has ``server.key_secret`` and a ``.key`` file of each client that is admitted; a client's has ``server.key`` and
``client.key_secret``. ``kvpool keygen`` makes a folder that has all of them.

CURVE is used on TCP alone. Whoever may open the file of an ``ipc`` socket is settled by the file system, and ``inproc``
does not leave the process.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.network.pyzmq import import_zmq

KEYS_VARIABLE = "KVPOOL_CURVE_KEYS"
"""Names a folder of keys where no option does."""

SERVER_NAME = "server"
CLIENT_NAME = "client"
PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

HANDSHAKE_SECONDS = 5.0
"""A connection that has not proved who it is by then is closed, and its file descriptor is free again."""

_ZAP_DOMAIN = b"kvpool"
_KEY_CHARACTERS = 40  # 32 bytes in Z85
_MS_PER_SECOND = 1000
_FOLDER_MODE = 0o700
_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644
_FORBIDDEN_MODE = 0o077
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CurveKeys:
    """One side's keys, each 40 characters of Z85.

    Attributes:
        public, secret: its own.
        peers: public keys of the other side: for a server, of the clients that it admits; for a client, of its server.
    """

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]

    @classmethod
    def from_files(cls, secret_file: str | os.PathLike[str], peer_files: Iterable[str | os.PathLike[str]]) -> CurveKeys:
        """Read the keys of one side.

        Args:
            secret_file: of its own; nobody but the owner may have access to it.
            peer_files: public keys of the other side, at least one.

        Raises:
            InvalidArgumentError: a file can't be read, holds no such key, or a secret one is open to others.
            ImportError: pyzmq is not installed, or has no CURVE.
        """
        public, secret = _read_secret(Path(secret_file))
        peers = frozenset(_read_public(Path(path)) for path in peer_files)
        if not peers:
            raise InvalidArgumentError(f"there is no public key of the other side beside {secret_file}")
        return cls(public, secret, peers)

    @classmethod
    def load_server(cls, folder: str | os.PathLike[str]) -> CurveKeys:
        """The keys of the side that listens: ``server.key_secret``, and every ``.key`` but the server's own.

        Raises:
            As ``from_files``.
        """
        folder = _check_folder(folder)
        clients = sorted(path for path in folder.glob(f"*{PUBLIC_SUFFIX}") if path.stem != SERVER_NAME)
        if not clients:
            raise InvalidArgumentError(f"{folder} has no public key of a client ({CLIENT_NAME}{PUBLIC_SUFFIX})")
        return cls.from_files(folder / f"{SERVER_NAME}{SECRET_SUFFIX}", clients)

    @classmethod
    def load_client(cls, folder: str | os.PathLike[str], name: str = CLIENT_NAME) -> CurveKeys:
        """The keys of the side that connects: ``NAME.key_secret`` and ``server.key``.

        Raises:
            As ``from_files``.
        """
        folder = _check_folder(folder)
        return cls.from_files(folder / f"{name}{SECRET_SUFFIX}", [folder / f"{SERVER_NAME}{PUBLIC_SUFFIX}"])

    def protect_client(self, zmq_socket: Any) -> None:
        """Have a socket speak to the server alone; before it connects."""
        (zmq_socket.curve_serverkey,) = self.peers
        zmq_socket.curve_publickey = self.public
        zmq_socket.curve_secretkey = self.secret


class ClientGate:
    """Lets a server's clients in, and nobody else; one per ZeroMQ context, with a thread of its own.

    Args:
        context: whose sockets it watches. They have to be closed before the gate, and the gate before the context.
        keys: the server's.

    Attributes:
        num_refused: connections since creation whose key was not admitted. Whoever has no key at all, or does not know
            the server's, does not come so far and is not counted.

    Raises:
        ImportError: pyzmq is not installed, or has no CURVE.
        zmq.ZMQError: the context has such a watch already.
    """

    def __init__(self, context: Any, keys: CurveKeys) -> None:
        _import_zmq()
        from zmq.auth.thread import ThreadAuthenticator

        self._keys = keys
        self.num_refused = 0
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN.decode(), self)
        self._authenticator.start()

    def protect(self, zmq_socket: Any) -> None:
        """Have a socket admit the clients alone; before it binds."""
        zmq = _import_zmq()
        zmq_socket.curve_server = True
        zmq_socket.curve_publickey = self._keys.public
        zmq_socket.curve_secretkey = self._keys.secret
        zmq_socket.zap_domain = _ZAP_DOMAIN
        # Without it ZeroMQ admits every key as soon as nobody answers for the domain.
        zmq_socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        zmq_socket.handshake_ivl = int(HANDSHAKE_SECONDS * _MS_PER_SECOND)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client is admitted; asked by pyzmq, from its thread."""
        is_admitted = key in self._keys.peers
        self.num_refused += not is_admitted
        return is_admitted

    def close(self) -> None:
        """A second call does nothing."""
        self._authenticator.stop()


def find_keys_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    """The folder that an option names, else that of the variable ``KVPOOL_CURVE_KEYS``, else None."""
    chosen = folder if folder is not None else os.environ.get(KEYS_VARIABLE)
    return Path(chosen) if chosen else None


# ---- addresses ----


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def is_loopback(address: str) -> bool:
    """Whether an address is out of reach for other machines: ``ipc``, ``inproc``, TCP to 127.0.0.0/8, ``::1`` or
    ``localhost``. Wildcards, names of hosts and interfaces, and whatever is not understood are not."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    if not is_tcp(address):
        return False
    host = address[len("tcp://") :].rpartition(":")[0]
    if host.lower() == "localhost":
        return True
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(number, "ipv4_mapped", None)
    return bool((mapped or number).is_loopback)


def require_protection(address: str, keys: object | None, insecure: bool) -> None:
    """Refuse an address that other machines may reach, unless there are keys or a word that none are wanted.

    Args:
        address: as for a socket's ``bind`` or ``connect``.
        keys: what the socket would be protected with: ``CurveKeys``, a folder of keys; None for nothing.
        insecure: the caller asked for no protection.

    Raises:
        InvalidArgumentError: neither; or keys for a transport that can't have them.
    """
    if insecure or is_loopback(address):
        return
    if keys is None:
        raise InvalidArgumentError(
            f"{address!r} can be reached from other machines and has no keys: make some with `kvpool keygen DIR` and"
            f" name the folder (--keys DIR, keys=DIR or {KEYS_VARIABLE}=DIR), use a loopback address, or say that"
            " everybody who can connect is trusted (--insecure, insecure=True)"
        )
    if not is_tcp(address):
        raise InvalidArgumentError(f"{address!r} can't be protected by keys: use tcp://, or a loopback address")


# ---- files ----


def make_key_folder(folder: str | os.PathLike[str], client: str | None = None) -> list[Path]:
    """Make the keys of a server and a client, or of one more client.

    Args:
        folder: made if it is missing, for its owner alone.
        client: name of a client to add to a folder that has a server's key; None for a server and ``client``.

    Returns:
        The files: secret ones have mode 0600.

    Raises:
        InvalidArgumentError: a file is there already, or no server's key for a further client, or not a name, or the
            files can't be written. Nothing was overwritten.
        ImportError: pyzmq is not installed, or has no CURVE.
    """
    _import_zmq()
    folder = Path(folder)
    names = [SERVER_NAME, CLIENT_NAME] if client is None else [client]
    if client is not None:
        if not _NAME.fullmatch(client) or client == SERVER_NAME:
            raise InvalidArgumentError(f"{client!r} is no name for a client: letters, digits, '.', '_' and '-'")
        if not (folder / f"{SERVER_NAME}{PUBLIC_SUFFIX}").is_file():
            raise InvalidArgumentError(f"{folder} has no key of a server ({SERVER_NAME}{PUBLIC_SUFFIX})")
    targets = [folder / f"{name}{suffix}" for name in names for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX)]
    for target in targets:
        if target.exists() or target.is_symlink():
            raise InvalidArgumentError(f"{target} is there already, and keys are not overwritten")
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _write_keys(folder, names, targets)
    except OSError as error:
        raise InvalidArgumentError(f"can't write keys to {folder}: {error.strerror or error}") from None
    return targets


def _write_keys(folder: Path, names: list[str], targets: list[Path]) -> None:
    """All or none. pyzmq writes with the rights of any new file, so it does that where nobody looks."""
    from zmq.auth import create_certificates

    placed: list[Path] = []
    with tempfile.TemporaryDirectory(prefix=".keygen-", dir=folder) as private:
        for name in names:
            create_certificates(private, name)
        try:
            for target in targets:
                mode = _SECRET_MODE if target.name.endswith(SECRET_SUFFIX) else _PUBLIC_MODE
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                placed.append(target)
                with open(descriptor, "wb") as file:
                    file.write(Path(private, target.name).read_bytes())
        except BaseException:
            for target in placed:
                target.unlink(missing_ok=True)
            raise


def _check_folder(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is no folder of keys: `kvpool keygen {folder}` makes one")
    return folder


def _read_secret(path: Path) -> tuple[bytes, bytes]:
    zmq = _import_zmq()
    if os.name == "posix":
        try:
            mode = path.stat().st_mode & 0o777
        except OSError as error:
            raise InvalidArgumentError(f"can't read {path}: {error.strerror or error}") from None
        if mode & _FORBIDDEN_MODE:
            raise InvalidArgumentError(
                f"{path} has mode {mode:04o}, so that others can read or change a secret key: chmod 600 {path}"
            )
    public, secret = _read(path)
    if secret is None:
        raise InvalidArgumentError(f"{path} has no secret key")
    if zmq.curve_public(secret) != public:
        raise InvalidArgumentError(f"the keys in {path} don't belong together")
    return public, secret


def _read_public(path: Path) -> bytes:
    public, secret = _read(path)
    if secret is not None:
        raise InvalidArgumentError(f"{path} holds a secret key, where a public one is to be")
    return public


def _read(path: Path) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate
    from zmq.utils import z85

    try:
        path.stat()  # the error of the library does not tell why
        public, secret = load_certificate(path)
    except OSError as error:
        raise InvalidArgumentError(f"can't read {path}: {error.strerror or error}") from None
    except (ValueError, IndexError):  # the library trips over a key without a value
        raise InvalidArgumentError(f"{path} has no public key") from None
    for key in (public, secret):
        if key is None:
            continue
        try:
            is_key = len(key) == _KEY_CHARACTERS and z85.encode(z85.decode(key)) == key
        except Exception:  # whatever pyzmq's decoder makes of other characters
            is_key = False
        if not is_key:
            raise InvalidArgumentError(f"{path} holds what is no CURVE key ({_KEY_CHARACTERS} characters of Z85)")
    return public, secret


def _import_zmq() -> Any:
    zmq = import_zmq("CURVE keys need")
    if not zmq.has("curve"):
        raise ImportError("this pyzmq is built without CURVE")
    return zmq
