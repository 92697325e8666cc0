"""Log probabilities of tokens, computed only for rows that ask.

They are those of the model's own scores: log_softmax of the raw logits, before penalties, bans and temperature,
as vLLM reports them by default. So they do not depend on how a token was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triton_inflight.sampling import one_thread

# Stands for -inf, which JSON has no word for.
_LOWEST = -9999.0


@dataclass(frozen=True)
class TokenLogprob:
    """One token's natural log probability, and how many tokens are more likely, plus one."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class PositionLogprobs:
    """The log probabilities of one position.

    Attributes:
        chosen: the token that stands there.
        top: the most likely tokens, best first, as many as were asked for.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]

    def entries(self, decode: Callable[[int], str]) -> dict[str, dict[str, float | int | str]]:
        """In vLLM's form: by token id, the chosen token first, each with logprob, rank and decoded_token.

        Args:
            decode: the text of one token.
        """
        return {
            str(token.token_id): {
                "logprob": max(token.logprob, _LOWEST),
                "rank": token.rank,
                "decoded_token": decode(token.token_id),
            }
            for token in (self.chosen, *self.top)
        }


def to_json(positions: Sequence[PositionLogprobs | None], decode: Callable[[int], str]) -> str:
    """A JSON list with an object for each position; null where there is none (a prompt's first token)."""
    return json.dumps([position and position.entries(decode) for position in positions])


@one_thread()
@torch.inference_mode()
def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int | None]
) -> list[PositionLogprobs | None]:
    """Log probabilities of the tokens that follow each row.

    For an output, the rows and tokens of ``sample``. For a prompt, the rows of all its tokens but the last, and
    for each row the prompt's next token; its first token follows nothing and has none.

    Args:
        logits: (R, vocabulary) float32, raw: as they were given to ``sample``, which leaves them as they are.
        tokens: R token ids.
        counts: R, how many of the most likely tokens to add (0: none); None: the row does not ask.

    Returns:
        R, None for rows that do not ask.
    """
    result: list[PositionLogprobs | None] = [None] * len(tokens)
    rows = [row for row, count in enumerate(counts) if count is not None]
    if not rows:
        return result
    asked = logits if len(rows) == len(logits) else logits[rows]
    normaliser = asked.logsumexp(dim=-1, keepdim=True)
    chosen = torch.tensor([tokens[row] for row in rows], device=logits.device)[:, None]
    scores = asked.gather(1, chosen)
    ranks = (asked > scores).sum(dim=-1) + 1
    most = min(max(counts[row] or 0 for row in rows), logits.shape[1])
    top = asked.topk(most, dim=-1)
    parts = zip(
        rows,
        (scores - normaliser)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - normaliser).tolist(),
        strict=True,
    )
    for row, logprob, rank, top_ids, top_logprobs in parts:
        best = [
            TokenLogprob(token_id, value, place)
            for place, (token_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1)
        ]
        result[row] = PositionLogprobs(TokenLogprob(tokens[row], logprob, rank), tuple(best[: counts[row]]))
    return result
