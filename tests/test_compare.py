"""The comparison of schedulers: what it sends and what it counts. No server, and nothing here asserts a time."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from conftest import byte_tokenizer
from triton_inflight.bench_work import ordinary_tokens
from triton_inflight.compare_check import DifferentTextsError, check_equal, check_requests
from triton_inflight.compare_client import Outcome
from triton_inflight.compare_lengths import TABLES, Lengths, table_named
from triton_inflight.compare_loads import Burst, Closed, Poisson, RelativeRate, Replay, Source, parse_rate
from triton_inflight.compare_measures import Slo, client_figures, equal_share, inter_token_latencies
from triton_inflight.compare_occupancy import cut, occupancy
from triton_inflight.compare_plan import Comparison
from triton_inflight.compare_requests import GivenMix, LengthMix, Request, read_requests
from triton_inflight.errors import InflightError, SettingsError
from triton_inflight.trace_reading import RowRun, Trace, TracedStep

IDS = ordinary_tokens(byte_tokenizer())


# -- lengths ------------------------------------------------------------------------------------------------


def test_uniform_lengths_come_equally_often_with_both_ends() -> None:
    lengths = Lengths.parse("16-25")
    drawn = [lengths.at((i + 0.5) / 1000) for i in range(1000)]
    assert {length: drawn.count(length) for length in drawn} == dict.fromkeys(range(16, 26), 100)
    assert (lengths.at(0), lengths.at(1 - 1e-12), lengths.longest) == (16, 25, 25)
    assert lengths.mean == pytest.approx(20.5)
    assert Lengths.parse("7").at(0.3) == Lengths.parse("7").longest == 7


@pytest.mark.parametrize("text", ["", "0", "9-3", "1-", "x", "-4"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="lengths"):
        Lengths.parse(text)


def test_tables_have_the_quantiles_and_the_means_of_what_was_published() -> None:
    """Of 19,366 conversations: 1,154.7 tokens in and 211.1 out on average, by the published file."""
    table = table_named("azure-conversation")
    assert table.outputs.at(0.5) == 129
    assert table.inputs.at(0.9) == 2735
    assert table.inputs.mean == pytest.approx(1154.7, rel=0.02)
    assert table.outputs.mean == pytest.approx(211.1, rel=0.02)
    for each in TABLES.values():
        assert "Splitwise" in each.about
        for lengths in (each.inputs, each.outputs):
            assert [list(column) for column in zip(*lengths.points, strict=True)] == [
                sorted(column) for column in zip(*lengths.points, strict=True)
            ]
    with pytest.raises(SettingsError, match="azure-code"):
        table_named("sharegpt")


def test_scaled_lengths_keep_their_shape_and_have_at_least_one_token() -> None:
    outputs = table_named("azure-code").outputs.scaled(0.1)
    assert outputs.at(0.9) == 6  # of 55
    assert outputs.at(0.0) == 1
    assert outputs.longest == 190


# -- requests -----------------------------------------------------------------------------------------------


def test_requests_depend_on_the_seed_alone_and_every_round_has_as_many_tokens() -> None:
    mix = LengthMix.parse("10-59", "1-50")
    rounds = [mix.requests(50, IDS, seed) for seed in "abc"]
    assert mix.requests(50, IDS, "a") == rounds[0] != rounds[1]
    for requests in rounds:
        assert all(len(request.token_ids) == request.input_tokens for request in requests)
        # 50 requests and 50 lengths: one from each part of the distribution is each length about once.
        assert sum(request.output_tokens for request in requests) == pytest.approx(
            50 * mix.mean_output, rel=0.02
        )
        assert max(request.input_tokens + request.output_tokens for request in requests) <= mix.longest
    # Lengths come in random order, and those of prompts say nothing of those of outputs.
    lengths = np.array([(r.input_tokens, r.output_tokens) for requests in rounds for r in requests])
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 0.3
    assert lengths[:50, 1].tolist() != lengths[50:100, 1].tolist()


def test_a_request_asks_for_a_fixed_length_and_greedy_tokens() -> None:
    fields = Request(3, 7, token_ids=(5, 6, 7)).parameters()
    assert (fields["max_tokens"], fields["ignore_eos"], fields["temperature"]) == (7, True, 0)
    assert json.loads(fields["input_ids"]) == [5, 6, 7]
    as_text = Request(3, 7, prompt="abc")
    assert as_text.text == "abc"
    assert "input_ids" not in as_text.parameters()


def _file(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_own_requests_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    path = _file(
        tmp_path / "mine.jsonl",
        {"prompt": "abcd", "output_tokens": 3, "arrival": 1007.5},
        {"input_tokens": 9, "output_tokens": 5, "arrival": 1000},
    )
    mix = read_requests(path, len)
    assert [(row.input_tokens, row.output_tokens, row.arrival) for row in mix.rows] == [
        (9, 5, 0.0),
        (4, 3, 7.5),
    ]
    assert (mix.mean_output, mix.longest) == (4, 14)
    schedule = Replay().schedule(Source(mix, IDS), 1.0, "0")
    assert [moment for moment, _ in schedule.timed] == [0.0, 7.5]
    assert [len(request.token_ids) for _, request in schedule.timed] == [9, 0]


def test_own_requests_come_once_each_before_one_comes_again() -> None:
    mix = GivenMix(tuple(Request(1, n, prompt="x") for n in range(1, 6)), "five")
    drawn = [request.output_tokens for request in mix.requests(12, IDS, "0")]
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == [1, 2, 3, 4, 5]
    with pytest.raises(SettingsError, match="arrival"):
        Replay().schedule(Source(mix, IDS), 1.0, "0")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"output_tokens": 3}, "either"),
        ({"prompt": "a", "input_tokens": 1, "output_tokens": 3}, "either"),
        ({"prompt": "", "output_tokens": 3}, "prompt"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens is 0"),
        ({"prompt": "a", "output_tokens": True}, "output_tokens is True"),
        ({"input_tokens": 4, "output_tokens": 3, "arrival": "now"}, "arrival"),
        ({"input_tokens": 4, "output_tokens": 3, "arrival": math.nan}, "arrival is nan"),
        ({"input_tokens": 4, "output_tokens": 3, "arival": 1}, "arival is unknown; there are prompt, "),
        ([1], "object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = _file(tmp_path / "bad.jsonl", {"prompt": "fine", "output_tokens": 1}, row)
    with pytest.raises(SettingsError, match=f"line 2.*{message}"):
        read_requests(path, len)


def test_arrivals_are_stated_in_all_lines_or_none(tmp_path: Path) -> None:
    rows = [{"input_tokens": 1, "output_tokens": 1, "arrival": 2}, {"input_tokens": 1, "output_tokens": 1}]
    with pytest.raises(SettingsError, match="1 of 2"):
        read_requests(_file(tmp_path / "half.jsonl", *rows), len)


# -- loads --------------------------------------------------------------------------------------------------

SOURCE = Source(LengthMix.parse("2", "3"), IDS)


def test_open_loops_are_poisson_processes_that_offer_the_same_load_each_round() -> None:
    """Times between arrivals of a Poisson process are exponential: their deviation is their mean, half of them are
    below ln 2 of it, and none tells of the next.
    """
    rounds = [Poisson(20).schedule(SOURCE, 100.0, seed).timed for seed in "ab"]
    assert [len(timed) for timed in rounds] == [2000, 2000]
    moments = [moment for moment, _ in rounds[0]]
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments != [moment for moment, _ in rounds[1]]
    gaps = np.diff(moments)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.median(gaps) / gaps.mean() == pytest.approx(np.log(2), abs=0.08)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.1
    # In each second about 20 arrive, with that variance.
    counts = np.histogram(moments, bins=np.arange(0, 100))[0]
    assert statistics.variance(counts.tolist()) / counts.mean() == pytest.approx(1, abs=0.5)


def test_closed_loops_never_run_out_and_bursts_come_at_once() -> None:
    closed = Closed(5).schedule(SOURCE, 2.0, "0")
    assert [moment for moment, _ in closed.timed] == [0.0] * 5
    assert closed.window == 2.0
    drawn = [request for _, request in closed.timed] + list(itertools.islice(closed.following, 95))
    assert len({request.token_ids for request in drawn}) > 90, "the same requests come again and again"
    burst = Burst(4).schedule(SOURCE, 2.0, "0")
    assert [moment for moment, _ in burst.timed] == [0.0] * 4
    assert next(burst.following, None) is None


def test_rates_are_absolute_or_a_share_of_the_maximum() -> None:
    assert parse_rate("4.5") == Poisson(4.5)
    assert parse_rate("0.9x") == RelativeRate(0.9)
    assert parse_rate(".5x").at(8.0) == Poisson(4.0, share=0.5)
    for text in ("0", "x", "-1", "1e3", "0x"):
        with pytest.raises(SettingsError, match="rate"):
            parse_rate(text)


# -- figures ------------------------------------------------------------------------------------------------


def _outcome(
    scheduled: float, arrivals: list[float], tokens: list[list[int]], prompt: tuple[int, ...] = (1,) * 10
) -> Outcome:
    number = sum(map(len, tokens))
    ids = [np.array(each, np.int32).tobytes() for each in tokens]
    return Outcome(
        Request(len(prompt), number, token_ids=prompt), scheduled, scheduled + 0.01, arrivals, ids, [b""]
    )


TWO = [
    _outcome(0.0, [1.0, 2.0, 4.0], [[1], [2], [3]]),
    _outcome(1.0, [1.5, 2.5], [[1], [2, 9]]),  # two tokens in one response
]


def test_figures_of_an_open_loop_count_until_the_last_token() -> None:
    figures = client_figures(TWO, None, Slo(ttft=0.6))
    assert figures["seconds"] == 4.0
    assert figures["output_tokens_per_second"] == pytest.approx(6 / 4)
    assert figures["requests_per_second"] == pytest.approx(2 / 4)
    assert figures["goodput"] == pytest.approx(1 / 4)  # the second one had its first token after 0.5 s
    assert figures["ttft_p50"] == pytest.approx(0.75)  # of 1 and 0.5, which count from when it was to be sent
    assert figures["e2e_p50"] == pytest.approx(2.75)  # of 4 and 1.5
    assert figures["client_lag"] == pytest.approx(0.01)
    assert figures["itl_p50"] == pytest.approx(0.75)  # of 1, 2, and the second that two tokens share
    assert figures["itl_p99"] == pytest.approx(1.97)


def test_figures_of_a_closed_loop_leave_its_end_out() -> None:
    figures = client_figures(TWO, 2.0, None)
    assert figures["output_tokens_per_second"] == pytest.approx(3 / 2)
    assert figures["requests_per_second"] == 0
    assert figures["requests"] == 2
    assert figures["goodput"] is None


def test_inter_token_latencies_are_one_for_each_further_token() -> None:
    assert inter_token_latencies(TWO).tolist() == [1.0, 2.0, 0.5, 0.5]
    assert inter_token_latencies([_outcome(0.0, [1.0], [[4]])]).tolist() == []


def test_an_objective_bounds_what_it_names() -> None:
    first, second = TWO
    assert Slo.parse("ttft=1,itl=1.5").met_by(first)  # (4 - 1) / 2 between tokens
    assert not Slo.parse("itl=1.4").met_by(first)
    assert Slo.parse("itl=0.5, e2e=1.5").met_by(second)
    assert not Slo.parse("e2e=1.4").met_by(second)
    assert str(Slo.parse("ttft=0.5,itl=0.05")) == "TTFT ≤ 0.5 s, ITL ≤ 0.05 s"
    for text in ("", "ttft", "ttft=", "tpot=1", "ttft=1;itl=2", "ttft=0", "ttft=1,ttft=2"):
        with pytest.raises(SettingsError, match="slo"):
            Slo.parse(text)


def test_equal_tokens_are_counted_up_to_the_first_difference() -> None:
    other = [_outcome(0.0, [1.0], [[1, 7, 3]]), _outcome(0.0, [1.0], [[1, 2, 9]])]
    assert equal_share(TWO, other) == pytest.approx(4 / 6)
    assert equal_share(TWO, TWO[:1]) == 1.0  # in a closed loop one may have answered more than the other


# -- what the servers did -----------------------------------------------------------------------------------


def _step(number: int, start: float, seconds: float, rows: int) -> TracedStep:
    runs = tuple(RowRun(row, row, 0, 1, "decode", 1) for row in range(rows))
    return TracedStep(number, 0, start, seconds, runs, 0, (), (), rows, 10)


def test_occupancy_of_a_part_of_a_trace() -> None:
    """From second 10 to 14: a second with 4 rows, an idle one, two with 1 row; 4 slots, 10 blocks."""
    steps = (_step(0, 8.0, 1.0, 4), _step(1, 10.0, 1.0, 4), _step(2, 12.0, 2.0, 1), _step(3, 15.0, 1.0, 4))
    levels = ((8.0, 4), (9.0, 2), (11.0, 5), (13.0, 0), (15.0, 9))
    trace = Trace("m", "dynamic", 4, 10, 0.0, steps, (), levels)
    part = cut([trace], 10.0, 14.0)
    assert part is not None
    assert [step.number for step in part.steps] == [1, 2]
    busy = occupancy(part, 10.0, 14.0)
    assert busy.steps == 2
    assert busy.step_sequences == pytest.approx((4 * 1 + 1 * 2) / 3)
    assert busy.slots_busy == pytest.approx(6 / 16)
    assert busy.kv_used == pytest.approx((2 * 1 + 5 * 2 + 0 * 1) / 40)
    assert busy.kv_used_most == pytest.approx(0.5)
    assert cut([trace], 20.0, 30.0) is None


# -- the check ----------------------------------------------------------------------------------------------


def test_different_texts_are_refused_with_prompt_and_place() -> None:
    tokenizer = byte_tokenizer()
    prompt = tuple(tokenizer.encode("once upon"))

    def answer(text: str) -> list[Outcome]:
        return [_outcome(0.0, [1.0], [tokenizer.encode(text)], prompt)]

    check_equal({"iterative": answer(" a time"), "dynamic": answer(" a time")}, tokenizer)
    with pytest.raises(DifferentTextsError) as caught:
        check_equal({"iterative": answer(" a time"), "dynamic": answer(" a tide")}, tokenizer)
    message = str(caught.value)
    for part in ("iterative and dynamic", "'once upon'", "after 5 equal tokens", "'me'", "'de'"):
        assert part in message, message


def test_the_check_asks_for_little() -> None:
    asked = check_requests(LengthMix.parse("1000", "900").requests(20, IDS, "0"))
    assert [(r.input_tokens, len(r.token_ids), r.output_tokens) for r in asked] == [(128, 128, 32)] * 8


# -- what is compared ---------------------------------------------------------------------------------------


def test_ratios_are_taken_to_dynamic_or_else_to_the_first() -> None:
    assert Comparison().base == "dynamic"
    assert Comparison(schedulers=["sequence", "iterative"]).base == "sequence"
    assert Comparison(baseline="decoupled").base == "decoupled"


@pytest.mark.parametrize(
    "options",
    [
        {"schedulers": []},
        {"loads": []},
        {"baseline": "mine"},
        {"schedulers": ["dynamic"] * 2},
        {"rounds": 0},
        {"seconds": math.inf},
        {"seconds": math.nan},
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InflightError):
        Comparison(**options)  # type: ignore[arg-type]
