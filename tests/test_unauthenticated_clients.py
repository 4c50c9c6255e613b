"""Clients without the token: a worker decodes nothing that they send, and works on."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gradwire
from gradwire import rpc
from gradwire._core.transport.handshake import CHALLENGE_SIZE
from gradwire._core.transport.listener import MAX_PENDING
from gradwire.errors import AuthenticationError, SetupError
from gradwire.testing import cluster, runtime_of, transports_named
from gradwire.worker import Worker
from tests.processes import rendezvous_file

TIMEOUT = 30.0


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    with cluster(2, transports=transports_named("tcp")) as workers:
        yield workers


def place_of(worker: Worker) -> tuple[str, int]:
    assert runtime_of(worker).agent.member is not None
    host, port = runtime_of(worker).agent.member.addresses[0].place.split("|")
    return host, int(port)


def send_raw(worker: Worker, sent: bytes) -> bytes:
    """Connect without the token and send some bytes. Return what the worker answers until it closes
    the connection."""
    with socket.create_connection(place_of(worker), TIMEOUT) as client:
        answer = b""
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(4096):
                answer += piece
        except OSError:
            pass  # the worker closed the connection in the middle
        return answer


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        os.urandom(5000),
        struct.pack("<QII", 1 << 62, 1 << 31, 0) * 10,
        b"",
        b"gradwire",
        b"gradwire" + bytes(32) + os.urandom(400),
    ],
    ids=["http", "noise", "huge-header", "nothing", "magic-only", "no-proof"],
)
def test_clients_without_the_token_do_no_harm(pair: list[Worker], sent: bytes) -> None:
    assert pair[0].rpc_sync("worker1", max, (1, 2)) == 2
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        assert len(send_raw(pair[1], sent)) <= CHALLENGE_SIZE, (
            "the worker answered more than its challenge"
        )
    assert pair[0].rpc_sync("worker1", max, (3, 4)) == 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000


def test_many_silent_clients_do_not_keep_members_out(pair: list[Worker]) -> None:
    crowd = [socket.create_connection(place_of(pair[1]), TIMEOUT) for _ in range(2 * MAX_PENDING)]
    try:
        assert pair[0].rpc_sync("worker1", max, (1, 2)) == 2
    finally:
        for client in crowd:
            client.close()


def test_guests_are_dismissed_in_time_between_rare_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._core.transport.listener.HANDSHAKE_SECONDS", 0.1)
    options = rpc.Options(heartbeat_interval=1000, heartbeat_limit=1000)
    with cluster(1, transports=transports_named("tcp"), options=options) as (worker,):
        for _ in range(2):  # the second one comes when the first timer is over
            with socket.create_connection(place_of(worker), TIMEOUT) as first:
                with socket.create_connection(place_of(worker), TIMEOUT) as second:
                    assert first.recv(1) == second.recv(1) == b""


def test_a_worker_with_another_token_is_refused() -> None:
    with rendezvous_file() as place:
        options = [rpc.Options(init_method=place, token=16 * token) for token in "12"]
        complaint = r"entry of the worker named 'b' .*knows this group's token.* the same token"
        with (
            gradwire.Worker("a", options=options[0]) as a,
            gradwire.Worker("b", options=options[1]),
            pytest.raises(AuthenticationError, match=complaint),
        ):
            a.rpc_sync("b", max, (1, 2))


def test_a_host_that_other_machines_reach_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(SetupError, match=r"needs a token.*GRADWIRE_TOKEN"):
            gradwire.Worker("a", 0, 1, rpc.Options(host=host, init_method="file:///nowhere"))


def test_a_wildcard_host_is_refused() -> None:
    options = rpc.Options(host="0.0.0.0", token=16 * "t", init_method="file:///nowhere")
    with pytest.raises(SetupError, match="all addresses of this machine"):
        gradwire.Worker("a", 0, 1, options)


def test_workers_listen_on_loopback_unless_told_otherwise() -> None:
    with rendezvous_file() as place:
        with gradwire.Worker("a", options=rpc.Options(init_method=place)) as worker:
            assert runtime_of(worker).agent.member is not None
            for address in runtime_of(worker).agent.member.addresses:
                assert address.transport == "unix" or address.place.startswith("127.0.0.1|")


def test_a_host_of_another_machine_is_explained() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place, host="192.0.2.1", token=16 * "t")
        with pytest.raises(SetupError, match=r"cannot listen on host '192.0.2.1'.*option host"):
            gradwire.Worker("a", options=options)


def test_calls_succeed_while_clients_without_the_token_connect(pair: list[Worker]) -> None:
    stop = threading.Event()

    def send_noise() -> None:
        while not stop.is_set():
            send_raw(pair[1], os.urandom(100))

    threads = [threading.Thread(target=send_noise) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        results: list[Any] = [pair[0].rpc_sync("worker1", max, (n, 0)) for n in range(200)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
    assert results == list(range(200))
