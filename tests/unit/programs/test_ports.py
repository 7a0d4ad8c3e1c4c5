import os
import socket

import pytest

from atoll.base.errors import Code, Refused
from atoll.programs import ports


def test_a_taken_port_names_its_owner() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not ports.is_free(port)
        with pytest.raises(Refused) as refused:
            ports.require_free({"the edge": port})
    assert refused.value.code is Code.PORT_TAKEN
    assert str(os.getpid()) in refused.value.message
    assert "the edge" in refused.value.message
    assert refused.value.detail["pid"] == os.getpid()
    assert ports.is_free(port)
    ports.require_free({"the edge": port})


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert ports.listener(unused.getsockname()[1]) is None
