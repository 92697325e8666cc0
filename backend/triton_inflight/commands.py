"""The commands of the command line that talk to a model: ``generate`` and ``demo``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from triton_inflight.errors import InflightError, ModelError

if TYPE_CHECKING:
    from triton_inflight.scrape import Samples

_DEMO_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning a new language.",
    "Who was Ada Lovelace?",
    "Write a Python function that reverses a string.",
)

_DEMO_INTERVAL_SECONDS = 0.4  # new sequences join those in flight


def generate(
    prompt: Annotated[list[str], typer.Option(help="What to send; repeatable, all are sent at once.")],
    model: Annotated[str, typer.Option(help="The model's name on the server.")] = "smollm2",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of each answer. Default: the model's.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send each prompt as a user's message, in the model's chat template."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Where --chat takes the template from: a model reference. Default: the server's model."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Send prompts to a model and watch the answers grow side by side.

    Examples:

    [cyan]triton-inflight generate --prompt "The sky is"[/]

    [cyan]triton-inflight generate --chat --prompt "Who was Ada Lovelace?" --prompt "Name three rivers."[/]

    [cyan]triton-inflight generate --model mine --url gpu-box:8001 --prompt "1 2 3" --json[/]
    """
    from triton_inflight.client import GenerationStream, answers_as_json
    from triton_inflight.show import answer_table, follow

    stream = GenerationStream(url, model, {} if max_tokens is None else {"max_tokens": max_tokens})
    sent = prompt
    if chat:
        reference = tokenizer or stream.model_parameters().get("model", "")
        sent = apply_chat_template(reference, prompt)
    if as_json:
        *_, answers = stream.run(sent)
        print(answers_as_json(answers))
    else:
        console = Console(highlight=False)
        answers = follow(console, stream, sent, titles=prompt)
        console.print(answer_table(answers, titles=prompt))
    if any(answer.error for answer in answers):
        sys.exit(1)


def apply_chat_template(reference: str, messages: list[str]) -> list[str]:
    """Each message as a user's turn in the chat template of a model.

    Raises:
        ModelError: the model's tokenizer cannot be had here, or has no chat template.
    """
    from triton_inflight.weights import describe

    try:
        tokenizer = describe(reference).tokenizer
    except ModelError as error:
        raise ModelError(
            f"--chat needs the tokenizer of the model, and '{reference}' cannot be read here: {error}. "
            "Name one that can with --tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of '{reference}' has no chat template; leave --chat out, or name another"
        )
    turns = [[{"role": "user", "content": message}] for message in messages]
    prompts: Any = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(prompts)


def demo(
    model_repository: Annotated[
        Path, typer.Option(help="The repository to serve.", exists=True, file_okay=False)
    ] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="The model to ask.")] = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 80,
) -> None:
    """Start a real tritonserver on free ports, ask a model several things at once, and tell what happened."""
    from triton_inflight.client import GenerationStream
    from triton_inflight.launcher import TritonServer
    from triton_inflight.show import answer_table, follow, step_table

    console = Console(highlight=False)
    prompts = list(_DEMO_PROMPTS)
    server = TritonServer(model_repository, models=[model])
    try:
        server.start()
        server.wait_ready(progress=True)
        console.print(
            f"tritonserver is ready at {server.http_url}; asking {len(prompts)} things, a moment apart\n"
        )
        stream = GenerationStream(server.grpc_url, model, {"max_tokens": max_tokens})
        reference = stream.model_parameters()["model"]
        sent = apply_chat_template(reference, prompts)
        answers = follow(console, stream, sent, titles=prompts, interval=_DEMO_INTERVAL_SECONDS)
        console.print(answer_table(answers, titles=prompts))
        console.print()
        console.print(step_table(_samples_of(server.metrics_url, len(prompts)), model))
    finally:
        server.stop()
    if errors := [answer.error for answer in answers if answer.error]:
        raise InflightError(f"{len(errors)} of the prompts failed: {errors[0]}")


def _samples_of(metrics_url: str, num_sequences: int) -> Samples:
    """The metrics once they tell of that many ended sequences; they lag the answers by a moment."""
    from triton_inflight.scrape import scrape

    for _ in range(50):
        samples = scrape(metrics_url)
        if samples.value("inflight_sequences_total") >= num_sequences:
            break
        time.sleep(0.1)
    return samples
