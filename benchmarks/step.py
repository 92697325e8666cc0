"""How long a step of the engine takes, and what it is made of.

Runs the engine in this process, without Triton: random prompts of one length, greedy, end of sequence ignored.
With --baseline, the same model without packed weights and fused modules runs in the same rounds, in turn with
the served one, so that a busy neighbour slows both; ratios are taken round by round.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from triton_inflight.threads import bound_spinning

bound_spinning()  # before torch is imported, as the server does

import torch  # noqa: E402
import typer  # noqa: E402

from triton_inflight import _native, engine, fused, fused_layer, loader, native_attention, packed_weight  # noqa: E402
from triton_inflight.engine import Engine  # noqa: E402
from triton_inflight.packing import Packed  # noqa: E402
from triton_inflight.protocol import GenerationRequest  # noqa: E402
from triton_inflight.sampling_params import SamplingParams  # noqa: E402
from triton_inflight.settings import Settings  # noqa: E402
from triton_inflight.weights import DEFAULT_REFERENCE  # noqa: E402

RATES = ("decode", "end_to_end", "prefill")
DEFAULT_SEQUENCES = [1, 8, 16, 32]
PARTS = (
    "plan",
    "batch",
    "linear",
    "norm_and_rotary",
    "attention",
    "forward_rest",
    "sampling",
    "text_and_rest",
)


def load(model: str, dtype: str, tokens: int, packed: bool) -> Engine:
    """An engine, of the model as it is served or as it comes."""
    settings = Settings(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        max_batch_size=256,
        max_tokens_in_paged_kv_cache=tokens,
        enable_kv_cache_reuse=False,
    )
    pack = loader.pack
    if not packed:
        loader.pack = lambda *_: Packed(0, 0, 0.0)
    try:
        return loader.load_engine(settings).engine
    finally:
        loader.pack = pack


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


class Clock:
    """Time spent inside of functions, by the name of the part; timing costs about a microsecond a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return call

    @contextmanager
    def listening(self, subject: Engine) -> Iterator[None]:
        native = _Timed(_native)
        for name, part in (("linear", "linear"), ("gated_mlp", "linear"), ("rms_norm", "norm_and_rotary")):
            setattr(native, name, self.timed(part, getattr(_native, name)))
        native.rotate = self.timed("norm_and_rotary", _native.rotate)
        for name in ("layer_input", "layer_output"):  # with the norms and rotary positions of their layer
            setattr(native, name, self.timed("linear", getattr(_native, name)))
        functional, pool = torch.nn.functional, native_attention.NativePool
        places: list[tuple[Any, str, Any]] = [
            (fused, "_native", native),
            (packed_weight, "_native", native),
            (fused_layer, "_native", native),
            (functional, "linear", self.timed("linear", functional.linear)),
            (pool, "attend", self.timed("attention", pool.attend)),
            (engine, "build_batch", self.timed("batch", engine.build_batch)),
            (engine, "sample", self.timed("sampling", engine.sample)),
            (subject._planner, "plan", self.timed("plan", subject._planner.plan)),
            (subject._runner, "run", self.timed("forward", subject._runner.run)),
        ]
        before = [(where, name, getattr(where, name)) for where, name, _ in places]
        for where, name, value in places:
            setattr(where, name, value)
        try:
            yield
        finally:
            for where, name, value in before:
                setattr(where, name, value)


class _Timed:
    """The native module with some of its functions timed."""

    def __init__(self, module: Any) -> None:
        self.__dict__.update(vars(module))


def breakdown(subject: Engine, sequences: int, inputs: int, outputs: int) -> dict[str, float]:
    """Milliseconds of a step by its parts, prefill included, as means over a whole run."""
    clock = Clock()
    steps = 0
    step = subject.step

    def counted(ids: Any) -> Any:
        nonlocal steps
        steps += 1
        return clock.timed("step", step)(ids)

    subject.step = counted  # type: ignore[method-assign]
    try:
        with clock.listening(subject):
            run(subject, sequences, inputs, outputs)
    finally:
        del subject.step
    s = clock.seconds
    inside = s["linear"] + s["norm_and_rotary"] + s["attention"]
    s["forward_rest"] = s["forward"] - inside
    s["text_and_rest"] = s["step"] - s["forward"] - s["plan"] - s["batch"] - s["sampling"]
    return {part: s[part] / steps * 1e3 for part in (*PARTS, "step")}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    name = platform.processor()
    if os.path.exists("/proc/cpuinfo"):  # noqa: PTH110
        with open("/proc/cpuinfo") as info:  # noqa: PTH123
            name = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), name)
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _native.chosen_isa().name,
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


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
    model: Annotated[str, typer.Option(help="Model reference, as in config.pbtxt.")] = DEFAULT_REFERENCE,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads; 0 is as many as torch takes by itself.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Measure the engine in this process: tokens per second, and the parts of a step.

    decode counts tokens of steps in which every sequence gets one, at the median step; end to end counts all
    output tokens from the first request to the last answer; prefill counts prompt tokens of the steps that run
    some. Compare kernels by setting TRITON_INFLIGHT_ISA to portable, avx2, avx512 or avx512_bf16.

    Example: python benchmarks/step.py --sequences 1 --sequences 32 --baseline --parts
    """
    if threads:
        torch.set_num_threads(threads)
    tokens = max(sequences) * (inputs + outputs + 64)
    engines = {"served": load(model, dtype, tokens, packed=True)}
    if baseline:
        engines["baseline"] = load(model, dtype, tokens, packed=False)
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
            result[name] = {rate: spread(values) for rate, values in rates[name].items()}
            if parts:
                result[name]["parts_ms"] = breakdown(subject, count, inputs, outputs)
        if baseline:
            result["ratio"] = {
                rate: spread(
                    [a / b for a, b in zip(rates["served"][rate], rates["baseline"][rate], strict=True)]
                )
                for rate in RATES
            }
        results.append(result)
    report = {
        "machine": machine(),
        "model": model,
        "dtype": dtype,
        "input": inputs,
        "output": outputs,
        "rounds": rounds,
        "results": results,
    }
    print(json.dumps(report, indent=2) if as_json else text(report))


def text(report: dict[str, Any]) -> str:
    def show(values: dict[str, float], digits: int = 0) -> str:
        return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"

    where = report["machine"]
    lines = [
        f"{where['processor']}, {where['cores']} cores, {where['threads']} threads, {where['isa']}, "
        f"load {where['load']:.1f}; {report['model']} in {report['dtype']}; "
        f"{report['input']} tokens in, {report['output']} out; median (min to max) of {report['rounds']} rounds"
    ]
    for result in report["results"]:
        for name in ("served", "baseline"):
            if name not in result:
                continue
            values = result[name]
            lines.append(
                f"{result['sequences']:>3} {name:<9} decode {show(values['decode'])} tok/s, "
                f"step {show(values['step_ms'], 1)} ms, end to end {show(values['end_to_end'])}, "
                f"prefill {show(values['prefill'])}"
            )
            if "parts_ms" in values:
                shares = ", ".join(f"{part} {ms:.2f}" for part, ms in values["parts_ms"].items())
                lines.append(f"      mean ms of a step: {shares}")
        if "ratio" in result:
            ratios = ", ".join(f"{rate} {show(values, 2)}" for rate, values in result["ratio"].items())
            lines.append(f"    ratio     {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
