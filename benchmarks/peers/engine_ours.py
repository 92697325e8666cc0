"""triton-inflight's engine in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rounds_child import answer_rounds, claim_output

from triton_inflight.threads import bound_spinning

claim_output()
bound_spinning()  # before torch comes in

import torch  # noqa: E402

from triton_inflight.bench_engine import run_in_process  # noqa: E402
from triton_inflight.bench_options import key_and_value  # noqa: E402
from triton_inflight.bench_served import copy_model  # noqa: E402
from triton_inflight.bench_work import Workload  # noqa: E402
from triton_inflight.loader import load_engine  # noqa: E402
from triton_inflight.memory import keep_out_of_collections  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    changes = dict(map(key_and_value, arguments.set))
    with tempfile.TemporaryDirectory() as directory:
        settings = copy_model(arguments.model_repository, arguments.model, changes, Path(directory))
        loaded = load_engine(settings)
        keep_out_of_collections()

    def run(prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        workload = Workload(len(prompts), len(prompts[0]), output_tokens)
        measured = run_in_process(loaded, settings, workload, prompts)
        return {"arrivals": measured.arrivals, "tokens": measured.tokens, "cpu": measured.client_cpu}

    answer_rounds(run, {"dtype": settings.dtype, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
