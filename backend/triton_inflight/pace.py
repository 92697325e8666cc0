"""The pace of prompts: how many of their tokens a step may run while others decode.

Whoever streams waits for the whole step, so a step full of a long prompt is felt as a stall. How long a token of a
prompt takes depends on the model, the machine and how much of the prompt lies behind it; so it is measured, step
by step.
"""

from __future__ import annotations

import numpy as np

_AIM = 0.8  # of the stretch, so that few steps go beyond it
_FEWEST = 16  # tokens that a prompt advances in any case
_DECAY = 0.98  # of what is known of decoding, with every further step
_NEWEST = 0.5  # share of the newest step in what a token of a prompt takes: it grows along a prompt
_OUTLIER = 3.0  # a step that took so many times what was expected counts as that much


class Pace:
    """Learns how long steps take.

    A step takes ``base + slope * decodes`` without prompts, fitted to the steps of late by least squares, and so
    much more for every token of a prompt.

    Args:
        stretch: how many times as long a step with prompts may take, about; 0 is no bound.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        # Weighted sums over steps without prompts: 1, decodes, decodes squared, seconds, decodes times seconds.
        self._sums = np.zeros(5)
        self._prompt_token: float | None = None  # seconds

    def allowed(self, num_decodes: int) -> int | None:
        """Most tokens of prompts beside so many sequences that decode; ``None``: no bound, or none known yet."""
        if not self._stretch or not num_decodes or not self._sums[0] or not self._prompt_token:
            return None
        spare = (self._stretch * _AIM - 1) * self._expected(num_decodes)
        return max(_FEWEST, int(spare / self._prompt_token))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """Learn from a step."""
        expected = self._expected(num_decodes) if self._sums[0] else 0.0
        if num_prompt_tokens:
            if num_prompt_tokens >= _FEWEST:
                taken = max(seconds - expected, 0.0) / num_prompt_tokens
                known = self._prompt_token
                self._prompt_token = (
                    taken if known is None else known + _NEWEST * (min(taken, _OUTLIER * known) - known)
                )
            return
        if expected:
            seconds = min(seconds, _OUTLIER * expected)
        n = num_decodes
        self._sums = _DECAY * self._sums + (1, n, n * n, seconds, n * seconds)

    def _expected(self, num_decodes: int) -> float:
        """Seconds of a step of so many sequences that decode, without prompts."""
        means: list[float] = (self._sums[1:] / self._sums[0]).tolist()
        mean_n, mean_nn, mean_t, mean_nt = means
        variance = mean_nn - mean_n**2
        covariance = mean_nt - mean_n * mean_t
        slope = max(
            covariance / (variance + 1.0), 0.0
        )  # the 1 keeps noise from tilting a line through one point
        expected = mean_t + slope * (num_decodes - mean_n)
        return max(expected, mean_t / _OUTLIER)
