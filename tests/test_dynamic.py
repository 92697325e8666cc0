"""The dynamic batching that `init` writes: its batches are as full as can be, else comparisons with it are unfair."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import tiny_model
from serving import Disconnecting, generate, save_model
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.settings import parameter_text
from triton_inflight.trace_reading import read_trace

pytestmark = pytest.mark.server


def test_who_comes_while_a_batch_runs_is_in_the_next_one(tmp_path: Path) -> None:
    """Triton would form it of the first that comes, and let the others wait for one batch more."""
    model = tiny_model("llama", max_position_embeddings=8192, tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # no sequence ends by itself
    folder = save_model(tmp_path / "weights", model)
    config = init_model(tmp_path / "models", "m", str(folder), max_batch_size=4, scheduler="dynamic")
    config.write_text(config.read_text() + parameter_text("trace_directory", str(tmp_path / "traces")))
    with TritonServer(tmp_path / "models") as server, ThreadPoolExecutor(3) as pool:
        running = Disconnecting(server, "m", "first", max_tokens=8000)
        running.read_event()
        waiting = []
        for text in ("second", "third", "fourth"):
            waiting.append(pool.submit(generate, server, "m", text, max_tokens=3))
            time.sleep(0.2)  # far above the queue delay
        running.leave()
        assert [each.result()["status"] for each in waiting] == [200, 200, 200]
    steps = read_trace(tmp_path / "traces" / "m.json").steps
    assert max(len(step.rows) for step in steps) == 3, "they ran together"
