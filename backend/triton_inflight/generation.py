"""Generation: what is known of a live request: its choices, and how their tokens become text."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from triton_inflight.logprobs import PositionLogprobs
from triton_inflight.protocol import GenerationRequest
from triton_inflight.sampling_state import SamplingState
from triton_inflight.sequence import Sequence
from triton_inflight.stops import Released, StopStrings
from triton_inflight.text import Detokenizer


@dataclass(frozen=True)
class Update:
    """What a step did for one choice of a sequence.

    Attributes:
        sequence_id, choice: whose it is.
        text: what can be shown of the new output, possibly nothing yet.
        tokens: output tokens generated.
        finish_reason: ``stop``, ``length``, ``error`` or what the caller ended it for; None while it goes on.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended it.
        error: what went wrong, where the reason is ``error``.
        logprobs: of the tokens, where the request asks.
        cumulative_logprob: of the whole output, where the request asks for log probabilities.
        prompt_logprobs: of the prompt's tokens, with its first update, where the request asks.
    """

    sequence_id: int
    choice: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    cumulative_logprob: float = 0.0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None


@dataclass
class Choice:
    """One answer of a request: its tokens, how they are chosen, and the text they turn into.

    Attributes:
        echo: text of the prompt that is still to be shown before the output.
        cumulative_logprob: natural log probability of the output so far, where the request asks.
    """

    sequence: Sequence
    sampling: SamplingState
    detokenizer: Detokenizer
    stops: StopStrings
    keeps_stop: bool
    echo: str = ""
    cumulative_logprob: float = 0.0

    def take(self, token: int, logprobs: PositionLogprobs | None) -> Update:
        """Append a sampled token; what there is to show, and whether it was the last one."""
        self.sequence.append(token)
        self.sampling.append(token)
        if logprobs is not None:
            self.cumulative_logprob += logprobs.chosen.logprob
        ends, full = self.sampling.ends(token), len(self.sequence.tokens) == self.sequence.limit
        piece = "" if ends and not self.keeps_stop else self.detokenizer.push(token)
        if ends or full:
            piece += self.detokenizer.flush()
        released = self._released(piece)
        text, reason = released.text, None
        stop_reason: str | int | None = released.stop
        if released.stop is not None:
            reason = "stop"
        elif ends or full:
            text += self.stops.flush()
            reason = "stop" if ends else "length"
            stop_reason = token if ends and token in self.sampling.params.stop_token_ids else None
        return self._update(text, (token,), reason, stop_reason, () if logprobs is None else (logprobs,))

    def end(self, reason: str) -> Update:
        """End early, for a reason of the caller's; what was held back is shown."""
        released = self._released(self.detokenizer.flush())
        if released.stop is not None:
            return self._update(released.text, (), "stop", released.stop)
        return self._update(released.text + self.stops.flush(), (), reason)

    def _released(self, piece: str) -> Released:
        """What stop strings let through; they only count past ``min_tokens``, as in vLLM."""
        if self.sampling.num_output <= self.sampling.params.min_tokens:
            return Released(piece, None)
        return self.stops.push(piece)

    def _update(
        self,
        text: str,
        tokens: tuple[int, ...],
        reason: str | None,
        stop_reason: str | int | None = None,
        logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> Update:
        self.sequence.finish_reason = reason
        text, self.echo = self.echo + text, ""
        return Update(
            self.sequence.sequence_id,
            self.sequence.choice,
            text,
            tokens,
            reason,
            stop_reason,
            logprobs=logprobs,
            cumulative_logprob=self.cumulative_logprob,
        )


@dataclass
class Generation:
    """A live request.

    Attributes:
        request: what the client asked for.
        choices: its unfinished answers by number; the first alone until the prompt is computed.
        prompt_logprobs: of the prompt's tokens but the first, as far as they have been computed.
    """

    request: GenerationRequest
    choices: dict[int, Choice]
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)

    @property
    def sequences(self) -> Rows[Sequence]:
        return [choice.sequence for choice in self.choices.values()]
