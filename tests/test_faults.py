"""Faults on the real server: each ends what it has to, and nothing else. The faulty models are custom model code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from conftest import byte_tokenizer, random_prompt, solo
from idle import assert_at_rest, endless_model, expected_text, stub_of, wait_until
from serving import Disconnecting, add_model, generate, http_client, save_model
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

SLOTS = 6
TOKENS = 60
LARGEST_STEP = 64  # tokens of the forward pass that the model says it has memory for

# Two characters that follow each other in a prompt make the forward pass fail in a way of their own.
FAILS, NEEDS_MEMORY = "\x01\x02", "\x03\x04"
MODEL_CODE = f"""
import torch
from transformers import LlamaForCausalLM

class FaultyLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        tokens = input_ids[0].tolist()
        pairs = set(zip(tokens, tokens[1:]))
        if tuple({byte_tokenizer().encode(FAILS)}) in pairs:
            raise ValueError("the model itself failed")
        if tuple({byte_tokenizer().encode(NEEDS_MEMORY)}) in pairs and len(tokens) > {LARGEST_STEP}:
            raise torch.OutOfMemoryError(f"no memory for {{len(tokens)}} tokens")
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs
        )
"""
TOKENIZER_CODE = """
from transformers import PreTrainedTokenizerFast

class FaultyTokenizer(PreTrainedTokenizerFast):
    def decode(self, token_ids, *args, **kwargs):
        if MAGIC in token_ids:
            raise KeyError("this token cannot be decoded")
        return super().decode(token_ids, *args, **kwargs)
"""


@pytest.fixture(scope="module")
def model():
    return endless_model()


@pytest.fixture(scope="module")
def outputs(model) -> dict[str, list[int]]:
    prompts = [random_prompt(i, 20) for i in range(SLOTS)]
    return {prompt: solo(model, byte_tokenizer().encode(prompt), TOKENS) for prompt in prompts}


@pytest.fixture(scope="module")
def victim(outputs: dict[str, list[int]]) -> tuple[str, int, int]:
    """(prompt, token, position) of a token that one output alone holds, and not at its beginning."""
    for prompt, output in outputs.items():
        others = {token for other, tokens in outputs.items() if other != prompt for token in tokens}
        for position, token in enumerate(output):
            if position > 3 and token not in others and token not in output[:position] and token > 127:
                return prompt, token, position
    raise AssertionError("no output has a token of its own")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model, victim) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    (folder / "faulty_model.py").write_text(MODEL_CODE)
    (folder / "faulty_tokenizer.py").write_text(f"MAGIC = {victim[1]}\n{TOKENIZER_CODE}")
    _declare(folder / "config.json", AutoModelForCausalLM="faulty_model.FaultyLlamaForCausalLM")
    _declare(folder / "tokenizer_config.json", AutoTokenizer=[None, "faulty_tokenizer.FaultyTokenizer"])
    repository = tmp_path_factory.mktemp("models")
    add_model(
        repository, "faulty", folder,
        slots=SLOTS, dtype="float32", max_tokens_in_paged_kv_cache=8192, trust_remote_code="true",
    )  # fmt: skip
    with TritonServer(repository, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def _declare(path: Path, **classes: object) -> None:
    """Name the classes that come with a model's folder in one of its files."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": classes}))


def test_a_fault_in_one_sequences_text_ends_that_sequence_alone(
    server: TritonServer, outputs: dict[str, list[int]], victim: tuple[str, int, int]
) -> None:
    with ThreadPoolExecutor(SLOTS) as pool:
        replies = dict(
            zip(
                outputs,
                pool.map(lambda prompt: generate(server, "faulty", prompt, max_tokens=TOKENS), outputs),
                strict=True,
            )
        )
    assert "this token cannot be decoded" in replies.pop(victim[0])["error"]
    for prompt, reply in replies.items():
        assert reply["text_output"] == byte_tokenizer().decode(outputs[prompt], skip_special_tokens=True)
    assert_at_rest(server, "faulty")


def test_what_was_streamed_before_the_fault_was_right(
    server: TritonServer, outputs: dict[str, list[int]], victim: tuple[str, int, int]
) -> None:
    prompt, _, position = victim
    stream = Disconnecting(server, "faulty", prompt, max_tokens=TOKENS)
    events = []
    while (event := stream.read_event()) is not None:
        events.append(event)
    stream.leave()
    assert "this token cannot be decoded" in events[-1]["error"]
    text = "".join(event["text_output"] for event in events[:-1])
    whole = byte_tokenizer().decode(outputs[prompt][:position], skip_special_tokens=True)
    assert whole.startswith(text)
    assert len(events) > 1


def test_a_prompt_whose_text_cannot_be_decoded_is_refused_alone(server: TritonServer, victim) -> None:
    neighbour = Disconnecting(server, "faulty", "a neighbour", max_tokens=200)
    neighbour.read_event()
    reply = generate(server, "faulty", "", input_ids=f"[65, {victim[1]}]", max_tokens=3)
    assert "this token cannot be decoded" in reply["error"]
    while (event := neighbour.read_event()) is not None:
        assert "error" not in event
    neighbour.leave()


def test_a_failed_forward_pass_ends_its_step_and_no_more(server: TritonServer, model) -> None:
    neighbour = Disconnecting(server, "faulty", "a neighbour", max_tokens=3000, return_finish_reason=True)
    neighbour.read_event()
    assert "the model itself failed" in generate(server, "faulty", f"x{FAILS}", max_tokens=3)["error"]
    *_, last = iter(neighbour.read_event, None)
    # Triton may bring the two on trips apart: who was in the failed step is told so, who was not ends as usual.
    if "error" in last:
        assert "the model itself failed" in last["error"]
    else:
        assert last["finish_reason"] == "length"
    neighbour.leave()
    reply = generate(server, "faulty", "afterwards", max_tokens=20)
    assert reply["text_output"] == expected_text(model, "afterwards", 20)
    assert_at_rest(server, "faulty")


def test_a_step_that_runs_out_of_memory_is_run_in_smaller_parts(server: TritonServer, model) -> None:
    """One alone, whose prompt is larger than the model has memory for, and one beside others."""
    prompt = f"{NEEDS_MEMORY}{'memory ' * 14}"
    assert LARGEST_STEP < len(prompt) <= 2 * LARGEST_STEP
    assert generate(server, "faulty", prompt, max_tokens=20)["text_output"] == expected_text(
        model, prompt, 20
    )
    neighbour = Disconnecting(server, "faulty", "a neighbour", max_tokens=600)
    text = neighbour.read_event()["text_output"]
    for i in range(3):
        other = f"{i}{prompt[: LARGEST_STEP - 1]}"  # nothing of it is in the store already
        assert generate(server, "faulty", other, max_tokens=20)["text_output"] == expected_text(
            model, other, 20
        )
    while (event := neighbour.read_event()) is not None:
        text += event["text_output"]
    neighbour.leave()
    assert text == expected_text(model, "a neighbour", 600)
    # One was alone; of the others at least the first came beside the neighbour.
    assert len(re.findall("out of memory in a step", server.log_path.read_text())) >= 2
    assert_at_rest(server, "faulty")


@pytest.mark.parametrize(
    "count", [pytest.param(2, id="short"), pytest.param(10, id="full", marks=pytest.mark.long)]
)
def test_load_and_unload_again_and_again(tmp_path: Path, model, count: int) -> None:
    """Few in the suite: each load imports torch anew."""
    folder = save_model(tmp_path / "weights", model)
    add_model(tmp_path / "models", "tiny", folder, dtype="float32", max_tokens_in_paged_kv_cache=4096)
    expected = expected_text(model, "round", 10)
    with TritonServer(tmp_path / "models", models=["tiny"]) as server:
        with http_client(server) as client:
            for _ in range(count):
                assert generate(server, "tiny", "round", max_tokens=10)["text_output"] == expected
                gone = stub_of(server, "tiny")
                for _ in range(
                    3
                ):  # whatever still refers to a request of theirs would keep the model from unloading
                    leaves = Disconnecting(server, "tiny", "leaves", max_tokens=3000)
                    leaves.read_event()
                    leaves.leave()
                client.unload_model("tiny")
                wait_until(lambda process=gone: not process.is_running(), "the stub has ended")
                assert generate(server, "tiny", "round")["status"] >= 400
                client.load_model("tiny")
            assert generate(server, "tiny", "round", max_tokens=10)["text_output"] == expected
        assert server.stop() == 0


# -- a stub that is killed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, model) -> Path:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tiny", folder, dtype="float32", max_tokens_in_paged_kv_cache=8192, slots=2)
    return repository


def test_clients_of_a_killed_stub_get_an_error(repository: Path) -> None:
    with TritonServer(repository) as server:
        stream = Disconnecting(server, "tiny", "stream", max_tokens=3000)
        stream.read_event()
        os.kill(stub_of(server, "tiny").pid, signal.SIGKILL)
        started = time.monotonic()
        last = None
        while (event := stream.read_event()) is not None:
            last = event
        assert "not healthy" in last["error"]
        assert generate(server, "tiny", "another")["status"] >= 400
        assert time.monotonic() - started < 30  # rather than for ever
        stream.leave()


class _Serve:
    """`triton-inflight serve` as a process."""

    def __init__(self, repository: Path, *options: str) -> None:
        command = [Path(sys.executable).parent / "triton-inflight", "serve", "--model-repository", repository]
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self.process = subprocess.Popen(
            [*command, *ports, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Serve:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)

    def http_url(self) -> str:
        """Wait until it says that it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("HTTP"):
                return line.split()[1]
        raise AssertionError(self.process.stderr.read())

    def kill_stub(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        (stub,) = [child for child in children if "tiny_0_0" in child.cmdline()]
        stub.kill()

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def test_serve_exits_with_the_reason_when_a_stub_dies(repository: Path) -> None:
    with _Serve(repository) as serve:
        serve.http_url()
        serve.kill_stub()
        code, errors = serve.end()
    assert code == 1
    assert "the Python process of 'tiny' has died" in errors


def test_serve_with_restart_serves_again(repository: Path) -> None:
    with _Serve(repository, "--restart") as serve:
        before = serve.http_url()
        serve.kill_stub()
        assert serve.http_url() == before, "at the same address"
        body = json.dumps({"text_input": "x", "max_tokens": 2}).encode()
        with urlopen(f"{before}/v2/models/tiny/generate", body, timeout=30) as response:
            assert json.load(response)["text_output"]
        serve.process.send_signal(signal.SIGTERM)
        code, errors = serve.end()
    assert code == 0
    assert "restarting" in errors
