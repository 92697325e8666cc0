"""A light HTTP client for streams of server-sent events, for any server.

A client in Python can cost as much as the server that it measures. So while a round runs, this one only notes
down what came when: one asyncio loop, a raw connection for each stream, no parsing. The events are cut out of
it once the round is over. A response costs it some 50 microseconds.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from triton_inflight.errors import InflightError

_LAST_CHUNK = b"\r\n0\r\n\r\n"  # with the end of the line before: a header may end in 0, too


class StreamError(InflightError):
    """A server answered otherwise than with a stream of events."""


@dataclass(frozen=True)
class Event:
    """An event of a stream: its data, and when it was complete, in seconds since the first request."""

    time: float
    data: bytes


@dataclass
class _Stream(asyncio.Protocol):
    """Collects what a server sends on one connection."""

    done: asyncio.Future[None]
    received: list[tuple[float, bytes]] = field(default_factory=list)
    _tail: bytes = b""

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def stream_all(
    host: str, port: int, path: str, bodies: Sequence[bytes], timeout: float = 600
) -> tuple[list[float], list[list[Event]]]:
    """POST all bodies at once, each on a connection of its own, and follow the streams to their ends.

    Returns:
        When each request was sent, in seconds since the first; and the events of each.

    Raises:
        StreamError: a server answered with another status than 200, or the time is over.
        OSError: the server cannot be reached.
    """
    return asyncio.run(_stream_all(host, port, path, bodies, timeout))


async def _stream_all(
    host: str, port: int, path: str, bodies: Sequence[bytes], timeout: float
) -> tuple[list[float], list[list[Event]]]:
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: _Stream(loop.create_future()), host, port) for _ in bodies
    ]
    try:
        moments = []
        for (transport, _), body in zip(connections, bodies, strict=True):
            moments.append(time.perf_counter())
            transport.write(_request(host, port, path, body))
        await asyncio.wait_for(asyncio.gather(*(stream.done for _, stream in connections)), timeout)
    except TimeoutError as error:
        raise StreamError(
            f"http://{host}:{port}{path}: a stream had not ended after {timeout:g} s"
        ) from error
    finally:
        for transport, _ in connections:
            transport.close()
    sent = [moment - moments[0] for moment in moments]
    return sent, [_events(stream.received, moments[0]) for _, stream in connections]


def _request(host: str, port: int, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _events(received: list[tuple[float, bytes]], start: float) -> list[Event]:
    """The events in what a connection received."""
    raw = b"".join(data for _, data in received)
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status + b" ":
        raise StreamError(f"{status.decode(errors='replace')}: {rest[:500].decode(errors='replace')}")
    ends: list[int] = []  # where each piece that was received ends
    for _, data in received:
        ends.append(len(data) + (ends[-1] if ends else 0))
    body, places = _without_chunks(raw, len(head) + 4, b"chunked" in head.lower())
    events, position = [], 0
    while (end := body.find(b"\n\n", position)) >= 0:
        block, position = body[position:end], end + 2
        for line in block.split(b"\n"):
            if line.startswith(b"data:"):
                last_byte = _place(places, end + 1)
                moment = received[bisect.bisect_right(ends, last_byte)][0] - start
                events.append(Event(moment, line.removeprefix(b"data:").strip()))
    return events


def _without_chunks(raw: bytes, position: int, chunked: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """The body, and pairs of (place in the body, place in ``raw``) where each of its pieces begins."""
    if not chunked:
        return raw[position:], [(0, position)]
    body, places = bytearray(), []
    while (line_end := raw.find(b"\r\n", position)) >= 0:
        size = int(raw[position:line_end].partition(b";")[0], 16)
        if size == 0:
            break
        places.append((len(body), line_end + 2))
        body += raw[line_end + 2 : line_end + 2 + size]
        position = line_end + 2 + size + 2
    return bytes(body), places


def _place(places: list[tuple[int, int]], in_body: int) -> int:
    """Where in ``raw`` a byte of the body is."""
    start, in_raw = places[bisect.bisect_right(places, (in_body, 2**62)) - 1]
    return in_raw + in_body - start
