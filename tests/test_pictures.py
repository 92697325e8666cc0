"""Pictures of real traces and of measurements: what they show, by their artists and labels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from conftest import make_engine, random_prompt, tiny_model
from triton_inflight.errors import InflightError
from triton_inflight.pictures import (
    Latencies,
    LoadPoint,
    latency_cdfs,
    load_curves,
    save,
    sequences_per_step,
    slot_timeline,
)
from triton_inflight.protocol import GenerationRequest
from triton_inflight.trace import Tracer
from triton_inflight.trace_events import Head
from triton_inflight.trace_reading import Trace, read_trace

ROWS = 3
PREFILL, DECODE, HELD, IDLE = "#e69f00", "#0072b2", "#bfd9ea", "#efefef"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Four sequences over three rows; the first is left out of two steps."""
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    engine = make_engine(model, max_running_sequences=ROWS)
    path = tmp_path_factory.mktemp("trace") / "t.json"
    head = Head("tiny", "iterative", ROWS, engine.store.num_blocks, 0.0, 1)
    engine.tracer = Tracer(path, head, engine.store, 2**20)
    for i in range(4):
        engine.add(2**63 + i, GenerationRequest(random_prompt(i, 10 + i), 6 + i))
    for step in range(100):
        live = [2**63 + i for i in range(4) if 2**63 + i in engine]
        if live:
            engine.step(live[1:] if step in (2, 3) else live)
    engine.tracer.close()
    return read_trace(path)


def _bars(figure: Figure, colour: str, panel: int = 0) -> list[tuple[float, float, int]]:
    """(begin, end, row) of the bars of a colour in a timeline."""
    bars = []
    for collection in figure.axes[panel].collections:
        if len(collection.get_facecolor()) and to_hex(collection.get_facecolor()[0]) == colour:
            for path in collection.get_paths():
                box = path.get_extents()
                bars.append((box.x0, box.x1, round((box.y0 + box.y1) / 2)))
    return bars


def _texts(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_run_of_a_step_is_a_cell_of_its_kind(trace: Trace) -> None:
    figure = slot_timeline(trace, axis="steps")
    for kind, colour in (("prefill", PREFILL), ("decode", DECODE)):
        expected = [
            (float(index), index + 1.0, run.row)
            for index, step in enumerate(trace.steps)
            for run in step.rows
            if run.kind == kind
        ]
        np.testing.assert_allclose(sorted(_bars(figure, colour)), sorted(expected))
    assert figure.axes[0].get_xlabel() == "step"
    assert _legend(figure) == ["prefill", "decode", "held, not running", "idle"]
    ran = {text for text in _texts(figure) if len(text) == 2}
    assert ran == {"10", "11", "12", "13"}, "the tokens of each prompt stand in its cell"
    assert {"1", "2", "3", "4"} <= set(_texts(figure)), "sequences are numbered as they appear"
    labelled = slot_timeline(trace, axis="steps", labels={2**63: "first"})
    assert "first" in _texts(labelled)


def test_seconds_are_those_of_the_trace_and_what_is_held_lies_behind(trace: Trace) -> None:
    origin = trace.steps[0].start_seconds - 1
    figure = slot_timeline(trace, origins=[origin])
    begin = min(begin for begin, _, _ in _bars(figure, PREFILL))
    end = max(end for _, end, _ in _bars(figure, DECODE))
    assert (begin, end) == pytest.approx((1.0, trace.steps[-1].end_seconds - origin), abs=1e-6)
    held = sorted((h.start_seconds - origin, h.end_seconds - origin, h.row) for h in trace.holds)
    np.testing.assert_allclose(sorted(_bars(figure, HELD)), held)
    assert sorted(row for _, _, row in _bars(figure, IDLE)) == list(range(ROWS))
    (panel,) = figure.axes
    assert (panel.get_title(loc="left"), panel.get_xlabel(), panel.get_ylabel()) == (
        "iterative",
        "time (s)",
        "row",
    )
    share = trace.busy_share(origin, trace.steps[-1].end_seconds)
    assert panel.get_title(loc="right") == f"rows busy {share:.0%}"


def test_busy_share_counts_rows_by_time(trace: Trace) -> None:
    step = trace.steps[0]
    assert trace.busy_share(step.start_seconds, step.end_seconds) == pytest.approx(len(step.rows) / ROWS)
    gone = trace.steps[-1].end_seconds
    assert trace.busy_share(gone, gone + 1) == 0


def test_several_traces_share_one_axis(trace: Trace) -> None:
    figure = slot_timeline([trace, trace], titles=["one", "two"], window=(0.0, 0.01))
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["one", "two"]
    assert {panel.get_xlim() for panel in figure.axes} == {(0.0, 0.01)}


def test_sequences_per_step_are_those_of_the_trace(trace: Trace) -> None:
    figure = sequences_per_step([trace, trace], titles=["iterative", "dynamic"])
    counts = [len(step.rows) for step in trace.steps]
    for panel in figure.axes:
        (area,) = panel.collections
        assert area.get_paths()[0].vertices[:, 1].max() == max(counts)
        durations = np.array([step.duration_seconds for step in trace.steps])
        mean = counts @ durations / durations.sum()
        assert panel.lines[0].get_ydata()[0] == pytest.approx(mean)
        assert panel.get_title(loc="right") == f"mean {mean:.1f}"
    assert figure.axes[-1].get_xlabel() == "time (s)"
    assert figure.get_supylabel() == "sequences in the step"


def test_load_curves_have_a_line_of_medians_in_a_band_for_each_scheduler() -> None:
    points = [
        LoadPoint("dynamic", 8, [90.0, 100.0, 140.0], [1.0, 2.0, 4.0], [9.0, 10.0, 11.0]),
        LoadPoint("dynamic", 2, [50.0, 60.0, 65.0], [0.5, 0.6, 0.7], [1.0, 1.0, 1.0]),
        LoadPoint("iterative", 2, [80.0], [0.1], [0.2]),
    ]
    figure = load_curves(points, load_label="offered load (requests/s)")
    throughput, median, tail = figure.axes
    dynamic, iterative = throughput.get_lines()
    assert dynamic.get_xydata().tolist() == [[2, 60], [8, 100]]
    assert iterative.get_xydata().tolist() == [[2, 80]]
    low, high = throughput.collections[0].get_datalim(throughput.transData).intervaly
    assert (low, high) == (50, 140)
    assert [line.get_ydata().tolist() for line in median.get_lines()] == [[0.6, 2.0], [0.1]]
    assert [line.get_ydata().tolist() for line in tail.get_lines()] == [[1.0, 10.0], [0.2]]
    assert throughput.get_title(loc="left") == "throughput (output tokens/s)"
    assert tail.get_title(loc="left") == "TTFT, p99 (s, log scale)", "0.2 and 10 s on one axis"
    assert {panel.get_xlabel() for panel in figure.axes} == {"offered load (requests/s)"}
    assert _legend(figure) == ["dynamic", "iterative"]
    assert dynamic.get_color() != iterative.get_color()
    assert dynamic.get_marker() != iterative.get_marker()


def test_cdfs_reach_each_share_at_its_latency() -> None:
    seconds = np.array([0.4, 0.1, 0.2, 0.3])
    figure = latency_cdfs([Latencies("iterative", seconds, seconds / 10, seconds * 10)])
    scales = [panel.get_lines()[0].get_xdata()[1:] / np.sort(seconds) for panel in figure.axes]
    assert np.allclose(scales, [[1] * 4, [100] * 4, [10] * 4]), "seconds, milliseconds, seconds"
    assert figure.axes[0].get_lines()[0].get_ydata().tolist() == [0, 25, 50, 75, 100]
    assert [panel.get_xlabel() for panel in figure.axes] == [
        "seconds (log scale)", "milliseconds (log scale)", "seconds (log scale)",
    ]  # fmt: skip


def test_a_scheduler_has_the_same_colour_in_every_picture(trace: Trace) -> None:
    point = LoadPoint("iterative", 1, [1.0], [1.0], [1.0])
    line = load_curves([LoadPoint("baseline", 1, [1.0], [1.0], [1.0]), point]).axes[0].get_lines()[1]
    area = sequences_per_step(trace).axes[0].collections[0]
    assert to_hex(line.get_color()) == to_hex(area.get_facecolor()[0])


def test_saved_pictures_are_the_same_bytes_each_time(trace: Trace, tmp_path: Path) -> None:
    first = save(slot_timeline(trace), tmp_path / "new" / "a.png").read_bytes()
    second = save(slot_timeline(trace), tmp_path / "b.png").read_bytes()
    assert first == second
    assert first.startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said() -> None:
    empty = Trace("m", "iterative", 1, 1, 0.0, (), (), ())
    for draw in (
        lambda: slot_timeline(empty),
        lambda: sequences_per_step(empty),
        lambda: load_curves([]),
        lambda: latency_cdfs([]),
    ):
        with pytest.raises(ValueError, match=r"without"):
            draw()


def test_without_matplotlib_the_extra_is_named(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python marks what cannot be imported
    with pytest.raises(InflightError, match=r"triton-inflight\[compare\]"):
        slot_timeline(trace)
