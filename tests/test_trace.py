"""Traces: what every step did can be read back, under every scheduler, at any time, and nothing of any text."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from conftest import make_engine, random_prompt, tiny_model
from serving import Disconnecting, add_model, generate, save_model, settled
from test_schedulers import EDITS, SLOTS, Driver
from triton_inflight.engine import Engine
from triton_inflight.errors import SettingsError, TraceError
from triton_inflight.launcher import TritonServer
from triton_inflight.protocol import GenerationRequest
from triton_inflight.sampling_params import SamplingParams
from triton_inflight.settings import Settings
from triton_inflight.trace import Tracer, open_tracer, trace_name
from triton_inflight.trace_events import Head
from triton_inflight.trace_reading import Trace, read_trace
from triton_inflight.triton_config import Instances, Scheduler

ROWS = 6


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", max_position_embeddings=8192, tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    return model


def _traced(
    model, path: Path, max_bytes: int = 2**26, num_blocks: int = 256, max_num_tokens: int = 64
) -> Engine:
    engine = make_engine(
        model, num_blocks=num_blocks, max_running_sequences=ROWS, max_num_tokens=max_num_tokens
    )
    head = Head("tiny", "iterative", ROWS, num_blocks, 0.0, os.getpid())
    engine.tracer = Tracer(path, head, engine.store, max_bytes)
    return engine


def _run(engine: Engine, requests: dict[int, GenerationRequest]) -> Counter[int]:
    """Run requests to their ends, two more joining before each step; the tokens that each got."""
    got: Counter[int] = Counter()
    waiting, live = list(requests.items()), set()
    while waiting or live:
        for sequence_id, request in waiting[:2]:
            engine.add(sequence_id, request)
            live.add(sequence_id)
        waiting = waiting[2:]
        for update in engine.step(sorted(live)).updates:
            assert update.error is None
            got[update.sequence_id] += len(update.tokens)
        live = {sequence_id for sequence_id in live if sequence_id in engine}
    return got


def _requests(count: int, **options: object) -> dict[int, GenerationRequest]:
    return {
        7 * i + 1: GenerationRequest(random_prompt(i, 3 + 17 * i), 4 + 5 * (i % 3), **options)
        for i in range(count)
    }


def check_rows(trace: Trace) -> None:
    """A row has one sequence at a time, a sequence one row, and whoever runs is in its row."""
    holds = defaultdict(list)
    for hold in trace.holds:
        holds[hold.row].append(hold)
        assert 0 <= hold.row < trace.num_rows
    for in_row in holds.values():
        for earlier, later in itertools.pairwise(in_row):
            assert earlier.end_seconds is not None
            assert earlier.end_seconds <= later.start_seconds
    end = trace.steps[-1].end_seconds
    for step in trace.steps:
        assert len({run.row for run in step.rows}) == len(step.rows)
        for run in step.rows:
            (hold,) = (
                h
                for h in holds[run.row]
                if h.start_seconds <= step.start_seconds and step.end_seconds <= (h.end_seconds or end) + 1e-9
            )
            assert (hold.sequence_id, hold.choice) == (run.sequence_id, run.choice)


def check_steps(trace: Trace) -> None:
    """Steps follow each other, and their figures fit together."""
    assert [step.number for step in trace.steps] == list(
        range(trace.steps[0].number, trace.steps[0].number + len(trace.steps))
    )
    for earlier, later in itertools.pairwise(trace.steps):
        assert earlier.end_seconds <= later.start_seconds + 1e-6
        assert earlier.trip <= later.trip
    for step in trace.steps:
        assert step.rows
        assert all(run.tokens > 0 for run in step.rows)
        assert max(run.blocks for run in step.rows) <= step.blocks_used <= step.blocks_total
        assert step.waiting >= 0


def check_nesting(path: Path) -> None:
    """The slices of a track lie within or beside each other, in the order of time: what viewers ask for."""
    stacks: dict[int, list[float]] = defaultdict(list)
    events = [event for event in json.loads(path.read_text()) if event["ph"] in "BEX"]
    for event in sorted(events, key=lambda event: event["ts"]):  # stable, as viewers sort
        stack, start = stacks[event["tid"]], event["ts"]
        if event["ph"] == "E":
            while stack and stack[-1] != float("inf"):
                assert stack.pop() <= start
            assert stack.pop() == float("inf")
            continue
        while stack and stack[-1] <= start:
            stack.pop()
        end = float("inf") if event["ph"] == "B" else start + event["dur"]
        assert not stack or end <= stack[-1]
        stack.append(end)


def test_tokens_add_up_and_rows_are_stable(tmp_path: Path, model) -> None:
    engine = _traced(model, tmp_path / "t.json")
    requests = _requests(9)
    got = _run(engine, requests)
    engine.tracer.close()
    trace = read_trace(tmp_path / "t.json")
    check_rows(trace)
    check_steps(trace)
    check_nesting(tmp_path / "t.json")
    assert max(step.waiting for step in trace.steps) > 0, "nine sequences want six rows"
    ran = defaultdict(Counter)
    for step in trace.steps:
        for run in step.rows:
            ran[run.sequence_id][run.kind] += run.tokens
    for sequence_id, request in requests.items():
        assert ran[sequence_id] == {"prefill": len(request.text_input), "decode": got[sequence_id] - 1}
    ended = [key for step in trace.steps for key in step.finished]
    assert sorted(ended) == [(sequence_id, 0) for sequence_id in requests]
    assert trace.blocks_used[-1][1] == 0
    assert len(trace.holds) == len(requests), "nobody changed rows"


def test_choices_have_rows_of_their_own(tmp_path: Path, model) -> None:
    engine = _traced(model, tmp_path / "t.json")
    sampling = SamplingParams(temperature=1.0)
    _run(engine, {5: GenerationRequest("prompt", 9, n=3, best_of=3, sampling=sampling)})
    engine.tracer.close()
    trace = read_trace(tmp_path / "t.json")
    check_rows(trace)
    assert {(hold.row, hold.choice) for hold in trace.holds} == {(0, 0), (1, 1), (2, 2)}
    assert sorted(key for step in trace.steps for key in step.finished) == [(5, 0), (5, 1), (5, 2)]


def test_a_preempted_sequence_leaves_its_row(tmp_path: Path, model) -> None:
    engine = _traced(model, tmp_path / "t.json", num_blocks=9)
    requests = {i: GenerationRequest(random_prompt(i, 30), 60) for i in range(1, 5)}
    _run(engine, requests)
    engine.tracer.close()
    trace = read_trace(tmp_path / "t.json")
    check_rows(trace)
    check_steps(trace)
    check_nesting(tmp_path / "t.json")
    preempted = Counter(key for step in trace.steps for key in step.preempted)
    assert preempted
    stays = Counter((hold.sequence_id, hold.choice) for hold in trace.holds)
    assert stays == {(i, 0): 1 + preempted[i, 0] for i in requests}


def test_a_sequence_dropped_between_steps_leaves_its_row(tmp_path: Path, model) -> None:
    engine = _traced(model, tmp_path / "t.json")
    engine.add(1, GenerationRequest("gone soon", 50))
    engine.add(2, GenerationRequest("never ran", 50))
    engine.step([1])
    engine.drop(1)
    engine.drop(2)
    engine.drop(2)
    engine.tracer.flush()
    trace = read_trace(tmp_path / "t.json")
    (hold,) = trace.holds
    assert hold.end_seconds >= trace.steps[-1].end_seconds
    assert trace.blocks_used[-1][1] == 0


def test_the_file_is_whole_json_after_every_step_and_readable_when_cut(tmp_path: Path, model) -> None:
    path = tmp_path / "t.json"
    engine = _traced(model, path)
    engine.add(1, GenerationRequest("a prompt", 12))
    for number in range(1, 12):
        engine.step([1])
        engine.tracer.flush()
        json.loads(path.read_text())
        assert len(read_trace(path).steps) == number
    data, whole = path.read_bytes(), read_trace(path)
    for length in range(len(data) // 3, len(data), 97):
        (tmp_path / "cut.json").write_bytes(data[:length])
        cut = read_trace(tmp_path / "cut.json")
        assert cut.steps == whole.steps[: len(cut.steps)]


def test_a_file_never_outgrows_its_bound(tmp_path: Path, model, caplog: pytest.LogCaptureFixture) -> None:
    bound = 64 * 2**10
    path = tmp_path / "t.json"
    engine = _traced(model, path, bound)
    caplog.set_level("INFO")
    engine.add(1, GenerationRequest("x", 400))
    while 1 in engine:
        engine.step([1])
        engine.tracer.flush()
        assert path.stat().st_size <= bound
    older, newer = read_trace(tmp_path / "t.older.json"), read_trace(path)
    assert older.steps[-1].number + 1 == newer.steps[0].number, "nothing is lost between the two"
    check_rows(newer)  # the sequence that was in its row when the file began
    check_nesting(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.older.json"]
    assert "begins anew" in caplog.text


def test_the_trace_of_a_server_before_this_one_is_kept(tmp_path: Path, model) -> None:
    for prompt in ("first", "second one"):
        engine = _traced(model, tmp_path / "t.json")
        _run(engine, {1: GenerationRequest(prompt, 3)})
        engine.tracer.close()
    assert read_trace(tmp_path / "t.json").steps[0].num_tokens == len("second one")
    assert read_trace(tmp_path / "t.older.json").steps[0].num_tokens == len("first")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    foreign_head = '[\n{"ph":"M","tid":1,"args":{"model":"m"}}\n]'
    for text in ("", "hello\nworld", "[\n1\n]", '[\n{"ph":"X"}\n]', "[\n]", foreign_head):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(TraceError, match=r"other\.json"):
            read_trace(tmp_path / "other.json")


def test_off_unless_asked_for_and_a_folder_that_cannot_be_is_refused(tmp_path: Path, model) -> None:
    store = make_engine(model).store
    assert open_tracer(Settings("m"), store, "m_0", "1") is None
    (tmp_path / "file").touch()
    settings = Settings("m", model_directory=tmp_path, trace_directory="file/traces")
    with pytest.raises(SettingsError, match=r"trace_directory.*file/traces/model\.json.*Name a folder"):
        open_tracer(settings, store, "m_0", "1")


def test_instances_and_versions_have_files_of_their_own() -> None:
    one, two = Settings("m", "chat"), Settings("m", "chat", instances=Instances(count=2))
    names = [trace_name(one, "chat_0_0", "1"), trace_name(one, "chat_0_0", "2")]
    names += [trace_name(two, f"chat_0_{i}", version) for i in (0, 1) for version in ("1", "2")]
    assert names[0] == "chat.json"
    assert len(set(names)) == 6


# -- on the real server ----------------------------------------------------------------------------------------

SECRET = "Zanzibar"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model, traces: Path) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    for name, edit in EDITS.items():
        add_model(
            repository,
            name,
            folder,
            slots=SLOTS,
            edit=edit,
            dtype="float32",
            max_tokens_in_paged_kv_cache=32768,
            max_running_sequences=SLOTS,
            enable_kv_cache_reuse="false",
            trace_directory=traces,
        )
    with TritonServer(repository) as running:
        yield running


def _load(server: TritonServer, scheduler: str) -> list[tuple[int, int]]:
    """Send mixed requests at once; (prompt tokens, output tokens) of each."""
    sizes = [(len(SECRET) + 10 * i, 5 + 11 * (i % 3)) for i in range(2 * SLOTS)]  # prompts run in one step

    def ask(size: tuple[int, int]) -> tuple[int, int]:
        prompt = SECRET.ljust(size[0], "z")
        counts = {"return_num_output_tokens": True}
        reply = generate(server, scheduler, prompt, max_tokens=size[1], **counts)
        return size[0], reply["num_output_tokens"]

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(ask, sizes))


def _drive(server: TritonServer) -> list[tuple[int, int]]:
    """The same for clients that ask for each token."""
    drivers = [Driver(server, 100 + i) for i in range(3)]
    for i, driver in enumerate(drivers):
        driver.ask(SECRET * (i + 1), start=True, max_tokens=50)
    for _ in range(4):
        for driver in drivers:
            driver.ask()
    for driver in drivers:
        driver.ask(end=True)
        driver.close()
    return [(len(SECRET) * (i + 1), 5) for i in range(3)]


def _ended(trace: Trace) -> set[int]:
    return {hold.sequence_id for hold in trace.holds if hold.end_seconds is not None}


def _settled_trace(server: TritonServer, path: Path, sequences: int) -> Trace:
    """The trace while the server runs, once it tells of the end of so many sequences."""
    settled(server, lambda _: len(_ended(read_trace(path))) >= sequences)
    settled(server, lambda _: [used for _, used in read_trace(path).blocks_used][-1:] == [0])
    return read_trace(path)


@pytest.mark.server
@pytest.mark.parametrize("scheduler", EDITS)
def test_each_scheduler_traces_what_clients_got(server: TritonServer, traces: Path, scheduler: str) -> None:
    path = traces / f"{scheduler}.json"
    expected = _drive(server) if scheduler == "sequence" else _load(server, scheduler)
    trace = _settled_trace(server, path, len(expected))
    assert (trace.model, trace.scheduler, trace.num_rows) == (scheduler, scheduler, SLOTS)
    check_rows(trace)
    check_steps(trace)
    check_nesting(path)
    ran = defaultdict(Counter)
    for step in trace.steps:
        for run in step.rows:
            ran[run.sequence_id][run.kind] += run.tokens
    sizes = [(counts["prefill"], counts["decode"] + 1) for counts in ran.values()]
    assert sorted(sizes) == sorted(expected)
    assert not any(hold.end_seconds is None for hold in trace.holds)


@pytest.mark.server
@pytest.mark.parametrize("scheduler", ["iterative", "dynamic"])
def test_a_newcomer_joins_who_is_running_or_waits(server: TritonServer, traces: Path, scheduler: str) -> None:
    """The difference that the pictures are drawn for."""
    path = traces / f"{scheduler}.json"
    first_step, ended = len(read_trace(path).steps), len(_ended(read_trace(path)))
    running = Disconnecting(server, scheduler, SECRET, max_tokens=8000)
    running.read_event()
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(generate, server, scheduler, SECRET * 2, max_tokens=5)
        if scheduler == "dynamic":
            settled(server, lambda _: len(read_trace(path).steps) > first_step + 20)
            running.leave()
        assert newcomer.result()["status"] == 200
    running.leave()
    steps = _settled_trace(server, path, ended + 2).steps[first_step:]
    first, second = dict.fromkeys(run.sequence_id for step in steps for run in step.rows)
    turns = {
        i: [s.number for s in steps if any(run.sequence_id == i for run in s.rows)] for i in (first, second)
    }
    assert len(turns[second]) == 5
    assert (turns[second][0] < turns[first][-1]) == (scheduler == "iterative")
    assert len(steps) < 7900, (
        "a client that left within a long trip was noticed, and what ran till then was traced"
    )


@pytest.mark.server
@pytest.mark.usefixtures("server")
def test_no_text_and_no_token_is_in_a_trace(traces: Path) -> None:
    """Every word in the files of all schedulers is one of ours."""
    words: set[str] = set()
    for scheduler in EDITS:
        text = (traces / f"{scheduler}.json").read_text()
        assert SECRET not in text
        words |= set(re.findall(r"[A-Za-z_]+", text))
    assert words <= {
        *EDITS, *Head._fields,
        "pid", "tid", "ts", "ph", "dur", "name", "args", "B", "E", "X", "C", "M",
        "process_name", "thread_name", "thread_sort_index", "sort_index",
        "trips", "steps", "trip", "step", "row", "prefill", "decode", "prefill_tokens", "decode_tokens", "tokens",
        "sequence", "sequences", "running", "waiting", "blocks", "used", "preempted", "finished",
    }  # fmt: skip
    widths = {len(event.get("args", {})) for event in json.loads(text)}
    assert max(widths) <= 9, "no event has room for a list of tokens"


@pytest.mark.server
def test_a_trace_outlives_the_crash_of_its_server(server: TritonServer, traces: Path) -> None:
    """Leaves no server."""
    path = traces / "iterative.json"
    before = len(read_trace(path).steps)
    stream = Disconnecting(server, "iterative", SECRET, max_tokens=8000)
    stream.read_event()
    settled(server, lambda _: len(read_trace(path).steps) > before + 3)
    os.kill(server.pid, signal.SIGKILL)
    stream.leave()
    trace = read_trace(path)
    json.loads(path.read_text())
    assert trace.holds[-1].end_seconds is None
    assert len(trace.steps) > before + 3


def test_the_schedulers_under_test_are_all_there_are() -> None:
    assert set(EDITS) == set(get_args(Scheduler))
