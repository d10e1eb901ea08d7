"""Which endpoints are bound, and what a data-parallel rank adds."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.network import endpoints
from kvpool.network.endpoints import HOST_IP_VARIABLE, bind, is_bind_endpoint, node_ip, offset_endpoint_port

BOUND = ("tcp://*:5557", "tcp://*:0", "tcp://[::]:5557", "ipc:///tmp/kv", "inproc://kv", "tcp://127.0.0.1:*")
CONNECTED = ("tcp://router:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:0")


def test_wildcards_and_local_transports_are_bound() -> None:
    assert all(map(is_bind_endpoint, BOUND))
    assert not any(map(is_bind_endpoint, CONNECTED))


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        (None, 0, None),
        (None, 3, None),
        ("", 3, ""),
        ("ipc:///tmp/kv", 0, "ipc:///tmp/kv"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://router:5557", 1, "tcp://router:5558"),
        ("tcp://[::1]:5557", 2, "tcp://[::1]:5559"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("inproc://kv", 3, "inproc://kv_dp3"),
    ],
)
def test_each_rank_has_an_endpoint(endpoint: Any, rank: int, expected: Any) -> None:
    assert offset_endpoint_port(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "udp://127.0.0.1:5", "tcp://host:port", "tcp://host"])
def test_a_rank_without_a_place_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError) as raised:
        offset_endpoint_port(endpoint, 1)
    assert type(raised.value) is InvalidArgumentError


def test_a_port_that_the_system_chose_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq")
    monkeypatch.setenv(HOST_IP_VARIABLE, "127.0.0.1")
    with zmq.Context() as context:
        for endpoint in ("tcp://*:0", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
            with context.socket(zmq.PUB) as one, context.socket(zmq.SUB) as other:
                bound = bind(one, endpoint)
                assert bound.startswith("tcp://127.0.0.1:") and bound.rpartition(":")[2].isdecimal()
                other.connect(bound)
        with context.socket(zmq.PUB) as one:
            assert bind(one, "inproc://kv") == "inproc://kv"


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq")
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    monkeypatch.setenv(HOST_IP_VARIABLE, "::1")
    with zmq.Context() as context, context.socket(zmq.PUB) as one, context.socket(zmq.PUB) as other:
        assert bind(one, "tcp://*:0").startswith("tcp://[::1]:")
        assert bind(other, "tcp://[::1]:*").startswith("tcp://[::1]:")


def test_the_address_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_IP_VARIABLE, "10.1.2.3")
    assert node_ip() == "10.1.2.3"
    for wrong in ("0.0.0.0", "::", "my-host"):
        monkeypatch.setenv(HOST_IP_VARIABLE, wrong)
        with pytest.raises(InvalidArgumentError, match=HOST_IP_VARIABLE):
            node_ip()
    monkeypatch.delenv(HOST_IP_VARIABLE)
    monkeypatch.setattr(endpoints, "_address_of_default_route", lambda: "10.9.9.9")
    assert node_ip() == "10.9.9.9"
    monkeypatch.setattr(endpoints, "_address_of_default_route", lambda: None)
    with pytest.raises(InvalidArgumentError, match=HOST_IP_VARIABLE):
        node_ip()


@pytest.mark.vllm
def test_rules_are_those_of_vllm() -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events").ZmqEventPublisher
    rng = random.Random(3)
    hosts = ["*", "127.0.0.1", "[::]", "[fe80::1]", "router", "a-b.c"]
    endpoints = [f"tcp://{host}:{rng.choice([0, 1, 5557, 60000])}" for host in hosts for _ in range(4)]
    endpoints += ["inproc://kv", "inproc://a:b", "ipc:///run/kv", "ipc:///run/inproc", "", "tcp://host:port", "x"]
    for endpoint in (*endpoints, *BOUND[:5], *CONNECTED):
        assert is_bind_endpoint(endpoint) == theirs._is_bind_endpoint(endpoint)
        for rank in (0, 1, 7):
            results = []
            for call in (offset_endpoint_port, theirs.offset_endpoint_port):
                try:
                    results.append(call(endpoint, rank))
                except ValueError:
                    results.append(ValueError)
            assert results[0] == results[1], (endpoint, rank)
