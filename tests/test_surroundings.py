"""What Triton itself puts around a model: warm-up requests, and an ensemble in front."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from idle import assert_slots_usable, endless_model, expected_text
from serving import add_model, generate, generate_stream, save_model
from test_launcher import wait_until
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

SLOTS = 4
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
    return endless_model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    store = {"max_tokens_in_paged_kv_cache": 16384, "default_max_tokens": 24}
    add_model(
        repository, "tiny", folder, slots=SLOTS, dtype="float32", edit=lambda text: text + WARM_UP, **store
    )
    words = b"some words"
    (repository / "tiny" / "warmup").mkdir()
    (repository / "tiny" / "warmup" / "words").write_bytes(len(words).to_bytes(4, "little") + words)
    (repository / "front" / "1").mkdir(parents=True)
    (repository / "front" / "config.pbtxt").write_text(ENSEMBLE)
    with TritonServer(repository, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


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
