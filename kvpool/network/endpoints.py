"""Endpoints of an event publisher: which are bound, and what a data-parallel rank adds. The rules are vLLM's."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, TypeVar

from kvpool.errors import InvalidArgumentError

HOST_IP_VARIABLE = "KVPOOL_HOST_IP"

ANY_FREE_PORT_OF_THE_NODE = "tcp://*:0"

# Any address outside: a UDP socket that is connected to it sends nothing, but gets the address of this node.
_OUTSIDE = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}
_OUTSIDE_PORT = 80

OptionalEndpoint = TypeVar("OptionalEndpoint", str, "str | None")


def is_bind_endpoint(endpoint: str) -> bool:
    """Whether a PUB socket binds here: wildcards, ``ipc`` and ``inproc``. It connects to anything else.

    vLLM: ``ZmqEventPublisher._is_bind_endpoint``.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def offset_endpoint_port(endpoint: OptionalEndpoint, data_parallel_rank: int) -> OptionalEndpoint:
    """The endpoint of one rank: the port plus the rank, or a suffix for ``inproc``.

    Returns:
        The endpoint itself for rank 0, for None, and where the system chooses the port (0, as in vLLM, or ``*``).

    Raises:
        InvalidArgumentError: another transport, which has no place for a rank, or a port that is no number.

    vLLM: ``ZmqEventPublisher.offset_endpoint_port``.
    """
    if not endpoint or data_parallel_rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{data_parallel_rank}"
    if "tcp" not in endpoint:
        raise InvalidArgumentError(f"rank {data_parallel_rank} needs a tcp or inproc endpoint, not {endpoint!r}")
    address, colon, port = endpoint.rpartition(":")
    if not colon or port in ("0", "*"):
        return endpoint
    if not port.isdecimal():
        raise InvalidArgumentError(f"the endpoint {endpoint!r} does not end with a port")
    return f"{address}:{int(port) + data_parallel_rank}"


def bind(zmq_socket: Any, endpoint: str) -> str:
    """Bind a ZeroMQ socket.

    Args:
        endpoint: ``tcp://*:0`` binds a free port of this node's address, see ``node_ip``.

    Returns:
        The endpoint; where the system chose the port, with that port.

    Raises:
        InvalidArgumentError: the address of this node is not known.
    """
    if endpoint == ANY_FREE_PORT_OF_THE_NODE:
        ip = node_ip()
        endpoint = f"tcp://[{ip}]:0" if ":" in ip else f"tcp://{ip}:0"
    if endpoint.startswith("tcp://["):
        zmq_socket.ipv6 = True
    zmq_socket.bind(endpoint)
    if endpoint.startswith("tcp://") and endpoint.endswith((":0", ":*")):
        return str(zmq_socket.last_endpoint.rstrip(b"\0").decode())
    return endpoint


def node_ip() -> str:
    """The address under which others reach this node: ``KVPOOL_HOST_IP``, else that of the default route.

    Raises:
        InvalidArgumentError: there is no route, or the variable holds no address, or one that stands for any.
    """
    ip = os.environ.get(HOST_IP_VARIABLE) or _address_of_default_route()
    try:
        is_any = ip is None or ipaddress.ip_address(ip).is_unspecified
    except ValueError:
        is_any = True
    if ip is None or is_any:
        raise InvalidArgumentError(f"the address of this node is not known: set {HOST_IP_VARIABLE}")
    return ip


def _address_of_default_route() -> str | None:
    for family, outside in _OUTSIDE.items():
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, _OUTSIDE_PORT))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
