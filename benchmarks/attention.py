"""Native paged attention against the speed at which this machine reads memory.

Decoding reads every key and value once and does little with each, so it can be no faster than reading them.
This measures how close it comes: in rounds that alternate between the two, so that a busy neighbour slows
both, it runs

* a step of decoding over all layers: one token of each sequence, its keys and values in a pool per layer;
* a plain read of a buffer as large as those keys and values, by the fastest of torch's own ways, on as many
  threads.

It also measures decoding with short histories, where the cost of a call counts, and a chunk of a long prompt,
where the multiplications count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from triton_inflight import _native
from triton_inflight.bench_rounds import Spread
from triton_inflight.kv_shape import KVShape
from triton_inflight.native_attention import NativePool

TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """Attention of a model; the defaults are those of SmolLM2-135M."""

    query_heads: int = 9
    kv_heads: int = 3
    width: int = 64
    layers: int = 30
    dtype: torch.dtype = torch.bfloat16

    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.width * self.dtype.itemsize


class Step:
    """A step of sequences of one length that run the same number of tokens, ready to be repeated."""

    def __init__(
        self, shape: Shape, sequences: int, length: int, count: int, layers: int, scattered: bool = True
    ) -> None:
        blocks_each = -(-length // TOKENS_PER_BLOCK)
        num_blocks = sequences * blocks_each
        stored = KVShape(shape.kv_heads, shape.width, shape.width)
        self.pools = [NativePool(num_blocks, TOKENS_PER_BLOCK, stored, shape.dtype) for _ in range(layers)]
        for pool in self.pools:
            pool.data.normal_()
        blocks = torch.randperm(num_blocks) if scattered else torch.arange(num_blocks)
        tables = blocks.to(torch.int32).view(sequences, blocks_each)
        starts = [i * count for i in range(sequences + 1)]
        self.plan = self.pools[0].plan(tables, starts, [length] * sequences, shape.query_heads, None)
        tokens = sequences * count
        self.query = torch.randn(tokens, shape.query_heads, shape.width).to(shape.dtype)
        self.key = torch.randn(tokens, shape.kv_heads, shape.width).to(shape.dtype)
        self.scale = shape.width**-0.5

    def run(self) -> None:
        for pool in self.pools:
            pool.attend(self.plan, self.query, self.key, self.key, self.scale)


def readers(size: int) -> list[Callable[[], object]]:
    """Ways to read a buffer of so many bytes once."""
    columns = 16384
    buffer = torch.ones(size // (4 * columns), columns)
    vector, rows = torch.ones(columns), torch.empty(len(buffer))
    doubles = buffer.view(torch.float64)
    return [lambda: torch.mv(buffer, vector, out=rows), buffer.sum, doubles.sum]


def seconds(task: Callable[[], object]) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def against_reading(shape: Shape, sequences: int, length: int, rounds: int) -> dict[str, object]:
    """Time of a decoding step over that of reading its keys and values, round by round.

    The blocks of a sequence lie in order, as in a fresh store, or scattered, as after long service.
    """
    ordered = Step(shape, sequences, length, 1, shape.layers, scattered=False)
    scattered = Step(shape, sequences, length, 1, shape.layers, scattered=True)
    size = sequences * length * shape.bytes_per_token()
    ways = readers(size)
    tasks = {"ordered": ordered.run, "scattered": scattered.run}
    times: dict[str, list[float]] = {name: [] for name in ("reading", *tasks)}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            times[name].append(seconds(task))
        times["reading"].append(min(seconds(way) for way in ways))
    times = {name: values[1:] for name, values in times.items()}  # the first round warms up
    reading = times["reading"]
    return {
        "megabytes": size / 1e6,
        "read_gigabytes_per_second": Spread.of([size / t / 1e9 for t in reading]),
        "milliseconds": {name: Spread.of([t * 1e3 for t in values]) for name, values in times.items()},
        "ratio": {
            name: Spread.of([t / r for t, r in zip(times[name], reading, strict=True)]) for name in tasks
        },
    }


def per_layer(step: Step, rounds: int, repeats: int) -> Spread:
    """Microseconds of one attention call of a step."""

    def repeat() -> None:
        for _ in range(repeats):
            step.run()

    repeat()
    calls = repeats * len(step.pools)
    return Spread.of([seconds(repeat) / calls * 1e6 for _ in range(rounds)])


def main(
    sequences: Annotated[int, typer.Option(help="Sequences that decode together.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens each has, for the comparison with reading.")] = 1000,
    short: Annotated[int, typer.Option(help="Tokens each has, for the cost of a call.")] = 96,
    chunk: Annotated[int, typer.Option(help="Tokens of the chunk that ends a prompt of 4,000.")] = 512,
    threads: Annotated[int, typer.Option(help="Threads; 0 is as many as torch takes by itself.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds; more give a truer median on a busy machine.")] = 9,
    float32: Annotated[bool, typer.Option("--float32", help="Keep keys and values in float32.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Measure native paged attention against reading its keys and values (shape of SmolLM2-135M).

    A ratio of 1 is a decoding step as fast as memory can be read. Compare versions of the kernels by setting
    TRITON_INFLIGHT_ISA to portable, avx2, avx512 or avx512_bf16.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = Shape(dtype=torch.float32 if float32 else torch.bfloat16)
    with torch.inference_mode():
        decode = against_reading(shape, sequences, length, rounds)
        call = per_layer(Step(shape, sequences, short, 1, shape.layers), rounds, 10)
        prompt = 4000
        chunk_call = per_layer(Step(shape, 1, prompt, chunk, 1), rounds, 3)
    seen = chunk * (2 * prompt - chunk + 1) // 2
    operations = 4 * shape.query_heads * shape.width * seen
    result: dict[str, Any] = {
        "isa": _native.chosen_isa().name,
        "threads": torch.get_num_threads(),
        "shape": {**asdict(shape), "dtype": str(shape.dtype)},
        "decode": {"sequences": sequences, "length": length, **decode},
        "short_decode": {"sequences": sequences, "length": short, "us_per_layer": call},
        "prefill": {
            "prompt": prompt,
            "chunk": chunk,
            "us_per_layer": chunk_call,
            "gigaflops": operations / chunk_call.median / 1e3,
        },
    }
    print(json.dumps(result, indent=2, default=asdict) if as_json else text(result))


def text(result: dict[str, Any]) -> str:
    decode, short, prefill = result["decode"], result["short_decode"], result["prefill"]
    milliseconds, ratio = decode["milliseconds"], decode["ratio"]
    lines = [
        f"{result['isa']}, {result['threads']} threads, {result['shape']['dtype']}; median (min to max)",
        f"decode, {decode['sequences']} sequences of {decode['length']} tokens, "
        f"{result['shape']['layers']} layers, {decode['megabytes']:.0f} MB of keys and values:",
        f"  reading them          {milliseconds['reading'].in_words(1)} ms, "
        f"{decode['read_gigabytes_per_second'].in_words(1)} GB/s",
    ]
    for name in ("ordered", "scattered"):
        lines.append(
            f"  attention, {name:<11}{milliseconds[name].in_words(1)} ms, ratio {ratio[name].in_words(2)}"
        )
    lines.append(
        f"decode, {short['sequences']} sequences of {short['length']} tokens: "
        f"{short['us_per_layer'].in_words(0)} us per layer"
    )
    lines.append(
        f"prefill, the last {prefill['chunk']} of {prefill['prompt']} tokens: "
        f"{prefill['us_per_layer'].in_words(0)} us per layer, {prefill['gigaflops']:.0f} GFLOP/s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
