"""SamplingParams: what a request says about how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Below this, dividing by the temperature means nothing but the most likely token.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. The defaults change nothing: the most likely token, always.

    Values are checked where requests are parsed, not here.

    Attributes:
        temperature: scores are divided by it; below 1e-5 the most likely token is taken.
        top_k: only the k most likely tokens, and those equal to the last of them; 0 or less: all.
        top_p: only the fewest tokens whose probabilities sum up to this, 0 < top_p <= 1.
        min_p: only tokens at least this share of the most likely one's probability, 0 to 1.
        typical_p: only the tokens closest to the expected information, up to this sum, 0 < typical_p <= 1.
        repetition_penalty: tokens of prompt and output: a positive score is divided by it, a negative one
            multiplied; above 0.
        presence_penalty: taken off the score of every token of the output, once.
        frequency_penalty: taken off the score of a token for each time it is in the output.
        logit_bias: token id -> number added to its score.
        bad_words: token id sequences that must not appear; an EOS token alone is not among them.
        min_tokens: no EOS token and no ``stop_token_ids`` before this many output tokens.
        ignore_eos: an EOS token does not end the output.
        stop_token_ids: tokens that end the output as EOS tokens do.
        seed: of this request's random numbers, 64 bits; None: one from the operating system.
        logprobs: report the log probability of each output token and of this many most likely ones; None: none.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def edits_scores(self) -> bool:
        """Whether some step may change single scores before the temperature is applied."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_tokens > 0
        )
