"""What every engine's own process shares: it loads, then runs rounds that come as lines of JSON.

Runs with the Python of that engine's environment, so it needs nothing but the standard library.

    in   {"prompts": [[token, ...], ...], "output_tokens": 64}
    out  {"arrivals": [[seconds, ...], ...], "tokens": [[count, ...], ...], "cpu": seconds}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def answer_rounds(run: Callable[[list[list[int]], int], Answer], about: dict[str, Any]) -> None:
    """Say that the engine is ready, then run a round for every line of the input until it ends."""
    reply = claim_output()
    reply(about)
    for line in sys.stdin:
        task = json.loads(line)
        reply(run(task["prompts"], task["output_tokens"]))


_output: Any = None


def claim_output() -> Callable[[Answer], None]:
    """Keep the output for answers alone; what libraries print goes to the errors. To be called first."""
    global _output
    if _output is None:
        _output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def reply(answer: Answer) -> None:
        print(json.dumps(answer), file=_output, flush=True)

    return reply
