"""transformers' own continuous batching in a process of its own."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rounds_child import answer_rounds, claim_output

claim_output()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model.config.eos_token_id = -1  # generate to the full length
    page = 32
    blocks = 2 * arguments.max_sequences * -(-arguments.max_length // page)
    config = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=2048, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    )
    manager.start()

    def run(prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        cpu, start = time.process_time(), time.perf_counter()
        ids = manager.add_requests(prompts, max_new_tokens=output_tokens, record_timestamps=True)
        results = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching has stopped; its log says why")
        arrivals = [[moment - start for moment in results[request_id].timestamps] for request_id in ids]
        return {
            "arrivals": arrivals,
            "tokens": [[1] * len(times) for times in arrivals],
            "cpu": time.process_time() - cpu,
        }

    answer_rounds(run, {"version": transformers.__version__, "threads": torch.get_num_threads()})
    manager.stop(block=True)


if __name__ == "__main__":
    main()
