"""Connections to an address end at once, and others don't."""

import os
import socket

import pytest

from atoll.hostops import sockets

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="ending others' connections needs root")


def connected(address):
    with socket.create_server((address, 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    client.settimeout(2)
    accepted.settimeout(2)
    return client, accepted


@NEEDS_ROOT
def test_connections_to_one_address_end_and_no_others():
    doomed = [connected("127.66.0.9") for _ in range(3)]
    spared = [connected("127.66.0.10"), connected("127.0.0.1")]
    try:
        ended = sockets.abort_to("127.66.0.9")
    except OSError as error:
        pytest.skip(f"this kernel cannot: {error}")
    assert ended == 3
    for client, _ in doomed:
        with pytest.raises(ConnectionAbortedError):
            client.recv(1)
    for client, accepted in spared:
        accepted.sendall(b"x")
        assert client.recv(1) == b"x"
    assert sockets.abort_to("127.66.0.9") == 0
    for pair in (*doomed, *spared):
        for end in pair:
            end.close()


def test_what_is_asked_names_the_address_and_every_port():
    request = sockets.listing("10.64.0.2")
    assert request.body[:8] == bytes([socket.AF_INET, socket.IPPROTO_TCP, 0, 0]) + sockets.CONNECTED.to_bytes(4, "little")
    assert request.body[8:56] == bytes(48)
    assert request.body[60:64] == bytes([sockets.INET_DIAG_BC_D_COND, 16, 20, 0])
    assert request.body[64:76] == bytes([socket.AF_INET, 32, 0, 0, 255, 255, 255, 255, 10, 64, 0, 2])
