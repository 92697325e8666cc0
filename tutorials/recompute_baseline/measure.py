"""What a KV cache is worth: the same requests to a model that recomputes every context, and to this backend.

    python tutorials/recompute_baseline/measure.py --sequences 1 --output-tokens 1 16 64 256

Both are iterative models, each alone on a real tritonserver, with the same weights, prompts and dtype. All sequences
of a round start at once, and their tokens are streamed. Output tokens per second count from the first request to the
last token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import tempfile
from pathlib import Path

from triton_inflight.bench_grpc import stream_all
from triton_inflight.gguf_cache import converted_folder
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.threads import bound_spinning
from triton_inflight.weights import DEFAULT_REFERENCE, describe, resolve

BASELINE = Path(__file__).parent / "recompute"
RECOMPUTING, CACHING = "recompute", "inflight"


def make_repository(repository: Path, reference: str, dtype: str, slots: int = 32) -> None:
    """Both models on the same weights, each in a folder of its own.

    Args:
        reference: any model reference, but what transformers reads of it has to be a folder or a hub id.
    """
    source = resolve(reference)
    location = str(converted_folder(Path(source.location))) if source.kind == "gguf" else source.location
    shutil.copytree(BASELINE, repository / RECOMPUTING)
    path = repository / RECOMPUTING / "config.pbtxt"
    text = path.read_text()
    for key, value in (("model", location), ("dtype", dtype)):
        text = re.sub(rf'(key: "{key}" value {{ string_value: ")[^"]*', lambda m, v=value: m[1] + v, text)
    path.write_text(text)
    init_model(repository, CACHING, location, dtype, max_batch_size=slots)


def tokens_per_second(
    server: TritonServer, model: str, prompts: list[list[int]], output_tokens: int
) -> float:
    """Send all prompts at once and follow them to their ends.

    Args:
        prompts: token ids of each.
    """
    requests = [
        {"input_ids": json.dumps(ids), "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        for ids in prompts
    ]
    _, events = stream_all(server.grpc_url, model, requests)
    assert all(events), "the last token is always a response"
    return len(prompts) * output_tokens / max(responses[-1].time for responses in events)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_REFERENCE, help="model reference")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    bound_spinning()  # for the plain model, too: its threads share the cores with tritonserver and this client

    vocabulary = len(describe(options.model).tokenizer)
    loads = [(count, length) for count in options.sequences for length in options.output_tokens]
    generator = random.Random(0)
    found: dict[tuple[str, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        make_repository(Path(directory), options.model, options.dtype, max(32, *options.sequences))
        for model in (RECOMPUTING, CACHING):
            with TritonServer(directory, models=[model]) as server:
                tokens_per_second(server, model, [[1, 2, 3]], 8)  # warm-up
                for _ in range(options.repeats):
                    for count, length in loads:
                        prompts = [
                            [generator.randrange(vocabulary) for _ in range(options.input_tokens)]
                            for _ in range(count)
                        ]
                        speed = tokens_per_second(server, model, prompts, length)
                        found.setdefault((model, count, length), []).append(speed)

    print("| sequences | output tokens each | recomputed (tok/s) | KV store (tok/s) | ratio |")
    print("|---|---|---|---|---|")
    for count, length in loads:
        slow, fast = found[RECOMPUTING, count, length], found[CACHING, count, length]
        ratio = statistics.median(fast) / statistics.median(slow)
        print(f"| {count} | {length} | {_spread(slow)} | {_spread(fast)} | {ratio:.1f} |")


def _spread(values: list[float]) -> str:
    """Median, and from where to where."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


if __name__ == "__main__":
    main()
