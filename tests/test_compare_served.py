"""The comparison of schedulers on real servers, with a tiny model. Nothing here asserts a time."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from conftest import tiny_model
from idle import wait_until
from serving import add_model, save_model
from triton_inflight.bench_sse import StreamError
from triton_inflight.cli import app
from triton_inflight.compare import Burst, Comparison, DifferentTextsError, LengthMix, run
from triton_inflight.compare_client import LoadClient
from triton_inflight.compare_loads import Schedule
from triton_inflight.compare_requests import Request
from triton_inflight.errors import SettingsError
from triton_inflight.trace_reading import read_trace
from triton_inflight.triton_home import LaunchError

pytestmark = pytest.mark.server

SCHEDULERS = ["iterative", "dynamic", "sequence", "decoupled"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny models: a second thread costs more than it brings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_model("llama"))


def _invoke(*arguments: object) -> str:
    outcome = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_all_schedulers_answer_the_same_requests_alike(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = _invoke("--model", model, "--quick", "--slo", "ttft=60", "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert results["schedulers"] == SCHEDULERS
    assert results["baseline"] == "dynamic"
    assert results["closed_loop_maximum_requests_per_second"] > 0
    rounds = {(each["load"], each["scheduler"]): each for each in results["rounds"]}
    closed, opened = dict.fromkeys(each["load"] for each in results["rounds"])
    assert set(rounds) == {(load, scheduler) for load in (closed, opened) for scheduler in SCHEDULERS}
    for (load, scheduler), each in rounds.items():
        figures = each["figures"]
        assert figures["equal_to_baseline"] == 1.0, (load, scheduler)  # in float32
        assert 0 < figures["ttft_p50"] <= figures["ttft_p90"] <= figures["ttft_p99"] <= figures["e2e_p99"]
        assert 0 < figures["slots_busy"] <= 1
        assert 1 <= figures["step_sequences"] <= 4
        assert 0 < figures["kv_used"] <= figures["kv_used_most"] <= 1
        assert figures["server_cpu_seconds"] > 0
        assert all(value is None or math.isfinite(value) for value in figures.values())
        for request in each["requests"]:
            assert sum(request["tokens"]) == request["output_tokens"]
            assert request["arrivals"] == sorted(request["arrivals"])
    lengths = {
        scheduler: [
            (r["scheduled"], r["input_tokens"], r["output_tokens"])
            for r in rounds[opened, scheduler]["requests"]
        ]
        for scheduler in SCHEDULERS
    }
    assert all(each == lengths["dynamic"] for each in lengths.values()), "the requests were not the same"
    figures = rounds[opened, "sequence"]["figures"]
    assert figures["goodput"] == pytest.approx(figures["requests_per_second"])  # nobody waits a minute
    for scheduler in SCHEDULERS:
        assert scheduler in text
        assert read_trace(out / "traces" / f"{scheduler}.json").scheduler == scheduler
        (row,) = [r for r in results["summary"] if (r["load"], r["scheduler"]) == (opened, scheduler)]
        expected = (
            rounds[opened, scheduler]["figures"]["ttft_p99"]
            / rounds[opened, "dynamic"]["figures"]["ttft_p99"]
        )
        assert row["over_baseline"]["ttft_p99"]["median"] == pytest.approx(expected)
    pictures = {path.name for path in out.glob("*.png")}
    assert {"latencies.png", "slots.png", "step_sequences.png"} <= pictures
    assert "equal under all schedulers" in text


def test_entries_whose_texts_differ_are_not_compared(model: Path, tmp_path: Path) -> None:
    """Two entries of a repository, one of them with another model."""
    other = tiny_model("llama")
    other.lm_head.weight.data = other.lm_head.weight.data.flip(0)
    common = {"slots": 4, "dtype": "float32", "max_tokens_in_paged_kv_cache": 1024}
    add_model(tmp_path / "models", "mine", model, **common)
    add_model(tmp_path / "models", "theirs", save_model(tmp_path / "other", other), **common)
    comparison = Comparison(
        schedulers=["mine", "theirs"],
        repository=tmp_path / "models",
        mix=LengthMix.parse("8-16", "4-8"),
        loads=[Burst(4)],
        rounds=1,
    )
    with pytest.raises(DifferentTextsError, match=r"mine and theirs .* Prompt 1, .* after \d equal tokens"):
        run(comparison)


def test_own_requests_are_replayed_and_servers_may_start_anew(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"request {n}", "output_tokens": 3 + n, "arrival": n / 10} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = _invoke(
        *("--model", model, "--requests", path, "--replay", "--scheduler", "decoupled", "--rounds", 1),
        *("--no-check", "--one-at-a-time", "--dtype", "float32", "--slots", 2, "--out", tmp_path / "out"),
    )
    assert "NOT CHECKED" in text
    (each,) = json.loads((tmp_path / "out" / "results.json").read_text())["rounds"]
    assert each["load"] == "replay"
    assert [request["scheduled"] for request in each["requests"]] == [0.0, 0.1, 0.2, 0.3]
    assert [request["input_tokens"] for request in each["requests"]] == [9] * 4
    assert [sum(request["tokens"]) for request in each["requests"]] == [3, 4, 5, 6]
    assert 0 < each["figures"]["slots_busy"] <= 1


def test_an_answer_of_another_length_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and latencies would compare different work."""
    parameters = Request.parameters
    monkeypatch.setattr(Request, "parameters", lambda request: {**parameters(request), "max_tokens": 5})
    mix = LengthMix.parse("8", "6")
    comparison = Comparison(str(model), ["iterative"], mix=mix, loads=[Burst(2)], rounds=1, check=False)
    with pytest.raises(StreamError, match="got 5 tokens where 6"):
        run(comparison)


def test_a_server_that_crashes_is_reported_with_its_log(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_client: LoadClient, _schedule: Schedule) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.name() == "tritonserver":
                process.kill()
        raise StreamError("the stream broke off")

    monkeypatch.setattr(LoadClient, "run", crash)
    comparison = Comparison(str(model), ["iterative"], loads=[Burst(2)], rounds=1, check=False)
    with pytest.raises(LaunchError, match=r"exit code 137; its log says:(?s:.*)the whole log: ") as caught:
        run(comparison)
    Path(str(caught.value).rpartition("the whole log: ")[2].rstrip(")")).unlink()


def test_a_terminated_comparison_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "triton-inflight", "compare", "--model", model, "--quick"]
    comparison = subprocess.Popen(
        [*command, "--scheduler", "iterative", "--scheduler", "dynamic", "--seconds", "600"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_until(lambda: len(list(tmp_path.glob("*/backends"))) == 2, "both servers are there", 120)
    processes = psutil.Process(comparison.pid).children(recursive=True)
    comparison.terminate()
    assert comparison.wait(120) != 0
    assert len(processes) >= 2
    assert not any(process.is_running() for process in processes)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('backend: "inflight" parameters {', "model 'mine': config.pbtxt:1:"),
        ('backend: "onnxruntime"', "model 'mine': backend \"onnxruntime\""),
        ('backend: "inflight"', "model 'mine': .*parameters.model"),
    ],
)
def test_an_entry_that_cannot_be_served_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine" / "1").mkdir(parents=True)
    (tmp_path / "mine" / "config.pbtxt").write_text(text)
    arguments = ["compare", "--model-repository", str(tmp_path), "--entry", "mine"]
    outcome = CliRunner().invoke(app, arguments)
    assert isinstance(outcome.exception, SettingsError)
    assert re.search(message, str(outcome.exception), re.DOTALL)


def test_what_cannot_be_kept_is_not_measured(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "results.json").touch()
    for folder, message in (
        (tmp_path, "holds the results"),
        (tmp_path / "file" / "out", "cannot be written"),
    ):
        outcome = CliRunner().invoke(app, ["compare", "--model", str(model), "--out", str(folder)])
        assert isinstance(outcome.exception, SettingsError)
        assert message in str(outcome.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--entry", "a"], "--model-repository"),
        (["--model-repository", ".", "--scheduler", "dynamic", "--entry", "a"], "--scheduler"),
        (["--model-repository", "."], "--entry"),
        (["--lengths", "azure-code", "--input-tokens", "5"], "one way"),
        (["--length-scale", "2"], "--lengths"),
        (["--scheduler", "fifo"], "fifo"),
        (["--output-tokens", "90000"], "the longest request"),
        (["--replay"], "--requests"),
        (["--model-repository", ".", "--entry", "nope"], "models of this repository: "),
    ],
)
def test_options_that_contradict_each_other_are_named(
    model: Path, arguments: list[str], message: str
) -> None:
    if "." not in arguments:
        arguments = ["--model", str(model), *arguments]
    outcome = CliRunner().invoke(app, ["compare", *arguments])
    assert outcome.exit_code != 0
    assert message in str(outcome.exception)
