"""What is known of Triton's sequence batcher, on the real server: each fact with what comes of it for a client here.

docs/lifecycle.md lists them all, with the tests that stand in other files.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from conftest import random_prompt
from idle import assert_at_rest, assert_slots_usable, endless_model, expected_text, wait_until
from serving import Call, Disconnecting, add_model, generate, http_client, save_model, settled
from test_clients import joined, stream
from triton_inflight.launcher import TritonServer
from triton_inflight.scrape import scrape

pytestmark = pytest.mark.server

SLOTS = 4
CONTEXT = 65_536
LONG = 60_000  # tokens: more than the fastest machine generates while a test runs
TRITONS_IDLE_TIME = 1.0  # seconds that a sequence may wait, unless the config says more
OWN_IDS = iter(range(2**48, 2**63))


@pytest.fixture(scope="module")
def model():
    return endless_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    shared = {"slots": SLOTS, "dtype": "float32", "max_tokens_in_paged_kv_cache": CONTEXT}
    add_model(repository, "tiny", folder, **shared)
    add_model(repository, "unsafe", folder, **shared, edit=_unsafe)
    add_model(repository, "unbatched", folder, **shared, edit=_unbatched)
    with TritonServer(
        repository, models=["tiny"], log_path=tmp_path_factory.mktemp("log") / "server.log"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[httpclient.InferenceServerClient]:
    with http_client(server) as client:
        yield client


# -- what is refused at load ------------------------------------------------------------------------------------


def _unsafe(text: str) -> str:
    """The idle time left to Triton, IDs as strings, no END, and an input of any length that is not ragged."""
    text = re.sub(r"max_sequence_idle_microseconds: \d+", "", text)
    text = text.replace("data_type: TYPE_UINT64", "data_type: TYPE_STRING")
    text = re.sub(r'^.*name: "END".*$', "", text, flags=re.MULTILINE)
    stop_words = 'input [ { name: "stop_words" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]'
    return f"{text}\n{stop_words}\n"


def _unbatched(text: str) -> str:
    return text.replace(f"max_batch_size: {SLOTS}", "max_batch_size: 0")


def test_what_would_hang_clients_or_undo_batching_is_refused_at_load(
    client: httpclient.InferenceServerClient,
) -> None:
    """All of it at once, each with its remedy. No model can add controls or ragged inputs to its own config."""
    with pytest.raises(InferenceServerException) as refused:
        client.load_model("unsafe")
    for words in (
        "max_sequence_idle_microseconds: 1000000 (1 s), Triton's default, is too short",
        "CORRID: data_type TYPE_STRING",
        "CONTROL_SEQUENCE_END is missing",
        "input stop_words: dims [-1] without allow_ragged_batch",
    ):
        assert words in str(refused.value)


def test_a_model_without_a_batch_dimension_is_refused_at_load(
    client: httpclient.InferenceServerClient,
) -> None:
    """Triton takes it, and gives every trip a single sequence."""
    with pytest.raises(
        InferenceServerException, match="max_batch_size: 0 gives every step a single sequence"
    ):
        client.load_model("unbatched")


# -- what a model tells of itself ---------------------------------------------------------------------------------


def test_what_the_config_leaves_out_is_filled_in(client: httpclient.InferenceServerClient) -> None:
    """Outputs and the transaction policy: that is all that a Python model can add."""
    config = client.get_model_config("tiny")
    assert config["sequence_batching"]["iterative_sequence"] is True
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert "text_output" in [output["name"] for output in config["output"]]


def test_our_histograms_agree_with_a_clients_clock(server: TritonServer) -> None:
    """Triton's own durations are summed up anew at each trip. (First, when no earlier sequence is still uncounted.)"""
    families = ("inflight_time_to_first_token_seconds", "inflight_end_to_end_seconds")
    before = scrape(server.metrics_url)
    seconds = 0.0
    for i in range(3):
        started = time.monotonic()
        generate(server, "tiny", random_prompt(i, 30), max_tokens=100)
        seconds += time.monotonic() - started
    ended = before.value("inflight_sequences_total", model="tiny") + 3
    after = settled(server, lambda s: s.value("inflight_sequences_total", model="tiny") == ended)
    first, whole = (
        after.value(f"{f}_sum", model="tiny") - before.value(f"{f}_sum", model="tiny") for f in families
    )
    assert 0 < first < whole <= seconds


# -- IDs and flags ----------------------------------------------------------------------------------------------


def test_both_flags_on_a_sequence_of_one_token(server: TritonServer, model) -> None:
    """Triton 2.51 logs an error for it; its client gets the answer."""
    call = Call(server, "tiny", "one", sequence_id=next(OWN_IDS), start=True, end=True, max_tokens=1).wait()
    assert (call.error, call.text) == (None, expected_text(model, "one", 1))
    assert_slots_usable(server, "tiny", SLOTS)


def test_each_turn_on_an_id_starts_anew(server: TritonServer, model) -> None:
    """An ID ends with its generation: the next one sets START again, or is an error and not a hang."""
    own = next(OWN_IDS)
    for prompt in ("first turn", "third turn"):
        call = Call(server, "tiny", prompt, sequence_id=own, start=True, max_tokens=8).wait()
        assert (call.error, call.text) == (None, expected_text(model, prompt, 8))
        between = Call(server, "tiny", "second turn", sequence_id=own, max_tokens=8).wait()
        assert re.search(r"START|sequence_start", between.error)
    assert_slots_usable(server, "tiny", SLOTS)


def test_an_id_that_triton_gave_to_another_request_ends_both(server: TritonServer) -> None:
    """A model cannot tell the IDs of users from those that Triton gives, which are 1, 2, 3 and so on."""
    generate(server, "tiny", "n" * 37, max_tokens=1)
    found = re.compile(r"sequence (\d+): 37 tokens in")
    wait_until(lambda: found.search(server.log_path.read_text()) is not None, "the log names its ID")
    newest = int(found.findall(server.log_path.read_text())[-1])
    anonymous = Disconnecting(server, "tiny", "anonymous", max_tokens=LONG)
    anonymous.read_event()
    taken = Call(server, "tiny", "takes it", sequence_id=newest + 1, start=True, max_tokens=LONG).wait()
    *_, last = iter(anonymous.read_event, None)
    anonymous.leave()
    for error in (taken.error, last["error"]):
        assert f"sequence ID {newest + 1} got a second request while it was live" in error
        assert "2^32 or above" in error
    assert_slots_usable(server, "tiny", SLOTS)


# -- the backlog ------------------------------------------------------------------------------------------------


def _hold_all_slots(server: TritonServer) -> list[Disconnecting]:
    streams = [Disconnecting(server, "tiny", "holds a slot", max_tokens=LONG) for _ in range(SLOTS)]
    for each in streams:
        each.read_event()
    return streams


def test_a_wait_above_tritons_default_idle_time_hangs_nobody(server: TritonServer, model) -> None:
    """Who waits in the backlog longer than the idle time gets one token and hangs: why the config allows an hour."""
    holders = _hold_all_slots(server)
    waiting = Call(server, "tiny", "waits", max_tokens=30)
    time.sleep(1.5 * TRITONS_IDLE_TIME)
    assert waiting._results.empty(), "it has to wait, or this shows nothing"
    for holder in holders:
        holder.leave()
    assert waiting.wait().text == expected_text(model, "waits", 30)
    assert_slots_usable(server, "tiny", SLOTS)


def test_a_timeout_ends_a_request_in_the_backlog(server: TritonServer) -> None:
    holders = _hold_all_slots(server)
    expired = Call(server, "tiny", "expires", max_tokens=5, timeout_us=200_000).wait()
    assert "timeout" in expired.error
    for holder in holders:
        assert holder.read_event() is not None, "the slots are still held"
        holder.leave()
    assert_slots_usable(server, "tiny", SLOTS)


def test_a_priority_of_tritons_is_taken_and_changes_nothing(server: TritonServer) -> None:
    """Its core drops the priority of requests to sequence models before the model sees them."""
    answers = [stream(server, "tiny", {"text_input": "x"}, {"max_tokens": 6}, priority=p) for p in (0, 1, 9)]
    assert len({joined(answer) for answer in answers}) == 1


# -- cancellation -----------------------------------------------------------------------------------------------


def test_a_cancelled_grpc_stream_is_stopped(server: TritonServer) -> None:
    call = Call(server, "tiny", "cancelled", max_tokens=LONG)
    call.take()
    settled(server, lambda s: s.value("inflight_sequences", model="tiny", state="active") == 1)
    before = scrape(server.metrics_url).value("inflight_sequences_total", model="tiny", outcome="cancelled")
    call._client.stop_stream(cancel_requests=True)
    settled(server, lambda s: s.value("inflight_sequences_total", model="tiny", outcome="cancelled") > before)
    assert_slots_usable(server, "tiny", SLOTS)


CLIENT = """
import sys, urllib.request
body = b'{"text_input": "killed", "stream": true, "max_tokens": %d}'
stream = urllib.request.urlopen(sys.argv[1] + "/v2/models/tiny/generate_stream", body)
while line := stream.readline():
    print(flush=True)
"""


def test_killed_clients_cost_no_slot(server: TritonServer) -> None:
    """They fill all slots, and say nothing when they end."""
    command = [sys.executable, "-I", "-S", "-c", CLIENT % LONG, server.http_url]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(SLOTS)]
    for process in clients:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n", "it has got a token"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert_slots_usable(server, "tiny", SLOTS)


# -- sequences that their clients drive ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_client_driven_sequence_that_is_left_alone_is_dropped(tmp_path: Path, model) -> None:
    """Triton reaps it without a word to the model; a minute is the shortest idle time that is allowed."""

    def edit(text: str) -> str:
        text = re.sub(
            r"max_sequence_idle_microseconds: \d+", "max_sequence_idle_microseconds: 60000000", text
        )
        return text.replace("iterative_sequence: true", "")

    folder = save_model(tmp_path / "weights", model)
    driven = {"slots": SLOTS, "dtype": "float32", "max_tokens_in_paged_kv_cache": CONTEXT}
    add_model(tmp_path / "models", "driven", folder, edit=edit, **driven)
    with TritonServer(tmp_path / "models") as running:
        Call(running, "driven", "left alone", sequence_id=5, start=True, max_tokens=50).take()
        settled(running, lambda s: s.value("inflight_kv_blocks", state="used") == 1)
        settled(running, lambda s: s.value("inflight_sequences_total", outcome="reaped") == 1, timeout=120)
        assert_at_rest(running, "driven")
        assert re.search(r"START|not live", Call(running, "driven", "", sequence_id=5).wait().error)
