"""How far one setting's answers are from another's: perplexity, its paired difference, equal greedy tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scored:
    """A text as a model sees it, in windows of equally many tokens, each by itself.

    Attributes:
        nll: by window, the mean over its counted tokens of -ln p(token | the window's tokens before it).
        best: by window, the most likely token at each place that counts.
    """

    nll: Sequence[float]
    best: Sequence[Sequence[int]]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood of a token, as in Jurafsky and Martin, section 3.3."""
        return math.exp(statistics.fmean(self.nll))


@dataclass(frozen=True)
class Change:
    """By how much a perplexity is higher than another on the same windows: both are shares, 0.01 is 1 %.

    Attributes:
        value: perplexity over perplexity, less 1.
        error: two standard errors of ``value``, from how much the windows differ; some 95 % of all texts of this
            kind and length would give a value within it.
    """

    value: float
    error: float


def change(of: Scored, to: Scored) -> Change:
    """The relative change of perplexity, with a paired error.

    ln(perplexity / perplexity) is the mean of the differences of the windows' mean negative log likelihoods. That
    one window is harder than another is in both and cancels; the standard error of the mean difference is
    s / sqrt(windows), which the slope of exp turns into one of the ratio.

    Raises:
        ValueError: the two have not equally many windows, or only one, which has no spread.
    """
    differences = [one - other for one, other in zip(of.nll, to.nll, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    standard_error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Change(ratio - 1, 2 * ratio * standard_error)


def same_best(of: Scored, to: Scored) -> float:
    """Share of the counted places where both hold the same token for the most likely one."""
    pairs = [
        pair for ours, theirs in zip(of.best, to.best, strict=True) for pair in zip(ours, theirs, strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


@dataclass(frozen=True)
class Agreement:
    """How far greedy answers to the same prompts agree, as shares from 0 to 1.

    A token counts for both answers, so an answer that ends early lacks the tokens that the longer one goes on with.

    Attributes:
        before_divergence: tokens before the first one that differs, over all tokens.
        overall: tokens equal at the same place, over all tokens; after a divergence mostly by chance.
        identical: answers that are the same to their ends, over all answers.
    """

    before_divergence: float
    overall: float
    identical: float


def agreement(of: Sequence[Sequence[int]], to: Sequence[Sequence[int]]) -> Agreement:
    """Compare answers, token ids of each, one by one in their order."""
    pairs = list(zip(of, to, strict=True))
    total = sum(max(len(ours), len(theirs)) for ours, theirs in pairs)
    before = sum(_common_prefix(ours, theirs) for ours, theirs in pairs)
    equal = sum(one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=False))
    same = sum(list(ours) == list(theirs) for ours, theirs in pairs)
    return Agreement(before / total, equal / total, same / len(pairs))


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    shorter = min(len(ours), len(theirs))
    return next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)
