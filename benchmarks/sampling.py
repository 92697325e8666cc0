"""What sampling costs, one feature at a time, as a share of a step of decoding.

A step runs the model once for all its sequences and then chooses a token for each; the time for the choice is
time in which the model does not run. Each line below gives all rows the same feature, so that lines can be
compared and a mixed batch is somewhere between its features' lines.

Sampling runs on one thread, however many the model has. The scores are made up: each row's probabilities fall with
their rank by a power between 1.2 (unsure, as in the middle of a story) and 2.5 (sure, as in the middle of a word).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from triton_inflight.logprobs import logprobs_of
from triton_inflight.sampling import sample
from triton_inflight.sampling_params import SamplingParams
from triton_inflight.sampling_state import SamplingState
from triton_inflight.stops import StopStrings

FEATURES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "temperature + top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "temperature + top_k 50 + top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "temperature + top_k 2000": SamplingParams(temperature=0.8, top_k=2000),
    "temperature + top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "temperature + top_p 0.5": SamplingParams(temperature=0.8, top_p=0.5),
    "temperature + min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "temperature + top_k 50 + typical_p 0.9": SamplingParams(temperature=0.8, top_k=50, typical_p=0.9),
    "temperature + typical_p 0.9": SamplingParams(temperature=0.8, typical_p=0.9),
    "repetition_penalty": SamplingParams(repetition_penalty=1.2),
    "presence + frequency penalty": SamplingParams(presence_penalty=0.5, frequency_penalty=0.2),
    "logit_bias, 100 tokens": SamplingParams(logit_bias=dict.fromkeys(range(100), -1.0)),
    "bad_words, 20 of 2 tokens": SamplingParams(bad_words=tuple((token, 7) for token in range(20))),
    "min_tokens": SamplingParams(min_tokens=1_000_000),
}


def made_up_scores(rows: int, vocabulary: int) -> torch.Tensor:
    """(rows, vocabulary) float32."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.linspace(1.2, 2.5, rows)[:, None]
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)]) + 1
    noise = torch.rand(rows, vocabulary, generator=generator)
    return noise - powers * ranks.log()


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The median duration, after a warm-up."""
    durations = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations[3:]) * 1e3


def measure(rows: int, vocabulary: int, text: int, repeats: int, device: str) -> dict[str, float]:
    """Milliseconds per step by feature."""
    scores = made_up_scores(rows, vocabulary).to(device)
    prompt = torch.randint(vocabulary, (text,), generator=torch.Generator().manual_seed(1)).tolist()
    result = {}
    for name, params in FEATURES.items():
        states = [SamplingState(params, prompt, [2]) for _ in range(rows)]
        for state in states:
            for token in prompt:
                state.append(token)

        def step(states: list[SamplingState] = states) -> None:
            for state, token in zip(states, sample(scores, states), strict=True):
                state.append(token)

        result[name] = milliseconds(step, repeats)
    tokens = sample(scores)
    for count in (0, 5):
        result[f"logprobs, top {count} (besides the choice)"] = milliseconds(
            lambda count=count: logprobs_of(scores, tokens, [count] * rows), repeats
        )
    matchers = [StopStrings(["\n\nUser:", "<|end|>", "###"]) for _ in range(rows)]
    result["3 stop strings (besides the choice)"] = milliseconds(
        lambda: [matcher.push(" word") for matcher in matchers], repeats
    )
    return result


def main(
    rows: Annotated[int, typer.Option(help="Sequences in the step.")] = 32,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the model; 49,152 is SmolLM2's.")] = 49152,
    step_ms: Annotated[
        float,
        typer.Option(
            help="Duration of a whole step to compare with, in milliseconds; 35 is about that of SmolLM2-135M "
            "with 32 sequences on 2 cores. Take yours from the server's metrics."
        ),
    ] = 35.0,
    text: Annotated[
        int, typer.Option(help="Tokens of each prompt, and of each output so far; penalties look at both.")
    ] = 500,
    repeats: Annotated[int, typer.Option(help="Steps measured per feature; the median is shown.")] = 50,
    device: Annotated[str, typer.Option(help="Where the scores are: cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Measure what each sampling feature adds to a step of decoding.

    Example: python benchmarks/sampling.py --rows 64 --step-ms 60
    """
    measured = measure(rows, vocabulary, text, repeats, device)
    if as_json:
        print(
            json.dumps({"rows": rows, "vocabulary": vocabulary, "step_ms": step_ms, "milliseconds": measured})
        )
        return
    print(f"{rows} rows, {vocabulary:,} tokens, {device}; a step of {step_ms:g} ms\n")
    print(f"{'feature':<42}{'ms':>8}{'of a step':>12}")
    for name, duration in measured.items():
        print(f"{name:<42}{duration:>8.2f}{duration / step_ms:>12.1%}")


if __name__ == "__main__":
    typer.run(main)
