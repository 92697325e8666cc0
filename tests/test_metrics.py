"""What the server tells of itself: every documented family, with the values that its clients counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import random_prompt
from idle import assert_at_rest, endless_model
from serving import Disconnecting, add_model, generate, save_model, settled
from triton_inflight import metrics_page
from triton_inflight.launcher import TritonServer
from triton_inflight.metrics import FAMILIES
from triton_inflight.scrape import Samples, scrape
from triton_inflight.top import quantile, rates

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
SLOTS, TOKENS, PROMPT, BLOCKS = 4, 60, 40, 16
NUM_REQUESTS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), endless_model())
    repository = tmp_path_factory.mktemp("models")
    # 16 blocks of 16 tokens: fewer than four sequences of 100 tokens fill, though their prompts share some.
    store = {"tokens_per_block": 16, "max_tokens_in_paged_kv_cache": BLOCKS * 16}
    add_model(repository, "tiny", folder, slots=SLOTS, dtype="float32", **store)
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="module")
def after_load(server: TritonServer) -> Samples:
    """The metrics after eight requests, of which all share a beginning, a refused one and one disconnect."""
    prompt = random_prompt(0, PROMPT - 1)

    def ask(index: int) -> dict[str, object]:
        return generate(server, "tiny", f"{prompt}{index}", max_tokens=TOKENS, return_num_output_tokens=True)

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        replies = list(pool.map(ask, range(NUM_REQUESTS)))
    assert [reply["num_output_tokens"] for reply in replies] == [TOKENS] * NUM_REQUESTS
    assert generate(server, "tiny", "x", max_tokens=0)["status"] == 400
    gone = Disconnecting(server, "tiny", "gone", max_tokens=200)
    gone.read_event()
    gone.leave()
    assert_at_rest(server, "tiny")
    return settled(server, lambda s: s.value("inflight_sequences_total") == NUM_REQUESTS + 1)


@pytest.mark.server
def test_every_documented_family_is_there(after_load: Samples) -> None:
    for family in FAMILIES:
        name = f"{family.name}_count" if family.kind == "histogram" else family.name
        assert after_load.label_values(name, "model") == ["tiny"], name


@pytest.mark.server
def test_values_are_those_that_clients_counted(after_load: Samples) -> None:
    value = after_load.value
    assert value("inflight_sequences_total", outcome="length") == NUM_REQUESTS
    assert value("inflight_sequences_total", outcome="cancelled") == 1
    assert value("inflight_prompt_tokens_total") == NUM_REQUESTS * PROMPT + len("gone")
    generated = value("inflight_generated_tokens_total")
    assert NUM_REQUESTS * TOKENS < generated <= NUM_REQUESTS * TOKENS + 200
    first = value("inflight_time_to_first_token_seconds_count")
    assert first == NUM_REQUESTS + 1
    assert value("inflight_inter_token_latency_seconds_count") == generated - first
    assert value("inflight_end_to_end_seconds_count") == NUM_REQUESTS + 1
    for shorter, longer in (
        ("inflight_time_to_first_token_seconds_sum", "inflight_end_to_end_seconds_sum"),
        ("inflight_inter_token_latency_seconds_sum", "inflight_end_to_end_seconds_sum"),
    ):
        assert 0 < value(shorter) < value(longer)


@pytest.mark.server
def test_steps_tell_how_full_they_were(after_load: Samples) -> None:
    steps = after_load.value("inflight_steps_total")
    for name in ("inflight_step_sequences", "inflight_step_tokens", "inflight_forward_seconds"):
        assert sum(after_load.histogram(name).values()) == steps
    histogram = after_load.histogram("inflight_step_sequences")
    assert max(bound for bound, count in histogram.items() if count) == SLOTS
    # Every token but a prompt's own first ones takes one sequence through one step.
    assert after_load.value("inflight_step_sequences_sum") >= after_load.value(
        "inflight_generated_tokens_total"
    )
    assert after_load.value("inflight_preemptions_total") > 0
    assert after_load.value("inflight_prefix_hit_tokens_total") >= 16


@pytest.mark.server
def test_the_store_is_there_under_tensorrt_llms_name_too(after_load: Samples) -> None:
    kinds = {
        kind: after_load.value("nv_trt_llm_kv_cache_block_metrics", model="tiny", kv_cache_block_type=kind)
        for kind in ("used", "max", "tokens_per")
    }
    assert kinds == {"used": 0, "max": BLOCKS, "tokens_per": 16}
    assert after_load.value("inflight_kv_blocks", state="total") == BLOCKS


@pytest.mark.server
def test_tritons_own_counters_count_trips_as_requests(after_load: Samples) -> None:
    """What docs/metrics.md warns of. The parser gives Triton's counters the suffix that they lack."""
    assert after_load.value("nv_inference_request_success_total") > 2 * NUM_REQUESTS
    failures = after_load.value("nv_inference_request_failure_total", reason="CANCELED")
    assert failures >= NUM_REQUESTS, "one for every sequence that has ended well"


@pytest.mark.server
def test_rates_between_two_looks(server: TritonServer, after_load: Samples) -> None:
    assert generate(server, "tiny", "more", max_tokens=TOKENS)["status"] == 200
    now = settled(server, lambda s: s.value("inflight_sequences_total") == NUM_REQUESTS + 2)
    (row,) = rates(after_load, now, seconds=2.0)
    assert (row.model, row.active, row.waiting, row.blocks_used, row.blocks_total) == (
        "tiny",
        0,
        0,
        0,
        BLOCKS,
    )
    assert row.tokens_in == len("more") / 2
    assert row.tokens_out == TOKENS / 2
    assert row.step_sequences == 1
    assert row.ttft is not None
    assert 0 < row.ttft[0] <= row.ttft[1]
    assert row.itl is not None
    assert row.cancelled == 1


@pytest.mark.server
@pytest.mark.usefixtures("after_load")
def test_top_once_prints_a_table(server: TritonServer) -> None:
    done = _top("--url", server.metrics_url, "--interval", "0.1", "--once")
    assert done.returncode == 0, done.stderr
    heading, row = done.stdout.strip().splitlines()
    assert "tok/s out" in heading
    assert row.split()[0] == "tiny"
    assert f"0/{BLOCKS}" in row


def test_top_without_a_server_says_what_to_do() -> None:
    done = _top("--url", "http://127.0.0.1:9/metrics", "--once")
    assert done.returncode == 1
    assert "no metrics at http://127.0.0.1:9/metrics" in done.stderr
    assert "Traceback" not in done.stderr


def _top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "triton-inflight", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 3.0)]
)
def test_quantiles_lie_within_their_bucket(share: float, expected: float) -> None:
    assert quantile({1.0: 2, 3.0: 2, float("inf"): 0}, share) == pytest.approx(expected)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile({1.0: 1, 3.0: 0, float("inf"): 99}, 0.99) == 3.0


def test_the_page_is_current() -> None:
    assert DOCS.read_text() == metrics_page.page(), (
        "run python -m triton_inflight.metrics_page > docs/metrics.md"
    )


def test_a_page_without_our_models_gives_no_rows() -> None:
    assert rates(Samples(""), Samples("# TYPE up gauge\nup 1\n"), seconds=1.0) == []


def test_scraping_a_port_where_nothing_listens_is_an_os_error() -> None:
    with pytest.raises(OSError, match="refused"):
        scrape("http://127.0.0.1:9/metrics")
