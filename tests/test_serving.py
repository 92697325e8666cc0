"""The whole: a real language model on a real tritonserver, against the oracle."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from conftest import EMBEDDED, solo
from serving import add_model, generate, generate_stream, grpc_generate, settled
from triton_inflight import weights
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

LENGTHS = [1, 2, 3, 7, 15, 31, 32, 33, 50, 64, 90, 130, 200, 260, 330, 400]
TEXT = (
    "In-flight batching lets a new request join the batch while other requests are still being answered. The "
    "scheduler decides at every step which sequences run, and how many of their tokens. Keys and values of all "
    "tokens stay in blocks of a store, so that nothing is computed twice. When a sequence is finished, its blocks "
    "go back, and the next request takes its place at once. Nobody waits for the longest answer of a batch. "
)
MODELS = {
    "whole": {},
    "chunked": {"max_num_tokens": 32},
    "four_slots": {"slots": 4, "max_steps_per_execute": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        add_model(repository, name, EMBEDDED, dtype="float32", max_tokens_in_paged_kv_cache=16384, **changes)
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, int, int, str]]:
    """(prompt, max_tokens, output tokens, text) of 16 prompts, each generated alone by the stock model."""
    torch.set_num_threads(2)
    model, tokenizer = weights.load(EMBEDDED, dtype=torch.float32, device=torch.device("cpu"))
    ids = tokenizer.encode(TEXT * 12)
    rows = []
    for index, length in enumerate(LENGTHS):
        prompt = tokenizer.decode(ids[index : index + length])
        tokens = tokenizer.encode(prompt)
        max_tokens = 8 + 3 * (index % 6)
        output = solo(model, tokens, max_tokens)
        rows.append((prompt, max_tokens, len(output), tokenizer.decode(output, skip_special_tokens=True)))
    torch.set_num_threads(1)
    return rows


@pytest.mark.parametrize("model", MODELS)
def test_mixed_clients_get_what_each_prompt_generates_alone(
    server: TritonServer, expected: list[tuple[str, int, int, str]], model: str
) -> None:
    """Prompts of 1 to 400 tokens, 0 to 300 ms apart, from four kinds of clients with differing parameters."""
    dice = random.Random(0)
    delays = [dice.uniform(0, 0.3) for _ in expected]

    def ask(index: int) -> tuple[int, str]:
        prompt, max_tokens, _, _ = expected[index]
        time.sleep(sum(delays[:index]) / 4)
        if index % 4 == 0:
            answer = grpc_generate(server, model, prompt, max_tokens=max_tokens)
            return answer.num_output_tokens, answer.text
        if index % 4 == 1:
            answer = grpc_generate(server, model, prompt, max_tokens=max_tokens, stream=False)
            return answer.num_output_tokens, answer.text
        wanted = {"max_tokens": max_tokens, "return_num_output_tokens": True}
        if index % 4 == 2:
            reply = generate(server, model, prompt, return_finish_reason=True, **wanted)
            return reply["num_output_tokens"], reply["text_output"]
        events = generate_stream(server, model, prompt, **wanted)
        return sum(e["num_output_tokens"] for e in events), "".join(e["text_output"] for e in events)

    with ThreadPoolExecutor(len(expected)) as pool:
        answers = list(pool.map(ask, range(len(expected))))
    assert answers == [(tokens, text) for _, _, tokens, text in expected]


def test_new_and_in_flight_sequences_shared_steps(server: TritonServer) -> None:
    """Reads what the mixed clients above left in the metrics."""
    samples = settled(server, lambda s: s.value("inflight_sequences_total", model="whole") >= len(LENGTHS))
    assert samples.value("inflight_steps_total", model="whole", kind="mixed") > 0
    histogram = samples.histogram("inflight_step_sequences", model="whole")
    assert sum(count for bound, count in histogram.items() if bound >= 4) > 0
    small = samples.histogram("inflight_step_sequences", model="four_slots")
    assert max(bound for bound, count in small.items() if count) == 4
    chunked = samples.histogram("inflight_step_tokens", model="chunked")
    assert max(bound for bound, count in chunked.items() if count) == 32


def test_nothing_is_held_after_the_load(server: TritonServer) -> None:
    samples = settled(server, lambda s: s.value("inflight_kv_blocks", state="used") == 0)
    assert samples.value("inflight_kv_blocks", state="total") == 3 * 16384 / 32
    assert samples.value("inflight_sequences") == 0
