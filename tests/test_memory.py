"""Memory stays flat however long a server runs: that of the stub, and what it shares with tritonserver."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import random_prompt
from idle import assert_at_rest, endless_model, stub_of
from serving import add_model, generate, generate_stream, save_model
from triton_inflight.launcher import TritonServer
from triton_inflight.supervisor import SHARED_MEMORY

pytestmark = pytest.mark.server

SEQUENCES = 16
WARM = 5  # rounds until every buffer has been made once


@pytest.mark.parametrize(
    ("rounds", "max_tokens", "tolerance"),
    [
        pytest.param(9, 150, 0.03, id="short"),
        pytest.param(20, 2000, 0.01, id="full", marks=pytest.mark.long),
    ],
)
def test_memory_is_flat(tmp_path: Path, rounds: int, max_tokens: int, tolerance: float) -> None:
    """Half of the sequences stream, so that responses of both kinds pass through the shared memory."""
    folder = save_model(tmp_path / "weights", endless_model())
    tokens = SEQUENCES * (max_tokens + 128)
    add_model(
        tmp_path / "models", "tiny", folder,
        slots=SEQUENCES, dtype="float32", max_tokens_in_paged_kv_cache=tokens,
    )  # fmt: skip
    with TritonServer(tmp_path / "models") as server, ThreadPoolExecutor(SEQUENCES) as pool:
        stub = stub_of(server, "tiny")

        def ask(prompt: str) -> None:
            if len(prompt) % 2:
                assert generate(server, "tiny", prompt, max_tokens=max_tokens)["status"] == 200
            else:
                assert "error" not in generate_stream(server, "tiny", prompt, max_tokens=max_tokens)[-1]

        resident, shared = [], []
        for round_ in range(rounds):
            list(pool.map(ask, [random_prompt(round_ * 100 + i, 50 + i) for i in range(SEQUENCES)]))
            assert_at_rest(server, "tiny")
            resident.append(stub.memory_info().rss)
            shared.append(_shared_bytes(server))
        print("resident", resident, "shared", shared)
        assert resident[-1] <= resident[WARM - 1] * (1 + tolerance), resident
        assert shared[-1] <= shared[WARM - 1] * (1 + tolerance), shared


def _shared_bytes(server: TritonServer) -> int:
    files = list(SHARED_MEMORY.glob(server.shm_prefix + "*"))
    assert files
    return sum(file.stat().st_size for file in files)
