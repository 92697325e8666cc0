"""What watching over sequences costs: the watcher, the metrics and the checks, as shares of a trip's time.

A real server steps a real model for many clients at once. In the model's process every call into those rooms is
timed, the outermost of nested ones alone: calls within a trip delay its sequences, and calls of the background
threads compete with it for a core and for Python's lock. The timing itself is part of what is measured.

Usage: python benchmarks/overhead.py [--sequences 32] [--max-tokens 128] [--model REF]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from triton_inflight.client import GenerationStream
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.weights import DEFAULT_REFERENCE

TARGET = 0.02  # of a trip

# What Triton loads instead of the backend: the same model, with a clock around the calls in question.
TIMED_MODEL = """
import collections, functools, json, threading, time
from triton_inflight import adapter, books, lifecycle, metrics, slots, watcher

seconds = collections.Counter()
calls = collections.Counter()
inside = threading.local()

def timed(owner, name, group):
    function = getattr(owner, name)
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if getattr(inside, "group", None):
            return function(*args, **kwargs)
        inside.group = group
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            inside.group = None
            where = "trip" if getattr(inside, "trip", False) else "background"
            seconds[f"{where} {group}"] += time.perf_counter() - wall
            seconds[f"{where} {group} cpu"] += time.thread_time() - cpu
            calls[f"{where} {group}"] += 1
    setattr(owner, name, wrapper)

for owner, group, names in (
    (metrics.Metrics, "metrics", "count gauge observe step store flush"),
    (books.Books, "metrics", "started tokens ended level"),
    (watcher.Watcher, "watcher", "hold release _cancelled"),
    (lifecycle.Lifecycle, "checks", "_going_on _one_more _bound_queue"),
    (adapter._Carrier, "checks", "is_cancelled is_padding"),
    (slots.Slots, "slots", "trip_ended hold_back"),
):
    for name in names.split():
        timed(owner, name, group)

class TritonPythonModel(adapter.TritonPythonModel):
    auto_complete_config = staticmethod(adapter.TritonPythonModel.auto_complete_config)

    def execute(self, requests):
        inside.trip = True
        started = time.perf_counter()
        result = super().execute(requests)
        seconds["trips"] += time.perf_counter() - started
        calls["trips"] += 1
        inside.trip = False
        return result

    def finalize(self):
        super().finalize()
        with open(REPORT, "w") as file:
            json.dump({"seconds": seconds, "calls": calls}, file)
"""


def main(
    sequences: Annotated[int, typer.Option(min=1, help="Clients at once, each with a stream.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 128,
    model: Annotated[str, typer.Option(help="A model reference.")] = DEFAULT_REFERENCE,
) -> None:
    """Print what each room takes within a trip and beside it."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        repository = _timed_repository(Path(directory, "models"), model, sequences, report)
        with TritonServer(repository) as server:
            prompts = [f"Tell me {i} things about the sea, and why they matter." for i in range(sequences)]
            wanted = {"max_tokens": max_tokens, "ignore_eos": True}
            *_, answers = GenerationStream(server.grpc_url, "timed", wanted).run(prompts)
            assert not any(answer.error for answer in answers), answers
        measured = json.loads(report.read_text())
    _print(measured["seconds"], measured["calls"], sequences)


def _timed_repository(repository: Path, model: str, sequences: int, report: Path) -> Path:
    config = init_model(repository, "timed", model, max_batch_size=sequences)
    config.write_text(config.read_text().replace('backend: "inflight"', 'backend: "python"'))
    (config.parent / "1").mkdir(exist_ok=True)
    (config.parent / "1" / "model.py").write_text(f"REPORT = {str(report)!r}\n{TIMED_MODEL}")
    return repository


def _print(seconds: dict[str, float], calls: dict[str, int], sequences: int) -> None:
    trips, total = calls["trips"], seconds["trips"]
    print(f"{trips} trips of up to {sequences} sequences, {1000 * total / trips:.2f} ms each")
    print(f"{'':>10} {'within the trip':>28} {'in the background':>28}")
    print(f"{'':>10} {'us/trip':>9} {'calls':>9} {'share':>8} {'us/trip':>9} {'calls':>9} {'cpu share':>9}")
    sums = {"trip": 0.0, "background": 0.0}
    for group in ("watcher", "metrics", "checks", "slots"):
        line = f"{group:>10}"
        for where, suffix in (("trip", ""), ("background", " cpu")):
            spent = seconds.get(f"{where} {group}{suffix}", 0.0)
            sums[where] += spent
            line += f" {1e6 * spent / trips:9.1f} {calls.get(f'{where} {group}', 0) / trips:9.2f} {spent / total:8.2%}"
        print(line)
    within, beside = (sums[where] / total for where in ("trip", "background"))
    print(f"within the trip {within:.2%}, target below {TARGET:.0%}; beside it {beside:.2%}")


if __name__ == "__main__":
    typer.run(main)
