"""Sampling: the next token of every row of a step, in one pass.

The order is that of transformers' ``GenerationMixin._get_logits_processor``, and so is what each part means:

1. ``logit_bias`` (SequenceBias), ``repetition_penalty`` over prompt and output;
2. ``presence_penalty`` and ``frequency_penalty`` over the output, which transformers does not have: OpenAI's
   ``score[t] -= count[t] * frequency + (count[t] > 0) * presence``;
3. ``bad_words``, ``min_tokens``;
4. where the temperature is not 0: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``, then a draw.

Work over the whole vocabulary happens on the logits' device, in blocks of 64 tokens: the largest score of each
block and, where needed, its sum of exp(score). They tell which few blocks can hold tokens that a row keeps; only
these come to the host, which finishes in float64.

A row's token does not depend on the other rows: every device operation works on single elements or on whole
blocks of 64, and every sum on the host is a cumulative one, in order, where padding adds zeros at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triton_inflight.sampling_state import Floats, Ids, SamplingState, uniforms

NO_TOKEN = -1
_BLOCK = 64
# Finite, so that what is banned or padding (-inf) is never above it.
_LOWEST = float(np.finfo(np.float32).min)
# Rows are finished together with others that have no more candidates than this, so that a row with many does not
# make all of them wide; a row with more than the last number is alone.
_WIDTHS = (128, 1024)
_NO_KEY = np.uint64(2**64 - 1)
_LOW_WORD = np.uint64(0xFFFFFFFF)

Float32s = npt.NDArray[np.float32]


class _Memory(threading.local):
    """What `_scratch` keeps, for each thread its own."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], torch.Tensor] = {}


_memory = _Memory()


def sample(logits: torch.Tensor, states: Sequence[SamplingState] = ()) -> list[int]:
    """Choose the next token of each row; the caller then tells each state with ``append``.

    Args:
        logits: (S, vocabulary) float32, on any device; not changed.
        states: one for each row, or none where every row takes its most likely token.

    Returns:
        S token ids. Of equal scores the first wins where the temperature is 0, as in transformers' greedy search.
        ``NO_TOKEN`` for a row without a token to choose: its scores are not numbers, or all are banned.
    """
    assert len(states) in (0, len(logits)), (len(states), len(logits))
    active = [row for row, state in enumerate(states) if not state.is_plain]
    chosen = np.full(len(logits), NO_TOKEN) if active and len(active) == len(logits) else greedy(logits)
    if active:
        with one_thread():
            chosen[active] = _Pass(logits, active, [states[row] for row in active]).draw()
    tokens: list[int] = chosen.tolist()
    return tokens


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's operations inside run on the calling thread alone.

    They are so short that a second thread gains a tenth of a millisecond, and on a busy machine each of them may
    wait for it for as long as the scheduler lets another process run.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def probabilities(logits: torch.Tensor, states: Sequence[SamplingState]) -> Floats:
    """What ``sample`` draws from, for inspection: (S, vocabulary) float64, 0 for tokens that cannot come.

    Rows sum up to 1; a row without a token to choose is all 0.
    """
    return _Pass(logits, list(range(len(states))), states).probabilities()


def greedy(logits: torch.Tensor) -> Ids:
    """The first of the largest scores of each (S, vocabulary) row, as (S,) int64; ``NO_TOKEN`` as in ``sample``."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised: a tenth of the time of torch's.
        scores = logits.detach().numpy()
        tokens = scores.argmax(axis=-1)
        best = scores[np.arange(len(tokens)), tokens]
    else:
        largest = logits.max(dim=-1)
        tokens, best = largest.indices.cpu().numpy(), largest.values.cpu().numpy()
    return np.where(np.isfinite(best), tokens, NO_TOKEN)


@dataclass(frozen=True)
class _Limited:
    """Rows that draw from part of the vocabulary.

    Attributes:
        rows: R.
        floors: (R,) scores below which they keep nothing.
        masses: (R,) sum of exp(score - the largest) over the whole vocabulary; 0 where the floor is low enough
            for nothing but the row's own tokens to matter.
        entropies: (R,) in nats, of the whole vocabulary; for rows with typical_p and a mass.
    """

    rows: Ids
    floors: Floats
    masses: Floats
    entropies: Floats

    @classmethod
    def above(cls, rows: Ids, floors: Floats) -> _Limited:
        """Rows that keep only what is above their floors, whatever the rest is."""
        return cls(rows, floors, np.zeros(len(rows)), np.zeros(len(rows)))


class _Pass:
    """The rows of a step that need more than their most likely token.

    Args:
        logits: (S, vocabulary) float32.
        rows: A rows of it.
        states: their A states.
    """

    @torch.inference_mode()
    def __init__(self, logits: torch.Tensor, rows: list[int], states: Sequence[SamplingState]) -> None:
        self.states = states
        self.vocabulary = logits.shape[1]
        self.device = logits.device
        knobs = np.array([state.knobs for state in states], dtype=np.float64)
        self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p = knobs.T
        self.top_k = np.where(self.top_k < self.vocabulary, self.top_k, 0).astype(np.int64)

        num_blocks = -(-self.vocabulary // _BLOCK)
        padded = _scratch("scores", len(rows), num_blocks * _BLOCK, self.device)
        padded[:, self.vocabulary :] = -torch.inf
        own = padded[:, : self.vocabulary]
        raw = logits if len(rows) == len(logits) else logits[rows]
        temperatures = self._upload(self.temperature.astype(np.float32))[:, None]
        if any(state.params.edits_scores for state in states):
            own.copy_(raw)
            _edit(own, states)
            own /= temperatures
        else:
            torch.div(raw, temperatures, out=own)
        self.scores = padded.view(len(rows), num_blocks, _BLOCK)
        self.maxima: Float32s = self.scores.amax(dim=-1).cpu().numpy()
        self.largest: Float32s = self.maxima.max(axis=1)

        valid = np.isfinite(self.largest)
        is_greedy = np.array([state.params.is_greedy for state in states])
        self.greedy_rows = np.flatnonzero(valid & is_greedy)
        # The rest: what they keep is found first, where that is cheap or there is no other way; or they draw from
        # all tokens and then see whether that one is kept.
        unlimited = (self.top_k == 0) | ((self.top_k > num_blocks) & (self.top_p == 1))
        only_typical = (self.typical_p < 1) & (self.top_k == 0) & (self.top_p == 1) & (self.min_p == 0)
        narrows = ~unlimited | (self.typical_p < 1) | ((self.min_p > 0) & (self.top_p == 1))
        finds_first = narrows & ~only_typical
        self.limited_rows = np.flatnonzero(valid & ~is_greedy & finds_first)
        self.free_rows = np.flatnonzero(valid & ~is_greedy & ~finds_first)

    @torch.inference_mode()
    def draw(self) -> Ids:
        """(A,) token ids."""
        tokens = np.full(len(self.states), NO_TOKEN)
        if len(self.greedy_rows):
            tokens[self.greedy_rows] = self._most_likely()
        if len(self.greedy_rows) == len(self.states):
            return tokens
        chances, second_chances = uniforms(self.states)
        limited = [_Limited.above(self.limited_rows, self._floors(self.limited_rows))]
        if len(self.free_rows):
            tokens[self.free_rows], drawn = self._draw_free(chances[self.free_rows])
            chances[drawn.rows] = second_chances[drawn.rows]
            limited.append(drawn)
        for rows, ids, weights in self._kept(limited):
            # A token drawn from all that is also kept stays; see `_draw_free`.
            stays = ((ids == tokens[rows, None]) & (weights > 0)).any(axis=1)
            picked = ids[np.arange(len(rows)), _pick(weights, chances[rows])]
            tokens[rows] = np.where(stays, tokens[rows], picked)
        return tokens

    @torch.inference_mode()
    def probabilities(self) -> Floats:
        """(A, vocabulary) float64."""
        result = np.zeros((len(self.states), self.vocabulary))
        if len(self.greedy_rows):
            result[self.greedy_rows, self._most_likely()] = 1
        limited = _Limited.above(self.limited_rows, self._floors(self.limited_rows))
        free = _Limited.above(self.free_rows, np.full(len(self.free_rows), _LOWEST))
        for rows, ids, weights in self._kept([limited, free]):
            # Padding has weight 0 and may carry any id, so it must not overwrite a token's weight.
            row, column = np.nonzero(weights)
            result[rows[row], ids[row, column]] = weights[row, column]
        total = result.sum(axis=1, keepdims=True)
        return np.divide(result, total, out=result, where=total > 0)

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _rows_of_scores(self, rows: Ids) -> torch.Tensor:
        return self.scores if len(rows) == len(self.scores) else self.scores[self._upload(rows)]

    def _most_likely(self) -> Ids:
        return greedy(self._rows_of_scores(self.greedy_rows).flatten(1))

    def _masses(self, rows: Ids) -> torch.Tensor:
        """exp(score - the row's largest score), in blocks: (R, blocks, 64) float32."""
        masses = _scratch("masses", len(rows), self.scores[0].numel(), self.device).view(
            -1, *self.scores.shape[1:]
        )
        largest = self._upload(self.largest[rows])[:, None, None]
        torch.sub(self._rows_of_scores(rows), largest, out=masses)
        if self.device.type == "cpu":
            # As with argmax, numpy's is the fast one.
            np.exp(masses.numpy(), out=masses.numpy())
        else:
            masses.exp_()
        return masses

    def _draw_free(self, chances: Floats) -> tuple[Ids, _Limited]:
        """Draw from all tokens: a block by its sum, then a token in it.

        Rows that keep only some tokens then see whether the drawn one is among them, and draw again from what they
        keep if not; that gives each token that they keep the probability it should have:
        p + (1 - kept) * p / kept = p / kept. Only the tokens that go before the drawn one matter for that: what
        top_p, min_p and a large top_k keep are the most likely tokens down to some score, what typical_p keeps are
        those whose information is closest to the entropy. So most rows never have more than a few candidates.

        Returns:
            Tokens of the free rows; the rows that may not keep theirs, down to that token.
        """
        rows = self.free_rows
        every = np.arange(len(rows))
        masses = self._masses(rows)
        sums = masses.sum(dim=-1).double().cpu().numpy()
        ends = np.cumsum(sums, axis=1)
        total = ends[:, -1]
        blocks = _pick(sums, chances)
        rest = chances * total - (ends[every, blocks] - sums[every, blocks])
        inside = masses[self._upload(every), self._upload(blocks)].double().cpu().numpy()
        offsets = _pick(inside, np.clip(rest / sums[every, blocks], 0, 1))
        scores = self.scores[self._upload(rows), self._upload(blocks), self._upload(offsets)].cpu().numpy()
        tokens = blocks * _BLOCK + offsets

        floors, entropies = scores.astype(np.float64), np.zeros(len(rows))
        typical = np.flatnonzero(self.typical_p[rows] < 1)
        if len(typical):
            of_typical = masses if len(typical) == len(rows) else masses[self._upload(typical)]
            products = torch.special.xlogy(of_typical, of_typical).sum(dim=-1).double().cpu().numpy()
            log_total = np.log(total[typical])
            entropy = log_total - np.cumsum(products, axis=1)[:, -1] / total[typical]
            largest = self.largest[rows[typical]].astype(np.float64)
            distance = np.abs(largest + log_total - floors[typical] - entropy)
            entropies[typical] = entropy
            floors[typical] = _with_margin(largest + log_total - entropy - distance)
        unsure = np.flatnonzero((self.top_p[rows] < 1) | (self.top_k[rows] > 0) | (self.typical_p[rows] < 1))
        return tokens, _Limited(rows[unsure], floors[unsure], total[unsure], entropies[unsure])

    def _kept(self, limited: Sequence[_Limited]) -> Iterator[tuple[Ids, Ids, Floats]]:
        """In groups: R rows, their candidates (R, W) and the weights of these (R, W)."""
        rows = np.concatenate([part.rows for part in limited])
        if not len(rows):
            return
        floors = np.concatenate([part.floors for part in limited]).astype(np.float32)
        masses = np.concatenate([part.masses for part in limited])
        entropies = np.concatenate([part.entropies for part in limited])
        row, ids, scores = self._candidates(rows, floors)
        counts = np.bincount(row, minlength=len(rows))
        starts = np.cumsum(counts) - counts
        of_width = np.digitize(counts, _WIDTHS, right=True)
        groups = [np.flatnonzero(of_width == width) for width in range(len(_WIDTHS))]
        for group in (*groups, *np.flatnonzero(of_width == len(_WIDTHS))[:, None]):
            if len(group):
                own = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in group])
                sorted_ids, sorted_scores = _sorted_matrix(counts[group], ids[own], scores[own])
                weights = self._weights(rows[group], sorted_scores, masses[group], entropies[group])
                yield rows[group], sorted_ids, weights

    def _floors(self, rows: Ids) -> Floats:
        """Scores below which a row surely keeps nothing: (R,)."""
        floors = np.full(len(rows), _LOWEST)
        k = self.top_k[rows]
        by_blocks = np.flatnonzero((k > 0) & (k <= self.maxima.shape[1]))
        if len(by_blocks):
            # The k-th largest maximum of a block: k tokens at least are not below it.
            descending = -np.sort(-self.maxima[rows[by_blocks]], axis=1)
            floors[by_blocks] = descending[np.arange(len(by_blocks)), k[by_blocks] - 1]
        by_tokens = np.flatnonzero(k > self.maxima.shape[1])
        if len(by_tokens):
            largest = self._rows_of_scores(rows[by_tokens]).flatten(1).topk(k.max()).values
            lowest = largest[self._upload(np.arange(len(by_tokens))), self._upload(k[by_tokens] - 1)]
            floors[by_tokens] = lowest.cpu().numpy()
        by_min_p = np.flatnonzero((self.min_p[rows] > 0) & (self.top_p[rows] == 1))
        if len(by_min_p):
            scores = self.largest[rows[by_min_p]] + np.log(self.min_p[rows[by_min_p]])
            floors[by_min_p] = np.maximum(floors[by_min_p], _with_margin(scores))
        return np.maximum(floors, _LOWEST)

    def _candidates(self, rows: Ids, floors: Float32s) -> tuple[Ids, Ids, Float32s]:
        """All scores not below their row's floor: (N,) row (index into ``rows``, ascending), token id, score."""
        row, block = np.nonzero(self.maxima[rows] >= floors[:, None])
        picked: Float32s = self.scores[self._upload(rows[row]), self._upload(block)].cpu().numpy()
        which, offset = np.nonzero(picked >= floors[row][:, None])
        return row[which], block[which] * _BLOCK + offset, picked[which, offset]

    def _weights(self, rows: Ids, scores: Float32s, masses: Floats, entropies: Floats) -> Floats:
        """Weights in proportion to the probabilities that top_k, top_p, min_p and typical_p leave.

        Args:
            rows: R.
            scores: (R, W), descending in each row, then -inf.
            masses, entropies: (R,) as in ``_Limited``.
        """
        weights = np.exp(scores.astype(np.float64) - scores[:, :1])
        k = self.top_k[rows]
        last = scores[np.arange(len(rows)), np.clip(k, 1, scores.shape[1]) - 1]
        weights[(scores < last[:, None]) & (k > 0)[:, None]] = 0

        top_p = self.top_p[rows]
        if (top_p < 1).any():
            ends = np.cumsum(weights, axis=1)
            total = np.where(masses > 0, masses, ends[:, -1])
            allowed = np.where(top_p < 1, top_p * total, np.inf)
            weights[ends - weights >= allowed[:, None]] = 0

        weights[weights < self.min_p[rows][:, None]] = 0
        typical = np.flatnonzero(self.typical_p[rows] < 1)
        if len(typical):
            own = weights[typical]
            total = np.where(masses[typical] > 0, masses[typical], np.cumsum(own, axis=1)[:, -1])
            keeps = _is_typical(own / total[:, None], self.typical_p[rows[typical]], entropies[typical])
            weights[typical] = np.where(keeps, own, 0)
        return weights


def _scratch(name: str, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """(rows, width) float32 to write into, the same memory at every step: fresh pages cost more than the work."""
    buffer = _memory.buffers.get((name, device))
    if buffer is None or buffer.numel() < rows * width:
        buffer = _memory.buffers[name, device] = torch.empty(rows * width, device=device)
    return buffer[: rows * width].view(rows, width)


def _edit(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Bias, penalise and ban single tokens, in place. scores: (R, vocabulary)."""
    vocabulary, device = scores.shape[1], scores.device
    edited = [(row, state) for row, state in enumerate(states) if state.params.edits_scores]

    def spread(parts: list[tuple[int, Ids, Floats]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, ids and values of all parts; a prompt may hold tokens that the head has no score for."""
        rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in parts])
        ids = np.concatenate([ids for _, ids, _ in parts])
        values = np.concatenate([values for _, _, values in parts]).astype(np.float32)
        known = ids < vocabulary
        return tuple(torch.from_numpy(part[known]).to(device) for part in (rows, ids, values))  # type: ignore[return-value]

    biased = [(row, s.biased, s.biases) for row, s in edited if len(s.biased)]
    if biased:
        rows, ids, values = spread(biased)
        scores[rows, ids] += values
    repeated = [
        (row, s.repeated.ids, np.full(len(s.repeated.ids), s.params.repetition_penalty))
        for row, s in edited
        if s.repeated is not None
    ]
    if repeated:
        rows, ids, values = spread(repeated)
        before = scores[rows, ids]
        scores[rows, ids] = torch.where(before < 0, before * values, before / values)
    said = [
        (row, s.output.ids, s.output.counts * s.params.frequency_penalty + s.params.presence_penalty)
        for row, s in edited
        if s.output is not None
    ]
    if said:
        rows, ids, values = spread(said)
        scores[rows, ids] -= values
    banned = [(row, np.array(bad), np.zeros(len(bad))) for row, s in edited if (bad := s.banned())]
    if banned:
        rows, ids, _ = spread(banned)
        scores[rows, ids] = -torch.inf


def _sorted_matrix(counts: Ids, ids: Ids, scores: Float32s) -> tuple[Ids, Float32s]:
    """Candidates as (R, W) matrices, by descending score, then id; padding has the score -inf.

    So where top_p splits tokens of one score, the first ids stay; transformers leaves open which.

    Args:
        counts: (R,) candidates of each row.
        ids, scores: (N,), row after row.
    """
    # One integer per candidate that sorts as wanted: the score's bits, made to sort downwards, above the id.
    bits = scores.view(np.uint32)
    downwards = np.where(bits >> 31 == 1, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = np.full((len(counts), counts.max()), _NO_KEY)
    filled = np.arange(counts.max()) < counts[:, None]
    keys[filled] = downwards << np.uint64(32) | ids.astype(np.uint64)
    keys.sort(axis=1)
    downwards = (keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(downwards >> 31 == 1, downwards, ~downwards & np.uint32(0x7FFFFFFF))
    ids = (keys & _LOW_WORD).astype(np.int64)
    return ids, np.where(filled, bits.view(np.float32), -np.float32(np.inf))


def _is_typical(chances: Floats, mass: Floats, entropies: Floats) -> npt.NDArray[np.bool_]:
    """Whether a token is among those whose information is closest to the entropy, up to a mass (Meister et al., 2022).

    Args:
        chances: (R, W) probabilities.
        mass: (R,) what the probabilities of those tokens sum up to, at least.
        entropies: (R,) in nats; 0: that of ``chances``.
    """
    information = -np.log(chances, out=np.zeros_like(chances), where=chances > 0)
    own_entropies = np.cumsum(chances * information, axis=1)[:, -1]
    entropies = np.where(entropies > 0, entropies, own_entropies)
    distance = np.where(chances > 0, np.abs(information - entropies[:, None]), np.inf)
    order = np.argsort(distance, axis=1)
    reached = np.cumsum(np.take_along_axis(chances, order, axis=1), axis=1)
    last = np.minimum((reached < mass[:, None]).sum(axis=1), chances.shape[1] - 1)
    limit = np.take_along_axis(distance, np.take_along_axis(order, last[:, None], axis=1), axis=1)
    return distance <= limit


def _with_margin(floors: Floats) -> Floats:
    """Lower by more than float32 scores are rounded; what is let in by that is decided on exactly later."""
    return floors - 1e-3 - 1e-6 * np.abs(floors)


def _pick(weights: Floats, chances: Floats) -> Ids:
    """Invert the cumulative distribution: (R,) columns of (R, W) weights, for chances from 0 to 1.

    A column without weight is never picked, wherever rounding puts the chance.
    """
    ends = np.cumsum(weights, axis=1)
    picked = (ends <= (chances * ends[:, -1])[:, None]).sum(axis=1)
    last = (ends < ends[:, -1:]).sum(axis=1)
    columns: Ids = np.minimum(picked, last)
    return columns
