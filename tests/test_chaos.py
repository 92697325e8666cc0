"""Chaos on the real server: whatever clients do at once, nobody hangs, no answer is wrong, nothing leaks."""

from __future__ import annotations

import collections
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer, random_prompt, solo
from idle import assert_slots_usable, endless_model, post
from serving import Call, Disconnecting, add_model, generate, generate_stream, save_model, settled
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

SEED = 20
SLOTS = 8
CLIENTS = 20  # more than the slots of both models together, so that Triton has a backlog too
LONGEST = 60  # tokens of output
MODELS = {"evicting": "max_utilization", "reserving": "guaranteed_no_evict"}
# 28 blocks of 16 tokens: fewer than eight sequences of up to 210 tokens want, more than any one of them does.
STORE = {
    "tokens_per_block": 16,
    "max_tokens_in_paged_kv_cache": 448,
    "max_seq_len": 240,
    "max_num_tokens": 96,
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    ({"text": ""}, "text_input"),
    ({"text": "x" * 241}, "241 tokens long"),
]
_user_ids = itertools.count(2**40)


@dataclass(frozen=True)
class Prompt:
    """A prompt and the tokens that the stock model generates for it alone."""

    text: str
    output: list[int]

    def check(self, text: str, num_tokens: int, max_tokens: int, reason: str) -> None:
        """The answer is that of the oracle; one that ran out of time is the beginning of it."""
        assert reason in ("length", "timeout"), reason
        assert num_tokens == max_tokens or reason == "timeout"
        assert text == byte_tokenizer().decode(self.output[:num_tokens], skip_special_tokens=True)


@pytest.fixture(scope="module")
def model():
    return endless_model()


@pytest.fixture(scope="module")
def prompts(model) -> list[Prompt]:
    dice = random.Random(SEED)
    shared = [random_prompt(seed, 96) for seed in (1, 2)]  # beginnings that some prompts have in common
    texts = [random_prompt(100 + i, dice.randint(1, 150)) for i in range(16)]
    texts += [
        beginning + random_prompt(200 + i, dice.randint(1, 50)) for i, beginning in enumerate(shared * 4)
    ]
    return [Prompt(text, solo(model, byte_tokenizer().encode(text), LONGEST)) for text in texts]


@pytest.mark.parametrize(
    "seconds", [pytest.param(25, id="short"), pytest.param(600, id="full", marks=pytest.mark.long)]
)
def test_chaos(tmp_path: Path, model, prompts: list[Prompt], seconds: int) -> None:
    folder = save_model(tmp_path / "weights", model)
    for name, policy in MODELS.items():
        add_model(
            tmp_path / "models", name, folder,
            slots=SLOTS, dtype="float32", batch_scheduler_policy=policy, enable_kv_cache_reuse="true", **STORE,
        )  # fmt: skip
    server = TritonServer(
        tmp_path / "models", log_path=tmp_path / "server.log", options=["--exit-timeout-secs=60"]
    )
    with server:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(_client, server, prompts, SEED + i, until) for i in range(CLIENTS)]
        done = sum((client.result() for client in clients), collections.Counter())
        print(dict(sorted(done.items())))
        assert all(done[action.__name__] for action in ACTIONS), done
        for name in MODELS:
            assert_slots_usable(server, name, SLOTS, max_tokens=40)
        samples = settled(server, lambda s: s.value("inflight_sequences") == 0)
        assert samples.value("inflight_preemptions_total", model="evicting") > 0
        assert samples.value("inflight_preemptions_total", model="reserving") == 0
        assert samples.value("inflight_prefix_hit_tokens_total") > 0
        assert samples.value("inflight_sequences_total", outcome="cancelled") > 0
        assert samples.value("inflight_sequences_total", outcome="timeout") > 0
        assert samples.value("inflight_sequences_total", outcome="failed") == 0
        time.sleep(1)  # Triton 2.51 may crash when it is stopped just as streaming clients leave
        assert server.stop() == 0, (
            "the models unloaded, and nothing was left for Triton's exit timeout to end"
        )


def _client(server: TritonServer, prompts: list[Prompt], seed: int, until: float) -> collections.Counter[str]:
    """Do one random thing after another; what was done how often."""
    dice = random.Random(seed)
    done: collections.Counter[str] = collections.Counter()
    while time.monotonic() < until:
        time.sleep(dice.expovariate(20))
        action = dice.choice(ACTIONS)
        action(server, dice, dice.choice([*MODELS]), dice.choice(prompts))
        done[action.__name__] += 1
    return done


def _wanted(dice: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": dice.randint(1, LONGEST),
        "return_finish_reason": True,
        "return_num_output_tokens": True,
    }


def _unary(server: TritonServer, dice: random.Random, name: str, prompt: Prompt, **fields: Any) -> None:
    wanted = _wanted(dice)
    reply = generate(server, name, prompt.text, **wanted, **fields)
    if "max_time" in fields and "time allowed" in reply.get("error", ""):
        return
    assert reply["status"] == 200, reply
    prompt.check(
        reply["text_output"], reply["num_output_tokens"], wanted["max_tokens"], reply["finish_reason"]
    )


def _deadline(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    _unary(server, dice, name, prompt, max_time=dice.uniform(0.001, 0.3))


def _stream(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    wanted = _wanted(dice)
    events = generate_stream(server, name, prompt.text, **wanted)
    assert "error" not in events[-1], events[-1]
    text = "".join(event["text_output"] for event in events)
    num_tokens = sum(event["num_output_tokens"] for event in events)
    prompt.check(text, num_tokens, wanted["max_tokens"], events[-1]["finish_reason"])


def _grpc(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    max_tokens = dice.randint(1, LONGEST)
    own_id = {"sequence_id": next(_user_ids), "start": True} if dice.random() < 0.5 else {}
    call = Call(server, name, prompt.text, **own_id, max_tokens=max_tokens).wait()
    assert call.error is None
    prompt.check(call.text, max_tokens, max_tokens, call.finish_reason)


def _disconnect(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    client = Disconnecting(server, name, prompt.text, **_wanted(dice))
    for _ in range(dice.randint(0, 20)):
        client.read_event()
    time.sleep(dice.choice([0, dice.uniform(0, 0.05)]))
    client.leave()


def _disconnect_unary(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    """Triton 2.51 does not notice this one: it runs to its end."""
    body = {"text_input": prompt.text, **_wanted(dice)}
    connection = post(server, f"/v2/models/{name}/generate", json.dumps(body).encode())
    time.sleep(dice.uniform(0, 0.1))
    connection.close()


def _bad_input(server: TritonServer, dice: random.Random, name: str, prompt: Prompt) -> None:
    fields, named = dice.choice(BAD)
    reply = generate(server, name, **{"text": prompt.text, **fields})
    assert reply["status"] == 400, reply
    assert named in reply["error"]


ACTIONS: list[Callable[[TritonServer, random.Random, str, Prompt], None]] = [
    _unary, _unary, _stream, _stream, _grpc, _deadline, _disconnect, _disconnect, _disconnect_unary, _bad_input,
]  # fmt: skip


@pytest.mark.parametrize(
    "count", [pytest.param(60, id="short"), pytest.param(500, id="full", marks=pytest.mark.long)]
)
def test_disconnects_at_the_last_token_cost_no_slot(tmp_path: Path, model, count: int) -> None:
    """Triton 2.51 keeps the slot of a request that is cancelled by the time it is released for good."""
    folder = save_model(tmp_path / "weights", model)
    add_model(
        tmp_path / "models", "tiny", folder, slots=4, dtype="float32", max_tokens_in_paged_kv_cache=16384
    )
    with TritonServer(tmp_path / "models") as server:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: _leave_at_the_last_token(server, random.Random(seed)), range(count)))
        assert_slots_usable(server, "tiny", 4)
        assert server.stop() == 0


def _leave_at_the_last_token(server: TritonServer, dice: random.Random) -> None:
    """Read all but the last token, and go within half a millisecond of when that one is to come."""
    num_tokens = dice.randint(6, 12)
    client = Disconnecting(server, "tiny", "last", max_tokens=num_tokens)
    times = []
    for _ in range(num_tokens - 1):
        assert client.read_event() is not None
        times.append(time.perf_counter())
    interval = statistics.median(after - before for before, after in itertools.pairwise(times))
    leave_at = times[-1] + max(0.0, interval + dice.uniform(-0.0005, 0.0005))
    while time.perf_counter() < leave_at:  # sleeping is not that exact
        pass
    client.leave()
