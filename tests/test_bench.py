"""The benchmark: what it counts is exact, what it compares is comparable. Nothing here asserts a time."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import byte_tokenizer, tiny_model
from serving import add_model, save_model
from triton_inflight import bench_sse
from triton_inflight.bench_rounds import Round, Spread, quantile, ratio, spreads
from triton_inflight.bench_work import Workload, ordinary_tokens
from triton_inflight.cli import app

WORK = Workload(sequences=2, input_tokens=10, output_tokens=3)


# -- figures ------------------------------------------------------------------------------------------------


def test_figures_of_a_round() -> None:
    """Two sequences; the second gets its first token when the first has two already."""
    measured = Round(
        sent=[0.0, 0.5], arrivals=[[1.0, 2.0, 4.0], [2.5, 4.5, 5.0]], tokens=[[1, 1, 1], [1, 1, 1]]
    )
    figures = measured.figures(WORK)
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_second"] == pytest.approx(6 / 5)
    assert figures["prefill_tokens_per_second"] == pytest.approx(20 / 2.5)
    assert figures["decode_tokens_per_second"] == pytest.approx(3 / 2.5)  # what came after 2.5
    assert figures["ttft_p50"] == pytest.approx(1.5)
    assert figures["itl_p50"] == pytest.approx(1.5)  # of 1, 2, 2, 0.5
    assert figures["server_cpu_seconds"] is None


def test_single_responses_tell_of_no_latencies() -> None:
    one = Round(sent=[0, 0], arrivals=[[2.0], [4.0]], tokens=[[3], [3]])
    figures = one.figures(Workload(2, 10, 3, stream=False))
    assert figures["output_tokens_per_second"] == pytest.approx(6 / 4)
    assert figures["ttft_p50"] is None
    assert figures["decode_tokens_per_second"] is None


def test_medians_and_ratios_are_taken_round_by_round() -> None:
    """The machine halves its speed for the second round: the ratio stays."""
    ours = [{"rate": 90.0}, {"rate": 45.0}, {"rate": 80.0}]
    theirs = [{"rate": 100.0}, {"rate": 50.0}, {"rate": 100.0}]
    assert spreads(ours)["rate"] == Spread(80, 45, 90)
    assert ratio(ours, theirs, "rate") == Spread(0.9, 0.8, 0.9)
    assert ratio(ours, [{"rate": None}] * 3, "rate") is None


def test_quantiles() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([7], 0.99) == 7
    assert quantile(list(range(101)), 0.99) == 99


def test_prompts_have_exactly_as_many_tokens_and_depend_on_the_seed_alone() -> None:
    ids = ordinary_tokens(byte_tokenizer())
    assert ids == list(range(256))  # all but the end of sequence
    prompts = WORK.prompts(ids, "0")
    assert [len(prompt) for prompt in prompts] == [10, 10]
    assert prompts == WORK.prompts(ids, "0") != WORK.prompts(ids, "1")


# -- the HTTP client ----------------------------------------------------------------------------------------

EVENTS = [b'data: {"a": 1}\n\n', b'data: {"text": "\\ndata: no event"}\n\ndata: {"b": 2}\n\n']


class _Handler(BaseHTTPRequestHandler):
    """Sends EVENTS in chunks that are cut anywhere, or an error."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/wrong":
            self.send_response(400)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"no such m")
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header(
            "Keep-Alive", "timeout=5, max=100"
        )  # with the blank line, this looks like a last chunk
        self.end_headers()
        time.sleep(0.05)
        whole = b"".join(EVENTS)
        for start in range(0, len(whole), 7):
            piece = whole[start : start + 7]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_events_are_found_wherever_chunks_are_cut(port: int) -> None:
    sent, (events,) = bench_sse.stream_all("127.0.0.1", port, "/", [b"{}"], timeout=20)
    assert [json.loads(event.data) for event in events] == [{"a": 1}, {"text": "\ndata: no event"}, {"b": 2}]
    times = [event.time for event in events]
    assert sent == [0.0]
    assert times == sorted(times)
    assert times[0] > 0


def test_another_status_is_an_error_with_its_reason(port: int) -> None:
    with pytest.raises(bench_sse.StreamError, match=r"400.*no such m"):
        bench_sse.stream_all("127.0.0.1", port, "/wrong", [b"{}"], timeout=20)


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    model = save_model(folder / "llama", tiny_model("llama"))
    add_model(folder / "models", "tiny", model, dtype="float32", max_tokens_in_paged_kv_cache=4096)
    return folder / "models"


@pytest.mark.server
def test_bench_measures_in_process_and_served(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "report.json"
    arguments = [
        "bench",
        "--quick",
        "--model-repository",
        str(repository),
        "--model",
        "tiny",
        "--json",
        str(path),
    ]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(path.read_text())
    assert report["workload"]["sequences"] == [1, 4]
    assert report["machine"]["cores"] >= 1
    results = {(result["sequences"], result["path"]): result["rounds"] for result in report["results"]}
    assert set(results) == {(n, p) for n in (1, 4) for p in ("in_process", "grpc", "http")}
    for (sequences, name), (figures,) in results.items():
        assert figures["output_tokens"] == pytest.approx(sequences * 8), name
        assert figures["output_tokens_per_second"] == pytest.approx(sequences * 8 / figures["seconds"])
        assert 0 < figures["ttft_p50"] <= figures["ttft_p99"] <= figures["seconds"]
        assert figures["client_cpu_seconds"] > 0
        parts = (
            ("plan", "batch", "forward", "sampling", "text", "rest") if name == "in_process" else ("engine",)
        )
        assert all(figures[f"{part}_seconds"] > 0 for part in parts)
    assert {row["of"] for row in report["ratios"]} == {"grpc", "http"}
    assert all(
        math.isfinite(row["ratio"]["median"]) and row["ratio"]["median"] > 0 for row in report["ratios"]
    )


def test_bench_takes_parameters_in_place_of_those_of_the_config(repository: Path, tmp_path: Path) -> None:
    """A prompt is read in pieces of at most max_num_tokens, so more steps are needed."""
    path = tmp_path / "report.json"
    arguments = ["bench", "--in-process", "--sequences=1", "--rounds=1", "--set", "max_num_tokens=32"]
    arguments += ["--input-tokens=70", "--output-tokens=4"]
    arguments += ["--model-repository", str(repository), "--model", "tiny", "--json", str(path)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(path.read_text())
    assert report["settings"]["max_num_tokens"] == 32
    (result,) = report["results"]
    assert result["rounds"][0]["steps"] == 3 + 3  # 70 tokens in pieces of 32, then one token a step
    assert report["ratios"] == []
