"""What is sent to have a far end answer: a well-formed first packet of the connection that it has."""

import socket
import struct

from atoll.hostops import resets
from atoll.hostops.conntrack import Connection

FAR = Connection("203.0.113.1", 40001, "203.0.113.2", 5432)


def total(data):
    found = sum(struct.unpack(f">{len(data) // 2}H", data))
    while found >> 16:
        found = (found & 0xFFFF) + (found >> 16)
    return found


def test_it_is_the_first_packet_of_that_connection():
    packet = resets.question(FAR, 0x01020304)
    assert len(packet) == 40
    assert (packet[9], packet[12:16], packet[16:20]) == (socket.IPPROTO_TCP, socket.inet_aton(FAR.source), socket.inet_aton(FAR.peer))
    source, peer, number, acknowledged, offset, flags = struct.unpack(">HHIIBB", packet[20:34])
    assert (source, peer, number, acknowledged) == (40001, 5432, 0x01020304, 0)
    assert (offset >> 4, flags) == (5, 0x02)


def test_its_checksum_is_right():
    packet = resets.question(FAR, 0xFFFFFFFF)
    pseudo = packet[12:20] + struct.pack(">BBH", 0, socket.IPPROTO_TCP, 20)
    assert total(pseudo + packet[20:]) == 0xFFFF
