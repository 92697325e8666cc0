"""What Triton itself puts around a model: warm-up requests, an ensemble in front, kinds of instances, and whether it is
ready."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from idle import assert_slots_usable, endless_model, expected_text
from serving import Call, Disconnecting, add_model, generate, generate_stream, save_model, settled
from test_clients import joined, stream
from test_launcher import wait_until
from triton_inflight.launcher import TritonServer
from triton_inflight.scrape import scrape

pytestmark = pytest.mark.server

SLOTS = 4
CONTEXT = 65_536
LONG = 60_000  # tokens: more than the fastest machine generates while a test runs
WARM_UP = """
model_warmup [
  {
    name: "first words"
    batch_size: 1
    count: 2
    inputs { key: "text_input" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "words" } }
  }
]
"""
# The adapter in a model of stock Python, whose own thread asks it as servers of 2026 do, beside everything else.
ASKED_MODEL = """
import pathlib, threading, time
from triton_inflight import adapter

class TritonPythonModel(adapter.TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self):
        while True:
            pathlib.Path(__file__).with_name("answer").write_text(repr(self.is_ready()))
            time.sleep(0.02)
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "tiny"
      model_version: -1
      input_map { key: "text_input" value: "text_input" }
      output_map { key: "text_output" value: "text_output" }
    }
  ]
}
"""


@pytest.fixture(scope="module")
def model():
    return endless_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    shared = {
        "slots": SLOTS,
        "dtype": "float32",
        "max_tokens_in_paged_kv_cache": CONTEXT,
        "default_max_tokens": 24,
    }
    add_model(repository, "tiny", folder, edit=_with_warm_up, **shared)
    add_model(repository, "asked", folder, edit=_of_stock_python, **shared)
    (repository / "asked" / "1" / "model.py").write_text(ASKED_MODEL)
    (repository / "asked" / "1" / "answer").touch()
    words = b"some words"
    (repository / "tiny" / "warmup").mkdir()
    (repository / "tiny" / "warmup" / "words").write_bytes(len(words).to_bytes(4, "little") + words)
    (repository / "front" / "1").mkdir(parents=True)
    (repository / "front" / "config.pbtxt").write_text(ENSEMBLE)
    with TritonServer(repository, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def _with_warm_up(text: str) -> str:
    """Without an instance group besides, so that Triton chooses its kind."""
    return re.sub(r"^instance_group .*$", "", text, flags=re.MULTILINE) + WARM_UP


def _of_stock_python(text: str) -> str:
    """Of the other kind of instance that leaves the device to the backend."""
    return text.replace('backend: "inflight"', 'backend: "python"').replace("KIND_CPU", "KIND_MODEL")


def test_warm_up_runs_whole_generations_before_the_model_is_ready(server: TritonServer) -> None:
    """Triton's warm-up requests pass by its batcher: they have neither START nor an ID, and come once."""
    warmed = re.compile(r"sequence \d+: 10 tokens in, 24 out")
    wait_until(lambda: len(warmed.findall(server.log_path.read_text())) == 2, "both requests are in the log")
    log = server.log_path.read_text()
    assert log.index("24 out") < log.index("Started HTTPService")
    assert_slots_usable(server, "tiny", SLOTS)


def test_an_ensemble_in_front_streams_and_needs_no_ids(server: TritonServer, model) -> None:
    expected = expected_text(model, "behind an ensemble", 24)
    assert generate(server, "front", "behind an ensemble")["text_output"] == expected
    events = generate_stream(server, "front", "behind an ensemble")
    assert "".join(event["text_output"] for event in events) == expected
    assert_slots_usable(server, "tiny", SLOTS)


def test_parameters_pass_through_an_ensemble(server: TritonServer, model) -> None:
    assert generate(server, "front", "short", max_tokens=3)["text_output"] == expected_text(model, "short", 3)
    assert "temperature" in generate(server, "front", "short", temperature=-1)["error"]


def test_ids_and_flags_pass_through_an_ensemble(server: TritonServer, model) -> None:
    prompt = {"text_input": "with an ID"}
    streamed = {"stream": True, "max_tokens": 12}
    for flags in (
        {"sequence_id": 2**40, "sequence_start": True},
        {"sequence_id": 2**40 + 1, "sequence_start": True, "sequence_end": True},
        {"sequence_id": "named", "sequence_start": True},
    ):
        responses = stream(server, "front", prompt, streamed, **flags)
        texts = [text for response in responses if (text := response.as_numpy("text_output")) is not None]
        assert "".join(text.item().decode() for text in texts) == expected_text(model, "with an ID", 12)
    assert_slots_usable(server, "tiny", SLOTS)


def test_an_id_in_use_is_an_error_behind_an_ensemble_too(server: TritonServer) -> None:
    older = Call(server, "front", "older", sequence_id=2**41, start=True, max_tokens=LONG)
    older.take()
    newer = Call(server, "front", "newer", sequence_id=2**41, start=True, max_tokens=LONG)
    for call in (newer.wait(), older.wait()):
        assert f"sequence ID {2**41} got a second request while it was live" in call.error
    assert_slots_usable(server, "tiny", SLOTS)


def test_who_leaves_behind_an_ensemble_ends_at_the_deadline(server: TritonServer) -> None:
    """Triton 2.51 does not tell the model behind it."""
    stream = Disconnecting(server, "front", "leaves", max_tokens=LONG, max_time=1)
    stream.read_event()
    before = scrape(server.metrics_url).value("inflight_sequences_total", model="tiny")
    stream.leave()
    settled(server, lambda s: s.value("inflight_sequences_total", model="tiny") > before)
    assert_slots_usable(server, "tiny", SLOTS)


def test_every_kind_of_instance_serves(server: TritonServer, model) -> None:
    """KIND_MODEL leaves the device to the backend, which takes the CPU; the other model has no instance group."""
    for name in ("asked", "tiny"):
        answer = stream(server, name, {"text_input": "kinds"}, {"max_tokens": 5})
        assert joined(answer) == expected_text(model, "kinds", 5)


def test_a_model_is_ready_until_a_stop_is_announced(server: TritonServer, repository: Path) -> None:
    """Then load balancers should turn elsewhere, while whoever is there is served."""
    answer = repository / "asked" / "1" / "answer"
    wait_until(lambda: answer.read_text() == "True", "it is ready")
    with urlopen(f"{server.http_url}/v2/models/asked/ready", timeout=30) as response:
        assert response.status == 200
    (server.runtime_directory / "stopping").write_text("600")  # as the supervisor does: seconds to go on
    wait_until(lambda: answer.read_text() == "False", "it is ready no longer")
    assert generate(server, "asked", "still served", max_tokens=3)["status"] == 200
