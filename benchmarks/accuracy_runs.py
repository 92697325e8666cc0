"""What accuracy is measured on, and one run over it: windows of a text to score, prompts to answer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accuracy_figures import Scored
from transformers import PreTrainedTokenizerBase

from triton_inflight import weights
from triton_inflight.bench_engine import progressing_step
from triton_inflight.engine import Engine
from triton_inflight.errors import InflightError
from triton_inflight.loader import load_engine
from triton_inflight.logprobs import PositionLogprobs
from triton_inflight.protocol import parse_request
from triton_inflight.settings import Settings

Advance = Callable[[int], None]
"""Told how many tokens have been done since the last time."""

_PIECE_LENGTHS = (16, 96)  # shortest and longest prompt cut from the text, in tokens
_ROWS_AT_ONCE = 256  # of logits in float64

CHATS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main differences between a frog and a toad?",
    "Give me five tips for sleeping better.",
    "How does a steam engine work?",
    "Write a Python function that reverses the words of a sentence.",
    "Describe the water cycle in a few sentences.",
    "Why did the Roman Republic become an empire?",
    "What should I pack for a week of hiking in the mountains?",
    "Write a polite e-mail that asks for two days of leave.",
    "Compare renting and buying a flat.",
    "How do vaccines protect people?",
    "Summarise the story of Romeo and Juliet.",
    "What is the difference between weather and climate?",
    "Write a poem about autumn.",
    "Describe how bread is made, from grain to loaf.",
)


@dataclass(frozen=True)
class Task:
    """What every run does.

    Attributes:
        windows: token ids, equally many each. The first of each is context only; all others count.
        prompts: fields of a request, the prompt of each.
        output_tokens: most tokens of an answer.
    """

    windows: Sequence[Sequence[int]]
    prompts: Sequence[Mapping[str, str]]
    output_tokens: int

    @property
    def text_tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def tokens(self) -> int:
        """Tokens of a run, those of the prompts aside."""
        return self.text_tokens + len(self.prompts) * self.output_tokens


@dataclass(frozen=True)
class Outcome:
    """What a run gave: the scored windows, and the token ids of each answer."""

    scored: Scored
    answers: Sequence[Sequence[int]] = field(default_factory=list)


def windows_of(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int, most: int | None = None
) -> list[list[int]]:
    """Cut a text into windows that do not overlap; what is left at its end is no window.

    Where the tokenizer begins texts with a BOS token, each window begins with one: the model was trained so.

    Args:
        length: tokens of each window.
        most: of the windows; None: all.

    Raises:
        InflightError: the text has not two windows.
    """
    bos = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
    tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    step = length - len(bos)
    starts = range(0, len(tokens) - step + 1, step)[:most]
    if len(starts) < 2:
        raise InflightError(
            f"the text has {len(tokens)} tokens, too few for two windows of {length}; lower --window or give a "
            "longer --text"
        )
    return [bos + tokens[start : start + step] for start in starts]


def prompts_of(
    windows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, number: int, seed: int
) -> list[dict[str, str]]:
    """Prompts to continue: a third are chats, where the model has a chat template, the rest begins of windows.

    The pieces are cut from random windows, each from its beginning or from anywhere in it, the same for the same seed.
    """
    dice = random.Random(seed)
    chats = CHATS[: number // 3] if tokenizer.chat_template else ()
    prompts = [{"messages": json.dumps([{"role": "user", "content": chat}])} for chat in chats]
    for _ in range(number - len(chats)):
        window = dice.choice(windows)
        size = min(dice.randint(*_PIECE_LENGTHS), len(window))
        start = dice.randint(0, len(window) - size)
        prompts.append({"input_ids": json.dumps(list(window[start : start + size]))})
    return prompts


def run_engine(settings: Settings, task: Task, advance: Advance) -> Outcome:
    """Load a model as it is served, let it score the windows and answer the prompts, greedily.

    Raises:
        InflightError: it cannot be loaded, or refuses a request, or fails.
    """
    engine = load_engine(settings).engine
    scoring = [
        {"input_ids": json.dumps(list(window)), "max_tokens": 1, "prompt_logprobs": 1}
        for window in task.windows
    ]
    nll, best = [], []
    for result in _results(engine, settings, scoring, advance):
        positions = [position for position in result.prompt if position is not None]
        nll.append(-math.fsum(position.chosen.logprob for position in positions) / len(positions))
        best.append([position.top[0].token_id for position in positions])
    answering = [{**prompt, "max_tokens": task.output_tokens} for prompt in task.prompts]
    answers = _results(engine, settings, answering, advance)
    return Outcome(Scored(nll, best), [answer.tokens for answer in answers])


@dataclass
class _Result:
    """What came of a request: the tokens of the answer, and the log probabilities of the prompt."""

    tokens: list[int] = field(default_factory=list)
    prompt: tuple[PositionLogprobs | None, ...] = ()


def _results(
    engine: Engine, settings: Settings, requests: Sequence[Mapping[str, Any]], advance: Advance
) -> list[_Result]:
    """Add all requests and step them to their ends, as many at a time as may run."""
    for number, fields in enumerate(requests):
        engine.add(number, parse_request({}, {**fields, "temperature": 0}, settings))
    results = [_Result() for _ in requests]
    live = dict.fromkeys(range(len(requests)))
    while live:
        for update in progressing_step(engine, list(live)):
            results[update.sequence_id].tokens += update.tokens
            advance(len(update.tokens))
            if update.prompt_logprobs is not None:
                results[update.sequence_id].prompt = update.prompt_logprobs
                advance(len(update.prompt_logprobs))
            if update.finish_reason is not None:
                del live[update.sequence_id]
    return results


@torch.inference_mode()
def run_transformers(settings: Settings, task: Task, advance: Advance) -> Outcome:
    """Score the windows with the stock model of transformers in float32, in float64 from the logits on.

    Shares no code with the engine's run but the loading of the weights, and answers no prompts.
    """
    model = weights.load(
        settings.model, dtype=torch.float32, device="cpu", trust_remote_code=settings.trust_remote_code
    ).model
    nll, best = [], []
    for window in task.windows:
        ids = torch.tensor([window])
        logits, following = model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:]
        parts = zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(following, _ROWS_AT_ONCE), strict=True)
        losses = [
            torch.nn.functional.cross_entropy(rows.double(), tokens, reduction="sum").item()
            for rows, tokens in parts
        ]
        nll.append(math.fsum(losses) / len(following))
        best.append(logits.argmax(dim=-1).tolist())
        advance(len(window))
    return Outcome(Scored(nll, best))
