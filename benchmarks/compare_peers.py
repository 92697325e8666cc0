"""Our engine and server beside vLLM's, llama.cpp's and transformers': same weights, prompts, machine, in turn.

Every contender is started once and paused while another one is measured. Rounds are interleaved (A B C A B C),
and ratios are taken round by round, so that a busy moment of the machine hits all of them. See README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from peers import engines, servers
from peers.engines import Comparison, Contender
from peers.install import set_up
from peers.processes import PeerError
from rich.console import Console
from rich.markup import escape

from triton_inflight import weights
from triton_inflight.bench import as_json, progress_bar, report_console
from triton_inflight.bench_machine import describe_machine, in_words
from triton_inflight.bench_options import (
    InputTokens,
    JsonFile,
    PromptSeed,
    QuickRound,
    Rounds,
    SetParameters,
    key_and_value,
)
from triton_inflight.bench_report import figures_table, ratio_table
from triton_inflight.bench_rounds import Figures, ratio_rows, result_row
from triton_inflight.bench_work import Workload, ordinary_tokens
from triton_inflight.errors import InflightError
from triton_inflight.gguf_cache import cache_directory, converted_folder

_RATIOS = ("output_tokens_per_second", "decode_tokens_per_second", "prefill_tokens_per_second", "ttft_p50")
_WARM_UP = -1  # the number of the round that is not counted
Start = Callable[[Comparison], Contender]
_REPOSITORY = Path(__file__).parent.parent / "model_repository"

say = Console(stderr=True, highlight=False, soft_wrap=True).print


@dataclass
class _Entry:
    """A contender and its rounds at the current number of sequences."""

    contender: Contender
    rounds: list[Figures] = field(default_factory=list)


def main(
    setup: Annotated[bool, typer.Option("--setup", help="Install the peers that are missing first.")] = False,
    peers_dir: Annotated[
        Path | None, typer.Option(help="Where they are installed. Default: peers in triton-inflight's cache.")
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(help="engines or servers; repeatable. Default: both, one after the other."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="vllm, llama.cpp or transformers; repeatable. Default: all.")
    ] = None,
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Sent at once; repeatable. Default: 1, 8, 16, 32 for engines, 16, 32 for servers."
        ),
    ] = None,
    input_tokens: InputTokens = 64,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each.")] = 64,
    rounds: Rounds = 5,
    set_parameters: SetParameters = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Ours once more, with this parameter set as well, in the same run; repeatable.",
        ),
    ] = None,
    seed: PromptSeed = 0,
    json_file: JsonFile = None,
    quick: QuickRound = False,
) -> None:
    """Measure the peers beside ours on this machine; leave it alone while it runs."""
    peers_dir = peers_dir or cache_directory() / "peers"
    if setup:
        set_up(peers_dir, lambda text: say(escape(text)))
    if quick:
        sequences, rounds, input_tokens, output_tokens = (
            sequences or [2],
            1,
            min(input_tokens, 16),
            min(output_tokens, 8),
        )
    changes = dict(map(key_and_value, set_parameters or []))
    variants = {"ours": changes}
    for text in also or []:
        variants[f"ours, {text}"] = {**changes, **dict([key_and_value(text)])}
    names = peer or ["vllm", "llama.cpp", "transformers"]
    reference = weights.DEFAULT_REFERENCE
    gguf = Path(weights.resolve(reference).location)
    token_ids = ordinary_tokens(weights.describe(reference).tokenizer)
    console = report_console()
    machine = describe_machine()
    console.print(escape(in_words(machine)), soft_wrap=True)
    report: dict[str, Any] = {
        "machine": machine,
        "model": gguf.name,
        "seed": seed,
        "set": set_parameters or [],
    }
    levels: dict[str, tuple[Any, Mapping[str, Start], list[int]]] = {
        "engines": (engines.ours, engines.PEERS, [1, 8, 16, 32]),
        "servers": (servers.OurServer, servers.PEERS, [16, 32]),
    }
    for chosen in level or list(levels):
        ours, peers, default = levels[chosen]
        workloads = [Workload(number, input_tokens, output_tokens) for number in sequences or default]
        with ExitStack() as stack:
            comparison = Comparison(
                repository=_REPOSITORY,
                model="smollm2",
                gguf=gguf,
                folder=converted_folder(gguf),
                peers=peers_dir,
                logs=Path(stack.enter_context(TemporaryDirectory(prefix="triton-inflight-peers-"))),
                most_sequences=max(workload.sequences for workload in workloads),
                longest=input_tokens + output_tokens,
            )
            wanted = {name: partial(ours, name=name, changes=changes) for name, changes in variants.items()}
            wanted |= {name: peers[name] for name in names if name in peers}
            contenders = _start(stack, wanted, comparison)
            report[chosen] = _compare(contenders, workloads, token_ids, rounds, seed, list(variants))
        title = f"{chosen}: {input_tokens} tokens in, {output_tokens} out, median of {rounds} rounds"
        console.print(figures_table(report[chosen]["results"], {}, title))
        console.print(ratio_table(report[chosen]["ratios"], {}, f"{chosen}: ours over theirs"))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1, default=as_json))


def _start(stack: ExitStack, kinds: Mapping[str, Start], comparison: Comparison) -> list[Contender]:
    """The contenders that start; the others are named, with the reason."""
    started = []
    for name, start in kinds.items():
        with Console(stderr=True).status(f"starting {name}"):
            try:
                contender = start(comparison)
            except (PeerError, InflightError) as error:
                say(f"[yellow]left out[/]  {name}: {escape(str(error))}")
                continue
        stack.callback(contender.stop)
        started.append(contender)
    return started


def _compare(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    token_ids: Sequence[int],
    rounds: int,
    seed: int,
    ours: Sequence[str],
) -> dict[str, Any]:
    """Results and ratios of all contenders, of which some are ``ours``; one that fails is left out of what follows."""
    results, ratios = [], []
    alive = list(contenders)
    with progress_bar() as progress:
        task = progress.add_task("", total=len(workloads) * (rounds + 1))
        for workload in workloads:
            entries = [_Entry(contender) for contender in alive]
            for number in range(_WARM_UP, rounds):
                prompts = workload.prompts(token_ids, f"{seed} {workload} {number}")
                for entry in list(entries):
                    name = entry.contender.name
                    progress.update(task, description=f"{workload.sequences} sequences, {name}")
                    try:
                        figures = entry.contender.measure(workload, prompts)
                    except (PeerError, InflightError, OSError) as error:
                        say(f"[red]failed[/]  {name}: {escape(str(error))}")
                        entries.remove(entry)
                        alive.remove(entry.contender)
                        continue
                    if number != _WARM_UP:
                        entry.rounds.append(figures)
                progress.advance(task)
            for entry in entries:
                results.append(result_row(workload, entry.contender.name, entry.rounds))
            ratios += _ratios(workload, entries, ours)
    about = {contender.name: contender.about for contender in contenders}
    return {"results": results, "ratios": ratios, "contenders": about}


def _ratios(workload: Workload, entries: Sequence[_Entry], ours: Sequence[str]) -> list[dict[str, Any]]:
    """Each of ours over each peer, where both were measured."""
    our_entries = [entry for entry in entries if entry.contender.name in ours]
    their_entries = [entry for entry in entries if entry.contender.name not in ours]
    return [
        row
        for our in our_entries
        for their in their_entries
        for row in ratio_rows(
            workload, (our.contender.name, our.rounds), (their.contender.name, their.rounds), _RATIOS
        )
    ]


if __name__ == "__main__":
    try:
        typer.run(main)
    except InflightError as error:
        say(f"[red]error[/]  {escape(str(error))}")
        sys.exit(1)
