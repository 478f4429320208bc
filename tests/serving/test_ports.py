from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from moepress.errors import ServerDied
from moepress.serving import ports
from moepress.serving.death import Cause


def test_ports_are_below_those_that_the_kernel_hands_out() -> None:
    """Else any outgoing connection may be given one while the server loads its model."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = ports.free_ports(8)
    assert len(set(found)) == 8
    assert all(port < lowest for port in found)


def test_a_seed_does_not_make_two_processes_choose_alike() -> None:
    random.seed(0)
    first = ports.free_ports(8)
    random.seed(0)
    assert ports.free_ports(8) != first


def test_where_the_kernel_hands_out_every_port_there_is_one_still(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_KERNELS_RANGE", tmp_path / "range")
    assert len(set(ports.free_ports(3))) == 3


@pytest.mark.parametrize("how", ["listening", "outgoing"])
def test_a_port_that_is_taken_is_seen_before_anything_starts(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rival, socket.create_connection(rival.getsockname()) as outgoing:
        port = (rival if how == "listening" else outgoing).getsockname()[1]
        with pytest.raises(ServerDied, match=f"port {port} of 127.0.0.1 is taken") as taken:
            ports.check_port(f"http://127.0.0.1:{port}")
        assert taken.value.cause is Cause.PORT_TAKEN


@pytest.mark.parametrize("url", ["", "http://10.255.255.1:30000", "http://no-such-host.invalid:30000"])
def test_an_address_that_is_not_here_is_the_servers_to_refuse(url: str) -> None:
    ports.check_port(url)


def test_a_port_is_free_again_when_its_server_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()  # leaves TIME_WAIT on the server's port
        port = server.getsockname()[1]
    ports.check_port(f"http://127.0.0.1:{port}")
