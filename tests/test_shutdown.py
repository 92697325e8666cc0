"""The end of a server that serves a model of ours, in the middle of its work: nothing stays."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import tiny_model
from serving import Disconnecting, add_model, save_model
from test_launcher import Remains, wait_until
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

MORE_THAN_ENDS = 65_536
"""More tokens than the fastest machine generates before these tests are over."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", max_position_embeddings=MORE_THAN_ENDS, tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tiny", folder, dtype="float32", max_tokens_in_paged_kv_cache=MORE_THAN_ENDS)
    return repository


def test_a_stop_ends_streams_first_and_leaves_nothing(repository: Path) -> None:
    server = TritonServer(
        repository, options=["--exit-timeout-secs=240"]
    )  # enough for the stream, however busy
    with server:
        remains = Remains.of(server)
        stream = Disconnecting(server, "tiny", "x", max_tokens=1000, return_finish_reason=True)
        stream.read_event()
        assert server.stop() == 0
        events = list(iter(stream.read_event, None))
    assert events[-1]["finish_reason"] == "length", "the stream was not cut"
    assert remains.all_is_gone()


def test_a_stop_ends_what_would_outlast_the_exit_timeout_with_what_it_has(repository: Path) -> None:
    """Without the notice to the models, Triton cuts such clients off, and crashes."""
    server = TritonServer(repository, options=["--exit-timeout-secs=14"])
    with server:
        stream = Disconnecting(
            server, "tiny", "x", max_tokens=MORE_THAN_ENDS - 8, max_time=600, return_finish_reason=True
        )
        stream.read_event()
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(server.stop)
            *_, last = iter(stream.read_event, None)
            stream.leave()
            assert code.result() == 0
    assert last["finish_reason"] == "cancelled"


PARENT = """
import json, sys, time
from triton_inflight.launcher import TritonServer
server = TritonServer(sys.argv[1], log_path=sys.argv[2])
server.start()
server.wait_ready()
remains = [server.pid, server.supervisor_pid, server.shm_prefix, str(server.runtime_directory)]
print(json.dumps([server.http_url, remains]), flush=True)
time.sleep(1e6)
"""


def test_a_killed_parent_leaves_no_stub_that_generates(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(repository), str(tmp_path / "log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    http_url, arguments = json.loads(parent.stdout.readline())
    remains = Remains(*arguments)
    stream = Disconnecting(http_url, "tiny", "x", max_tokens=MORE_THAN_ENDS - 8)
    stream.read_event()
    parent.kill()
    parent.wait()
    wait_until(remains.all_is_gone, "server, stub, supervisor and files are gone")
    stream.leave()
