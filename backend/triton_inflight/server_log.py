"""Reads tritonserver's log for the reason of a failure."""

from __future__ import annotations

import json
import re
from pathlib import Path

_LINES_OF_LAST_RESORT = 5
# In order of preference: what says more comes first.
_REASONS = (
    re.compile(r"failed to load '([^']+)' version \d+: (.*)", re.DOTALL),
    re.compile(r"(Error parsing text-format inference\.ModelConfig: .*)"),
    re.compile(r"Poll failed for model directory '([^']+)': (.*)", re.DOTALL),
    re.compile(r"failed to poll model '([^']+)': (.*)", re.DOTALL),
    re.compile(r"(failed to start \w+ service: .*)"),
    re.compile(r"tritonserver: (unrecognized option .*|option .*)"),
    re.compile(r"(error while loading shared libraries: .*)"),
    re.compile(r"error: (creating server: .*)"),
)
_PORT_IN_USE = re.compile(r"failed to start (\w+) service: .*already in use")
_GLOG_PREFIX = re.compile(r"^[IWEF]\d{4} [\d:.]+ \d+ \S+?\] ")


def read_log(path: Path) -> list[str]:
    """The messages of a log, with Triton's prefixes taken off and its escaped line breaks restored."""
    text = path.read_text(errors="replace") if path.exists() else ""
    messages = (_unescape(_GLOG_PREFIX.sub("", line)) for line in text.splitlines())
    return [message for message in messages if message.strip()]


def failure_reason(path: Path) -> str:
    """Why a server did not come up, or went down, as far as its log tells; one line for each cause."""
    messages = read_log(path)
    for pattern in _REASONS:
        found = [match for message in messages if (match := pattern.search(message))]
        if found:
            # dict: the same cause may be logged more than once.
            return "\n".join(dict.fromkeys(": ".join(map(_tidy, match.groups())) for match in found))
    return "\n".join(messages[-_LINES_OF_LAST_RESORT:]) or "it wrote nothing to its log"


def lost_a_port(path: Path) -> bool:
    """Whether the server ended because somebody else had one of its ports."""
    return any(_PORT_IN_USE.search(message) for message in read_log(path))


def last_message(path: Path) -> str:
    """The newest message that is more than a table's frame, for a line of progress."""
    telling = [message for message in read_log(path) if message[0] not in "+|"]
    return telling[-1].splitlines()[0] if telling else ""


def _unescape(message: str) -> str:
    """Triton 2.51 logs messages as JSON strings; older ones do not."""
    try:
        decoded = json.loads(message)
    except ValueError:
        return message
    return decoded if isinstance(decoded, str) and decoded else message


def _tidy(reason: str) -> str:
    """Leave out the wrappers that Triton puts around a Python error, and the traceback."""
    reason = reason.split("\n\nAt:\n")[0].strip()
    return re.sub(r"^(Internal|Invalid argument): (TritonModelException: )?", "", reason)
