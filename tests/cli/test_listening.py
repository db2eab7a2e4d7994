"""`--host` and `--port` that cannot be had are one message with a remedy."""

import socket

import pytest

from router.cli.errors import CliError
from router.cli.listening import listen, url


def test_a_port_in_use_names_the_port_and_another_one() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError) as refused:
            listen("127.0.0.1", port)
    assert str(port) in refused.value.message
    assert "--port 0" in (refused.value.hint or "")


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_foreign_address_is_refused(host: str) -> None:
    with pytest.raises(CliError) as refused:
        listen(host, 0)
    assert host in refused.value.message
    assert "--host 127.0.0.1" in (refused.value.hint or "")


def test_url_is_one_a_client_here_can_use() -> None:
    with listen("0.0.0.0", 0) as listener:
        port = listener.getsockname()[1]
        assert url(listener) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass
