"""The life of a sequence on the real server: however it begins, collides, or ends, nobody hangs or leaks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import byte_tokenizer, random_prompt, solo, tiny_model
from idle import assert_slots_usable
from serving import (
    Call,
    Disconnecting,
    add_model,
    generate,
    generate_stream,
    http_client,
    save_model,
    settled,
)
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

LONG = 3000  # tokens: some seconds of generation
SLOTS = 4


def _long_model() -> torch.nn.Module:
    """A tiny model with a long context that practically never ends by itself."""
    model = tiny_model("llama", max_position_embeddings=8192, tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    return model


@pytest.fixture(scope="module")
def model():
    return _long_model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    shared = {"dtype": "float32", "max_tokens_in_paged_kv_cache": 32768, "slots": SLOTS}
    add_model(repository, "tiny", folder, **shared)
    add_model(repository, "hasty", folder, **shared, max_time=1)
    add_model(repository, "two", folder, **shared, edit=lambda text: text.replace("count: 1", "count: 2"))
    add_model(repository, "direct", folder, **shared, edit=_direct)
    add_model(repository, "queue", folder, **shared, max_running_sequences=1, max_queue_size=1)
    with TritonServer(repository) as running:
        yield running


def _direct(text: str) -> str:
    return re.sub(r"oldest \{.*?\}", "direct { }", text)


def _expected(model, prompt: str, max_tokens: int) -> str:
    tokenizer = byte_tokenizer()
    return tokenizer.decode(solo(model, tokenizer.encode(prompt), max_tokens), skip_special_tokens=True)


def _all_free(server: TritonServer, name: str) -> None:
    """Nothing is held, and as many new sequences as there are slots run at once."""
    settled(server, lambda s: s.value("inflight_kv_blocks", model=name, state="used") == 0)
    settled(server, lambda s: s.value("inflight_sequences", model=name) == 0)
    streams = [Disconnecting(server, name, "slot", max_tokens=LONG) for _ in range(SLOTS)]
    for stream in streams:
        assert stream.read_event() is not None
    settled(server, lambda s: s.value("inflight_sequences", model=name, state="active") == SLOTS)
    for stream in streams:
        stream.leave()
    settled(server, lambda s: s.value("inflight_sequences", model=name) == 0)


def test_start_and_end_in_one_request_is_answered_in_its_trip(server: TritonServer, model) -> None:
    other = Disconnecting(server, "tiny", "other", max_tokens=LONG)
    other.read_event()
    call = Call(server, "tiny", "both flags", sequence_id=2**32, start=True, end=True, max_tokens=40).wait()
    assert call.error is None
    assert call.text == _expected(model, "both flags", 40)
    assert other.read_event() is not None, "the neighbour goes on"
    other.leave()
    _all_free(server, "tiny")


def test_start_and_end_beyond_the_bound_is_an_error(server: TritonServer) -> None:
    call = Call(server, "tiny", "x", sequence_id=2**32 + 1, start=True, end=True, max_tokens=257).wait()
    assert "max_tokens is 257" in call.error
    assert "at most 256 tokens (max_tokens_in_one_trip" in call.error


def test_a_start_on_a_live_id_ends_both_with_an_error(server: TritonServer) -> None:
    older = Call(server, "tiny", "older", sequence_id=2**33, start=True, max_tokens=LONG)
    older.take()
    newer = Call(server, "tiny", "newer", sequence_id=2**33, start=True, max_tokens=LONG)
    for call in (newer.wait(), older.wait()):
        assert f"sequence ID {2**33} got a second request while it was live" in call.error
    again = Call(server, "tiny", "again", sequence_id=2**33, start=True, max_tokens=5).wait()
    assert again.finish_reason == "length"
    _all_free(server, "tiny")


def test_a_request_without_start_on_an_unknown_id_is_an_error(server: TritonServer) -> None:
    call = Call(server, "tiny", "x", sequence_id=2**34, max_tokens=5).wait()
    assert re.search(r"START|sequence_start", call.error)


def test_a_disconnect_frees_blocks_and_slot(server: TritonServer) -> None:
    streams = [Disconnecting(server, "tiny", random_prompt(i, 50), max_tokens=LONG) for i in range(SLOTS)]
    for stream in streams:
        stream.read_event()
    settled(server, lambda s: s.value("inflight_kv_blocks", model="tiny", state="used") >= SLOTS)
    for stream in streams:
        stream.leave()
    _all_free(server, "tiny")


def test_a_disconnect_in_tritons_backlog_costs_no_slot(server: TritonServer) -> None:
    streams = [Disconnecting(server, "tiny", "in a slot", max_tokens=LONG) for _ in range(SLOTS)]
    for stream in streams:
        stream.read_event()
    waiting = [Call(server, "tiny", "in the backlog", max_tokens=LONG) for _ in range(3)]
    for call in waiting:
        call._client.stop_stream(cancel_requests=True)
    for stream in streams:
        stream.leave()
    _all_free(server, "tiny")


def test_a_deadline_sends_what_there_is_with_reason_timeout(server: TritonServer) -> None:
    events = generate_stream(server, "hasty", "x", max_tokens=8000, return_finish_reason=True)
    assert events[-1]["finish_reason"] == "timeout"
    assert len(events) > 5
    reply = generate(server, "tiny", "x", max_tokens=8000, return_finish_reason=True, max_time=0.5)
    assert reply["finish_reason"] == "timeout"
    assert reply["text_output"]
    by_timeout = Call(server, "tiny", "x", timeout_us=500_000, max_tokens=8000).wait()
    assert by_timeout.finish_reason == "timeout"
    _all_free(server, "tiny")


def test_a_deadline_before_the_first_token_is_an_error(server: TritonServer) -> None:
    reply = generate(server, "tiny", random_prompt(0, 5000), max_tokens=8, max_time=1e-6)
    assert "the time allowed is over before the first token" in reply["error"]


def test_sequences_beyond_the_queue_are_refused_as_unavailable(server: TritonServer) -> None:
    running = Call(server, "queue", "runs", max_tokens=600)
    running.take()
    waiting = Call(server, "queue", "waits", max_tokens=5)
    settled(server, lambda s: s.value("inflight_sequences", model="queue", state="waiting") == 1)
    refused = Call(server, "queue", "is refused", max_tokens=5).wait()
    assert "1 sequences wait already (max_queue_size" in refused.error
    assert running.wait().finish_reason == "length"
    assert waiting.wait().finish_reason == "length"


def test_direct_serves_beside_idle_slots(server: TritonServer, model) -> None:
    """Requests that Triton makes up for idle slots are told apart by READY alone; all four slots share a step."""
    calls = [Call(server, "direct", f"direct {i}", max_tokens=20) for i in range(3)]
    for i, call in enumerate(calls):
        assert call.wait().text == _expected(model, f"direct {i}", 20)
    leaves = Disconnecting(server, "direct", "leaves", max_tokens=LONG)
    leaves.read_event()
    leaves.leave()
    assert_slots_usable(server, "direct", SLOTS)


def test_two_instances_share_the_work(server: TritonServer, model) -> None:
    prompts = [f"instance {i}" for i in range(2 * SLOTS)]
    calls = [Call(server, "two", prompt, max_tokens=300) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        assert call.wait().text == _expected(model, prompt, 300)
    samples = settled(server, lambda s: s.value("inflight_sequences_total", model="two") >= 2 * SLOTS)
    for instance in ("two_0_0", "two_0_1"):
        assert samples.value("inflight_steps_total", model="two", instance=instance) > 0
    _all_free_of_two(server)


def _all_free_of_two(server: TritonServer) -> None:
    settled(server, lambda s: s.value("inflight_kv_blocks", model="two", state="used") == 0)


def test_string_ids_are_told_apart(server: TritonServer, model) -> None:
    """Triton 2.51 makes one number of both IDs for the CORRID tensor, which is therefore not what counts."""
    calls = {
        text: Call(server, "tiny", text, sequence_id=text, start=True, max_tokens=200)
        for text in ("sess-abc", "sess-xyz")
    }
    for text, call in calls.items():
        assert call.wait().text == _expected(model, text, 200)
    _all_free(server, "tiny")


@pytest.mark.parametrize("end", [False, True])
def test_a_second_request_of_a_live_id_is_an_error_and_holds_no_blocks(
    tmp_path: Path, model, end: bool
) -> None:
    """It has no release callback in Triton 2.51, which so loses the slot and its first client: a server apart."""
    folder = save_model(tmp_path / "weights", model)
    add_model(tmp_path / "models", "tiny", folder, dtype="float32", max_tokens_in_paged_kv_cache=8192)
    with TritonServer(tmp_path / "models", options=["--exit-timeout-secs=1"]) as running:
        first = Call(running, "tiny", "first", sequence_id=2**35, start=True, max_tokens=LONG)
        first.take()
        second = Call(running, "tiny", "second", sequence_id=2**35, end=end, max_tokens=LONG + 1)
        assert f"sequence ID {2**35} got a second request while it was live" in second.wait().error
        settled(running, lambda s: s.value("inflight_kv_blocks", state="used") == 0)
        assert generate(running, "tiny", "others go on", max_tokens=5)["status"] == 200


def test_unload_lets_a_stream_end_and_load_serves_again(tmp_path: Path, model) -> None:
    folder = save_model(tmp_path / "weights", model)
    add_model(tmp_path / "models", "tiny", folder, dtype="float32", max_tokens_in_paged_kv_cache=4096)
    with TritonServer(tmp_path / "models", models=["tiny"]) as running:
        client = http_client(running)
        for _ in range(3):
            stream = Disconnecting(running, "tiny", "stream", max_tokens=300, return_finish_reason=True)
            stream.read_event()
            client.unload_model("tiny")
            last = None
            while (event := stream.read_event()) is not None:
                last = event
            assert last["finish_reason"] == "length"
            stream.leave()
            deadline = time.monotonic() + 30
            while any(m["state"] != "UNAVAILABLE" for m in client.get_model_repository_index()):
                assert time.monotonic() < deadline, "the model never unloaded"
                time.sleep(0.05)
            client.load_model("tiny")
            assert generate(running, "tiny", "again", max_tokens=3)["status"] == 200
