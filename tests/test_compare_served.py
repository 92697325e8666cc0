"""The comparison of schedulers on real servers, with a tiny model. Nothing here asserts a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import tiny_model
from serving import add_model, save_model
from triton_inflight.cli import app
from triton_inflight.compare import Burst, Comparison, DifferentTextsError, LengthMix, run
from triton_inflight.trace_reading import read_trace

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
