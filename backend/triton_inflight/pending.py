"""Pending: what was generated for a choice and is not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triton_inflight.protocol import Result

if TYPE_CHECKING:
    from triton_inflight.generation import Update
    from triton_inflight.logprobs import PositionLogprobs


@dataclass
class Pending:
    """Collects the updates of one choice until they are sent.

    Attributes:
        choice: which one.
        ended: its last response has been made.
        sent: it has had a response.
        num_tokens: generated in all, sent or not.
        cumulative_logprob: of its whole output so far, where the request asks.
    """

    choice: int
    ended: bool = False
    sent: bool = False
    num_tokens: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0

    def take(self, update: Update) -> None:
        """Add an update."""
        self.text += update.text
        self.tokens += update.tokens
        self.num_tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.cumulative_logprob = update.cumulative_logprob
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs

    def is_due(self, interval: int) -> bool:
        """Whether there is text, and it is the first or comes with at least ``interval`` tokens."""
        return bool(self.text) and (not self.sent or len(self.tokens) >= interval)

    def result(self, num_input_tokens: int, decode: Callable[[int], str]) -> Result:
        """Everything collected, as a result; nothing is pending after it.

        Args:
            num_input_tokens: of the prompt.
            decode: the text of one token.
        """
        from triton_inflight.logprobs import to_json

        result = Result(
            self.text,
            self.finish_reason,
            num_input_tokens,
            len(self.tokens),
            stop_reason=self.stop_reason,
            choice=self.choice,
            token_ids=self.tokens,
            token_logprobs=[position.chosen.logprob for position in self.logprobs],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=to_json(self.logprobs, decode) if self.logprobs else "[]",
            prompt_logprobs=None if self.prompt_logprobs is None else to_json(self.prompt_logprobs, decode),
        )
        self.text, self.tokens, self.logprobs, self.prompt_logprobs = "", [], [], None
        self.sent, self.ended = True, self.finish_reason is not None
        return result


def best_of(choices: Iterable[Pending], n: int) -> list[Pending]:
    """The ``n`` choices with the highest log probability per token, numbered anew; all of them as they are if there
    are no more.
    """
    found = list(choices)
    if len(found) <= n:
        return found
    ranked = sorted(found, key=lambda choice: -choice.cumulative_logprob / max(1, choice.num_tokens))[:n]
    for number, choice in enumerate(ranked):
        choice.choice = number
    return ranked
