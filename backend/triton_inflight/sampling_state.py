"""SamplingState: what sampling remembers of one choice from step to step."""

from __future__ import annotations

import copy
import secrets
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from triton_inflight.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
# Increment and multipliers of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014): its i-th number is a hash of key + i * increment, so any of them is found without the others.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class TokenCounts:
    """The distinct tokens of a text and how often each occurs. Adding one costs the same however long it is.

    Args:
        tokens: the text's beginning.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}
        room = max(16, len(ids))
        self._ids: Ids = np.concatenate([ids, np.zeros(room, np.int64)])
        self._counts: Floats = np.concatenate([counts, np.zeros(room)])

    @property
    def ids(self) -> Ids:
        """(D,) int64, each distinct token once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Floats:
        """(D,) float64, how often the tokens of ``ids`` occur."""
        return self._counts[: len(self._slots)]

    def append(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def copy(self) -> TokenCounts:
        twin = copy.copy(self)
        twin._slots = self._slots.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        return twin


class SamplingState:
    """What sampling needs to know of one choice: its parameters, what it said so far, its random numbers.

    It belongs to the choice, not to a step: a preempted sequence keeps its state and only has its keys and
    values computed again. The random number of a token depends on (seed, choice, number of output tokens before
    it) and nothing else, so a seed gives the same text alone, in a batch, after a preemption, and when the state
    is made anew from the same tokens.

    Args:
        params: the request's.
        prompt: its token ids.
        eos_token_ids: tokens that end this model's texts.
        choice: which of the request's answers this is.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], eos_token_ids: Iterable[int], choice: int = 0
    ) -> None:
        self.params = params
        self.choice = choice
        self.num_output = 0
        self.knobs = (
            1.0 if params.is_greedy else params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            params.typical_p,
        )
        self.repeated = TokenCounts(prompt) if params.repetition_penalty != 1.0 else None
        counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.output = TokenCounts() if counts_output else None
        self.biased = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.biases = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        eos = frozenset(eos_token_ids)
        self._endings = sorted(eos | set(params.stop_token_ids))
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._bad_tokens, self._bad_endings = _sort_bad_words(params.bad_words, eos)
        longest = max((len(word) for word in params.bad_words), default=1)
        self._tail = deque(prompt[-longest:], maxlen=longest)
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self.key = _stream_key(self._seed, choice)

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the most likely one, whatever was said before."""
        return self.params.is_greedy and not self.params.edits_scores

    def append(self, token: int) -> None:
        """Record a token of the output."""
        self.num_output += 1
        self._tail.append(token)
        if self.repeated is not None:
            self.repeated.append(token)
        if self.output is not None:
            self.output.append(token)

    def ends(self, token: int) -> bool:
        """Whether the token ends the output: EOS unless it is ignored, or one of ``stop_token_ids``."""
        return token in self._ends

    def banned(self) -> list[int]:
        """Tokens that must not come next: endings before ``min_tokens``, last tokens of bad words."""
        banned = list(self._bad_tokens)
        if self.num_output < self.params.min_tokens:
            banned += self._endings
        if self._bad_endings and self._tail:
            tail = tuple(self._tail)
            for start, last in self._bad_endings.get(tail[-1], ()):
                if tail[-len(start) :] == start:
                    banned.append(last)
        return banned

    def fork(self, choice: int) -> SamplingState:
        """The state of another choice that goes on from here; its random numbers are its own."""
        twin = copy.copy(self)
        twin.choice = choice
        twin.repeated = self.repeated and self.repeated.copy()
        twin.output = self.output and self.output.copy()
        twin._tail = self._tail.copy()
        twin.key = _stream_key(self._seed, choice)
        return twin


def uniforms(states: Sequence[SamplingState]) -> tuple[Floats, Floats]:
    """The random numbers of each state's next token: two times (S,) float64, 0 <= u < 1, 53 bits each."""
    keys = np.array([state.key for state in states], dtype=np.uint64)
    positions = np.array([state.num_output + 1 for state in states], dtype=np.uint64)
    first = _mix(keys + positions * _INCREMENT)
    return _unit(first), _unit(_mix(first + _INCREMENT))


def _unit(bits: Keys) -> Floats:
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _stream_key(seed: int, choice: int) -> int:
    """Where a choice's numbers begin: hashed, so that near seeds do not walk the same numbers."""
    key = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return int(_mix(key + np.array([choice + 1], dtype=np.uint64) * _INCREMENT)[0])


def _mix(z: Keys) -> Keys:
    """SplitMix64's hash of 64 bits; arithmetic is modulo 2^64."""
    z = (z ^ (z >> _SHIFTS[0])) * _MULTIPLIERS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return z ^ (z >> _SHIFTS[2])


def _sort_bad_words(
    words: Iterable[tuple[int, ...]], eos: frozenset[int]
) -> tuple[list[int], dict[int, list[tuple[tuple[int, ...], int]]]]:
    """Bad tokens, and longer bad words as (all but the last token, the last), by their last but one token."""
    tokens = [word[0] for word in words if len(word) == 1 and word[0] not in eos]
    endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in words:
        if len(word) > 1:
            endings.setdefault(word[-2], []).append((word[:-1], word[-1]))
    return tokens, endings
