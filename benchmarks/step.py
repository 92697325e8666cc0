"""How long a step of the engine takes, and what it is made of.

Runs the engine in this process, without Triton: random prompts of one length, greedy, end of sequence ignored.
With --baseline, the same model without packed weights and fused modules runs in the same rounds, in turn with
the served one, so that a busy neighbour slows both; ratios are taken round by round.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any
from unittest.mock import patch

from triton_inflight.threads import bound_spinning

bound_spinning()  # before torch is imported, as the server does

import torch  # noqa: E402
import typer  # noqa: E402

from triton_inflight import _native, prepared  # noqa: E402
from triton_inflight.bench_breakdown import timed, timed_parts  # noqa: E402
from triton_inflight.bench_machine import describe_machine, in_words  # noqa: E402
from triton_inflight.bench_rounds import Spread  # noqa: E402
from triton_inflight.engine import Engine  # noqa: E402
from triton_inflight.loader import load_engine  # noqa: E402
from triton_inflight.native_attention import NativePool  # noqa: E402
from triton_inflight.packing import Packed  # noqa: E402
from triton_inflight.protocol import GenerationRequest  # noqa: E402
from triton_inflight.sampling_params import SamplingParams  # noqa: E402
from triton_inflight.settings import Settings  # noqa: E402
from triton_inflight.weights import DEFAULT_REFERENCE  # noqa: E402

RATES = ("decode", "end_to_end", "prefill")
DEFAULT_SEQUENCES = [1, 8, 16, 32]
DEFAULT_QUANTIZATION = ["none"]
BASELINE = "baseline"
PARTS = (
    "plan",
    "batch",
    "layers",
    "linear",
    "norm_and_rotary",
    "attention",
    "forward_rest",
    "sampling",
    "text_and_rest",
)


def load(model: str, dtype: str, tokens: int, quantization: str = "none", packed: bool = True) -> Engine:
    """An engine, of the model as it is served or as it comes."""
    settings = Settings(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        max_batch_size=256,
        max_tokens_in_paged_kv_cache=tokens,
        enable_kv_cache_reuse=False,
    )
    with ExitStack() as stack:
        if not packed:
            stack.enter_context(patch.object(prepared, "pack", lambda *_: Packed(0, 0, 0.0)))
            stack.enter_context(patch.object(prepared.PackedCache, "of", lambda *_: None))
        return load_engine(settings).engine


def run(subject: Engine, sequences: int, inputs: int, outputs: int) -> dict[str, float]:
    """Tokens per second of one batch that starts together; decode is that of the median step."""
    generator = random.Random(0)
    begin = time.perf_counter()
    for i in range(sequences):
        prompt = tuple(generator.randrange(subject._runner.vocabulary_size) for _ in range(inputs))
        sampling = SamplingParams(ignore_eos=True)
        subject.add(i, GenerationRequest("", outputs, input_ids=prompt, sampling=sampling))
    live = set(range(sequences))
    decode, prefill = [], 0.0
    while live:
        start = time.perf_counter()
        step = subject.step(sorted(live))
        took = time.perf_counter() - start
        if step.num_prefill_tokens == 0:
            decode.append(took)
        else:
            prefill += took
        for update in step.updates:
            assert update.error is None, update.error
            if update.finish_reason is not None:
                live.discard(update.sequence_id)
    total = time.perf_counter() - begin
    return {
        "decode": sequences / statistics.median(decode),
        "end_to_end": sequences * outputs / total,
        "prefill": sequences * inputs / prefill,
        "step_ms": statistics.median(decode) * 1e3,
    }


# Where the time of a forward pass goes: the part, and the function whose calls are counted for it.
_FORWARD: tuple[tuple[str, Any, str], ...] = (
    ("layers", _native, "decoder_stack"),  # all of them, attention included, where they run in one call
    ("linear", _native, "linear"),
    ("linear", _native, "gated_mlp"),
    ("linear", _native, "layer_input"),  # with the norms and rotary positions of their layer
    ("linear", _native, "layer_output"),
    ("linear", torch.nn.functional, "linear"),
    ("norm_and_rotary", _native, "rms_norm"),
    ("norm_and_rotary", _native, "rotate"),
    ("attention", NativePool, "attend"),
)


def breakdown(subject: Engine, sequences: int, inputs: int, outputs: int) -> dict[str, float]:
    """Milliseconds of a step by its parts, prefill included, as means over a whole run.

    Timing costs about a microsecond a call.
    """
    calls: dict[str, list[float]] = defaultdict(list)
    with timed_parts(subject) as figures, ExitStack() as stack:
        for part, holder, name in _FORWARD:
            stack.enter_context(timed(calls[part], holder, name))
        run(subject, sequences, inputs, outputs)
    seconds = {part: sum(calls[part]) for part in calls}
    seconds["forward_rest"] = figures["forward_seconds"] - sum(seconds.values())
    seconds |= {part: figures[f"{part}_seconds"] for part in ("plan", "batch", "sampling")}
    seconds["text_and_rest"] = figures["text_seconds"] + figures["rest_seconds"]
    parts = {part: seconds[part] / figures["steps"] * 1e3 for part in PARTS}
    return {**parts, "step": sum(parts.values())}


def main(
    sequences: Annotated[
        list[int], typer.Option(help="Sequences that run together; give it several times.")
    ] = DEFAULT_SEQUENCES,
    inputs: Annotated[int, typer.Option("--input", help="Tokens of each prompt.")] = 64,
    outputs: Annotated[int, typer.Option("--output", help="Tokens generated for each.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; more give a truer median on a busy machine.")] = 5,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also run the model without packed weights, in turn.")
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts", help="Add what a step is made of; measured in a run of its own.")
    ] = False,
    quantization: Annotated[
        list[str], typer.Option(help="none, int8 or int4; several run in turn, compared with the first.")
    ] = DEFAULT_QUANTIZATION,
    model: Annotated[str, typer.Option(help="Model reference, as in config.pbtxt.")] = DEFAULT_REFERENCE,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads; 0 is as many as torch takes by itself.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Measure the engine in this process: tokens per second, and the parts of a step.

    decode counts tokens of steps in which every sequence gets one, at the median step; end to end counts all
    output tokens from the first request to the last answer; prefill counts prompt tokens of the steps that run
    some. Compare kernels by setting TRITON_INFLIGHT_ISA to portable, avx2, avx512 or avx512_bf16.

    Examples:

    python benchmarks/step.py --sequences 1 --sequences 32 --baseline --parts

    python benchmarks/step.py --quantization none --quantization int8 --quantization int4
    """
    if threads:
        torch.set_num_threads(threads)
    tokens = max(sequences) * (inputs + outputs + 64)
    engines = {BASELINE: load(model, dtype, tokens, packed=False)} if baseline else {}
    engines |= {name: load(model, dtype, tokens, name) for name in quantization}
    first, *others = engines
    results = []
    for count in sequences:
        rates: dict[str, dict[str, list[float]]] = {
            name: {rate: [] for rate in (*RATES, "step_ms")} for name in engines
        }
        for subject in engines.values():
            run(subject, count, inputs, 4)
        for _ in range(rounds):
            for name, subject in engines.items():
                for rate, value in run(subject, count, inputs, outputs).items():
                    rates[name][rate].append(value)
        result: dict[str, Any] = {"sequences": count}
        for name, subject in engines.items():
            result[name] = {rate: Spread.of(values) for rate, values in rates[name].items()}
            if parts:
                result[name]["parts_ms"] = breakdown(subject, count, inputs, outputs)
        for name in others:
            result[name]["ratio"] = {
                rate: Spread.of([a / b for a, b in zip(rates[name][rate], rates[first][rate], strict=True)])
                for rate in RATES
            }
        results.append(result)
    report = {
        "machine": {
            **describe_machine(),
            "threads": torch.get_num_threads(),
            "isa": _native.chosen_isa().name,
        },
        "model": model,
        "dtype": dtype,
        "input": inputs,
        "output": outputs,
        "rounds": rounds,
        "results": results,
    }
    print(json.dumps(report, indent=2, default=asdict) if as_json else text(report))


def text(report: dict[str, Any]) -> str:
    where = report["machine"]
    lines = [
        f"{in_words(where)}; {where['threads']} threads, {where['isa']}; {report['model']} in {report['dtype']}; "
        f"{report['input']} tokens in, {report['output']} out; median (min to max) of {report['rounds']} rounds"
    ]
    for result in report["results"]:
        for name, values in result.items():
            if name == "sequences":
                continue
            lines.append(
                f"{result['sequences']:>3} {name:<9} decode {values['decode'].in_words()} tok/s, "
                f"step {values['step_ms'].in_words(1)} ms, end to end {values['end_to_end'].in_words()}, "
                f"prefill {values['prefill'].in_words()}"
            )
            if "parts_ms" in values:
                shares = ", ".join(f"{part} {ms:.2f}" for part, ms in values["parts_ms"].items())
                lines.append(f"      mean ms of a step: {shares}")
            if "ratio" in values:
                ratios = ", ".join(f"{rate} {ratio.in_words(2)}" for rate, ratio in values["ratio"].items())
                lines.append(f"      of the first: {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
