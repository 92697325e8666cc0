"""tritonserver's options, as far as the launcher has to understand them, and the ports to listen on."""

from __future__ import annotations

import argparse
import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from triton_inflight.triton_home import LaunchError

SERVICES = ("http", "grpc", "metrics")
# What the launcher sets itself, and where to say it instead.
_OWN_OPTIONS = {
    "--model-repository": "--model-repository before the --",
    "--model-store": "--model-repository before the --",
    "--load-model": "--model before the --",
    "--log-file": "--log-file before the --",
    "--backend-directory": "the variable TRITON_INFLIGHT_SERVER, or `triton-inflight install`",
    **{f"--{service}-port": f"--{service}-port before the --" for service in SERVICES},
    **{f"--{service}-address": "--host before the --" for service in SERVICES},
}


@dataclass(frozen=True)
class KnownOptions:
    """Options of tritonserver that the launcher acts on too.

    Attributes:
        exit_timeout_seconds: how long Triton waits, when stopped, for requests in flight and open connections.
        exit_on_error: whether Triton ends when a model does not load.
    """

    exit_timeout_seconds: int
    exit_on_error: bool


def read_options(options: Sequence[str]) -> KnownOptions:
    """Read options that are meant for tritonserver, in either spelling (``--a=b``, ``--a b``).

    Raises:
        LaunchError: one is the launcher's to set, or a known one has no value or a wrong one.
    """
    for option in options:
        name = option.split("=")[0]
        if name in _OWN_OPTIONS:
            raise LaunchError(f"option {name} is not passed to tritonserver: use {_OWN_OPTIONS[name]}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--exit-timeout-secs", type=int, default=10)
    parser.add_argument("--exit-on-error", default="true")
    try:
        known = parser.parse_known_args(options)[0]
    except argparse.ArgumentError as error:
        raise LaunchError(f"option of tritonserver: {error}") from error
    return KnownOptions(known.exit_timeout_secs, known.exit_on_error not in ("false", "0"))


def choose_ports(host: str, wanted: Sequence[int | None]) -> list[int]:
    """The wanted ports, and free ones in place of None.

    Raises:
        LaunchError: a wanted port is taken, or the host's address is not this machine's.
    """
    with contextlib.ExitStack() as sockets:
        # All stay bound until the last is chosen, so that no two are the same.
        return [_bind(sockets.enter_context(socket.socket()), host, port) for port in wanted]


def _bind(probe: socket.socket, host: str, port: int | None) -> int:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as tritonserver does
    try:
        probe.bind((host, port or 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use; stop what uses it, or choose another port (0: any free one)"
        else:
            reason = f"cannot listen on {host} port {port or 'any'}: {error.strerror}"
        raise LaunchError(reason) from error
    chosen: int = probe.getsockname()[1]
    return chosen
