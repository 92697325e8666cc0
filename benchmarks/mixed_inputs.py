"""What requests with different sets of optional input tensors cost.

Triton's sequence batcher hands over only requests of the same set of tensors together. So requests that send
different sets come on trips of their own, where requests with different parameters share one. Steps run all of them.
The same HTTP bodies go to both models: a key of the body becomes a tensor where config.pbtxt declares one of that
name, else a request parameter. All keys but the text and its length ask for what happens anyway.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from triton_inflight.launcher import TritonServer
from triton_inflight.scrape import scrape

REPOSITORY = Path(__file__).parent.parent / "model_repository"
LEAN, COMPAT = "smollm2", "smollm2_compat"
SETS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_p": 1.0, "frequency_penalty": 0.0},
    {"presence_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 0.0},
)


class Load(NamedTuple):
    """A model and how many different sets its clients send."""

    model: str
    sets: int

    @property
    def name(self) -> str:
        way = "tensors" if self.model == COMPAT else "parameters"
        return f"{self.sets} set{'s' if self.sets > 1 else ''} of {way}"


LOADS = (Load(LEAN, 1), Load(LEAN, len(SETS)), Load(COMPAT, 1), Load(COMPAT, len(SETS)))


class Round(NamedTuple):
    """Seconds from the first request to the last answer, and the mean number of sequences in a step."""

    seconds: float
    sequences: float


def ask(url: str, model: str, body: dict[str, Any]) -> None:
    """One request over HTTP generate; its answer has to be whole."""
    data = json.dumps({"return_finish_reason": True, **body}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/{model}/generate", data) as response:
        assert json.load(response)["finish_reason"] == "length"


def run(server: TritonServer, load: Load, sequences: int, tokens: int) -> Round:
    """All sequences at once."""
    before = _steps(server, load.model)
    bodies = [
        {
            "text_input": f"Story {number}: once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
            **SETS[number % load.sets],
        }
        for number in range(sequences)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(sequences) as pool:
        list(pool.map(lambda body: ask(server.http_url, load.model, body), bodies))
    seconds = time.perf_counter() - started
    after = _steps(server, load.model)
    return Round(seconds, (after[0] - before[0]) / (after[1] - before[1]))


def _steps(server: TritonServer, model: str) -> tuple[float, float]:
    """Sequences of all steps so far, and steps, once the metrics have caught up."""
    time.sleep(0.5)
    samples = scrape(server.metrics_url)
    name = "inflight_step_sequences"
    return samples.value(f"{name}_sum", model=model), samples.value(f"{name}_count", model=model)


def report(measured: dict[Load, Sequence[Round]]) -> None:
    """A line for each load; the ratio is the median over rounds of its time to that of the first load's."""
    print(f"\n{'load':<24}{'seconds':>10}{'ratio':>8}{'  (rounds)':<24}{'sequences in a step':>20}")
    base = measured[LOADS[0]]
    for load, rounds in measured.items():
        ratios = sorted(own.seconds / first.seconds for own, first in zip(rounds, base, strict=True))
        spread = f"  ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        seconds = statistics.median(own.seconds for own in rounds)
        together = statistics.median(own.sequences for own in rounds)
        print(
            f"{load.name:<24}{seconds:>10.2f}{statistics.median(ratios):>8.2f}{spread:<24}{together:>20.1f}"
        )


def main(
    sequences: Annotated[int, typer.Option(help="Sequences at the same time.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 48,
    rounds: Annotated[int, typer.Option(help="Rounds, each with all loads, one after the other.")] = 5,
) -> None:
    """Measure the same load with one set of optional tensors, with four, and as parameters.

    Example: python benchmarks/mixed_inputs.py --sequences 32
    """
    measured: dict[Load, list[Round]] = {load: [] for load in LOADS}
    with TritonServer(REPOSITORY, models=[LEAN, COMPAT]) as server:
        for load in LOADS:
            run(server, load, sequences, 4)
        for number in range(rounds):
            for load, found in measured.items():
                found.append(run(server, load, sequences, tokens))
            print(
                f"round {number + 1}: {', '.join(f'{found[-1].seconds:.2f} s' for found in measured.values())}"
            )
    print(f"\n{sequences} sequences at once, {tokens} tokens each, {rounds} rounds")
    report(measured)


if __name__ == "__main__":
    typer.run(main)
