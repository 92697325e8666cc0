"""How long streams stall while a long prompt is read.

Sequences stream from a real tritonserver over HTTP; then a long prompt arrives. Compared are the times between two
responses of a stream before the prompt is sent, and from then to the prompt's first token.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from triton_inflight.bench_machine import describe_machine, in_words
from triton_inflight.bench_options import key_and_value
from triton_inflight.bench_rounds import quantile
from triton_inflight.bench_served import copy_model
from triton_inflight.bench_sse import stream_all
from triton_inflight.launcher import TritonServer

REPOSITORY = Path(__file__).parent.parent / "model_repository"
TOKENS = range(1000, 40_000)  # ordinary ones of the model's vocabulary
STREAM_PROMPT = 64
QUIET_SECONDS = 2.0
SETTLED_SECONDS = 0.7  # until all streams have begun


class Round(NamedTuple):
    """Seconds between two responses of a stream, and from the long prompt to its first token."""

    quiet: list[float]
    during: list[float]
    prompt: float

    def ratio(self) -> float:
        """The 99th percentile during the prompt over the quiet median."""
        return quantile(self.during, 0.99) / statistics.median(self.quiet)


def body(prompt: Sequence[int], max_tokens: int) -> bytes:
    request = {"text_input": "", "input_ids": json.dumps(list(prompt)), "max_tokens": max_tokens}
    return json.dumps({**request, "ignore_eos": True, "stream": True}).encode()


def run(
    server: TritonServer, model: str, sequences: int, tokens: int, prompt: int, dice: random.Random
) -> Round:
    host, port = server.http_url.removeprefix("http://").split(":")
    path = f"/v2/models/{model}/generate_stream"
    results: dict[str, tuple[float, list[list[float]]]] = {}

    def follow(name: str, bodies: list[bytes]) -> None:
        started = time.perf_counter()
        _, streams = stream_all(host, int(port), path, bodies)
        results[name] = started, [[event.time for event in stream] for stream in streams]

    streams = [body(dice.choices(TOKENS, k=STREAM_PROMPT), tokens) for _ in range(sequences)]
    thread = threading.Thread(target=follow, args=("streams", streams))
    thread.start()
    time.sleep(QUIET_SECONDS)
    follow("prompt", [body(dice.choices(TOKENS, k=prompt), 1)])
    thread.join()
    started, arrivals = results["streams"]
    sent, ((first, *_), *_) = results["prompt"]
    begin = sent - started
    quiet, during = [], []
    for times in arrivals:
        if times[-1] < begin + first:
            raise SystemExit("the streams ended before the prompt's first token; raise --output-tokens")
        for before, after in itertools.pairwise(times):
            if before > SETTLED_SECONDS and after < begin:
                quiet.append(after - before)
            elif after > begin and before < begin + first:
                during.append(after - before)
    return Round(quiet, during, first)


def main(
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that stream.")] = 16,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each of them generates.")] = 500,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds measured, after one to warm up.")] = 5,
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="In place of a parameter of config.pbtxt."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
) -> None:
    """Measure how long streams stall while a long prompt is read; leave the machine alone while it runs."""
    machine, dice, model = describe_machine(), random.Random(0), "smollm2"
    print(in_words(machine))
    with tempfile.TemporaryDirectory() as directory:
        copy_model(REPOSITORY, model, dict(map(key_and_value, changed or [])), Path(directory))
        with TritonServer(directory) as server:
            measured = [
                run(server, model, sequences, output_tokens, prompt_tokens, dice) for _ in range(rounds + 1)
            ]
    figures: dict[str, list[float]] = {
        "quiet median ms": [statistics.median(r.quiet) * 1e3 for r in measured[1:]],
        "median ms during the prompt": [statistics.median(r.during) * 1e3 for r in measured[1:]],
        "p99 ms during the prompt": [quantile(r.during, 0.99) * 1e3 for r in measured[1:]],
        "p99 during the prompt over quiet median": [r.ratio() for r in measured[1:]],
        "prompt's time to first token s": [r.prompt for r in measured[1:]],
    }
    print(
        f"{sequences} streams, a prompt of {prompt_tokens} tokens; median (lowest to highest) of {rounds} rounds"
    )
    for name, values in figures.items():
        print(f"{name:<42} {statistics.median(values):7.2f}  ({min(values):.2f} to {max(values):.2f})")
    if json_path is not None:
        report: dict[str, Any] = {"machine": machine, "sequences": sequences, "prompt_tokens": prompt_tokens}
        json_path.write_text(
            json.dumps({**report, "set": changed or [], "figures": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
