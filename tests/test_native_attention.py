"""Native attention against a dense float64 oracle, for every version of the kernels that this machine runs.

Every pool starts out full of NaN, so that a cell that is read without having been stored shows in the result.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from triton_inflight import _native
from triton_inflight.kv_shape import KVShape
from triton_inflight.native_attention import NativePool

ISAS = _native.supported_isas()
EACH_ISA = pytest.mark.parametrize("isa", ISAS, ids=[isa.name for isa in ISAS])
# Float32 sums of a few hundred terms; bfloat16 keeps 8 bits of queries, weights and results.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    query_heads: int = 4
    kv_heads: int = 2
    key_width: int = 64
    value_width: int = 64
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    tokens_per_block: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    strides: str = "contiguous"
    scale: float = 0.25


class Sequences:
    """Random sequences, the blocks they hold (out of order), and how far each has been run."""

    def __init__(self, case: Case, lengths: list[int], isa: _native.Isa, seed: int = 0) -> None:
        self.case = case
        self.lengths = lengths
        self.done = [0] * len(lengths)
        generator = torch.Generator().manual_seed(seed)

        def numbers(tokens: int, heads: int, width: int) -> torch.Tensor:
            return torch.randn(tokens, heads, width, generator=generator).to(case.dtype)

        self.queries = [numbers(n, case.query_heads, case.key_width) for n in lengths]
        self.keys = [numbers(n, case.kv_heads, case.key_width) for n in lengths]
        self.values = [numbers(n, case.kv_heads, case.value_width) for n in lengths]
        self.sinks = torch.randn(case.query_heads, generator=generator) if case.sinks else None
        needed = [-(-n // case.tokens_per_block) for n in lengths]
        num_blocks = sum(needed) + 3
        blocks = torch.randperm(num_blocks, generator=generator).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        for row, count in enumerate(needed):
            first = sum(needed[:row])
            self.tables[row, :count] = blocks[first : first + count]
        self.pool = NativePool(
            num_blocks,
            case.tokens_per_block,
            KVShape(case.kv_heads, case.key_width, case.value_width),
            case.pool_dtype or case.dtype,
            isa,
        )
        self.pool.data.fill_(float("nan"))

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Run some tokens of some sequences together; the result of each sequence's tokens."""
        case, members = self.case, list(counts)
        slices = {i: slice(self.done[i], self.done[i] + counts[i]) for i in members}
        for i in members:
            self.done[i] += counts[i]
        starts = [0]
        for i in members:
            starts.append(starts[-1] + counts[i])
        lengths = [self.done[i] for i in members]
        plan = self.pool.plan(self.tables[members], starts, lengths, case.query_heads, case.window)
        q, k, v = (
            torch.cat([whole[i][slices[i]] for i in members])
            for whole in (self.queries, self.keys, self.values)
        )
        q, k, v = restride(case.strides, q, k, v)
        out = self.pool.attend(plan, q, k, v, case.scale, case.softcap, self.sinks)
        return dict(zip(members, out.split([counts[i] for i in members]), strict=True))

    def run_ragged(self, rng: random.Random) -> list[torch.Tensor]:
        """All tokens of all sequences, in steps of random members and sizes."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        while pending := [i for i, n in enumerate(self.lengths) if self.done[i] < n]:
            members = rng.sample(pending, rng.randint(1, len(pending)))
            counts = {}
            for i in members:
                left = self.lengths[i] - self.done[i]
                counts[i] = min(left, rng.choice([1, 2, 7, 40, 150, 400]))
            for i, out in self.step(counts).items():
                parts[i].append(out)
        return [torch.cat(part) for part in parts]

    def oracle(self, i: int) -> torch.Tensor:
        """Dense causal attention in float64 over what the pool keeps of sequence ``i``."""
        case, tokens = self.case, self.lengths[i]
        stored = case.pool_dtype or case.dtype
        per_head = case.query_heads // case.kv_heads
        q = self.queries[i].double().transpose(0, 1)
        k, v = (
            x[i].to(stored).double().transpose(0, 1).repeat_interleave(per_head, 0)
            for x in (self.keys, self.values)
        )
        scores = q @ k.transpose(1, 2) * case.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        seen = (distance >= 0) & (distance < (case.window or tokens))
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, tokens, 1)
            scores = torch.cat((scores, sinks), dim=2)
        return (scores.softmax(2)[..., :tokens] @ v).transpose(0, 1)


def restride(kind: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same numbers in the memory layouts that models hand over."""
    if kind == "contiguous":
        return tensors
    if kind == "head_major":
        return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors)
    assert kind == "fused"  # slices of one (T, everything) product
    fused = torch.cat([x.flatten(1) for x in tensors], dim=1)
    slices = fused.split([x[0].numel() for x in tensors], dim=1)
    return tuple(part.unflatten(1, x.shape[1:]) for part, x in zip(slices, tensors, strict=True))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number expected; NaN if any is found."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


BF16 = torch.bfloat16
CASES = {
    "grouped": Case(query_heads=9, kv_heads=3),
    "grouped, bfloat16": Case(query_heads=9, kv_heads=3, dtype=BF16),
    "one key head, many rows": Case(query_heads=71, kv_heads=1, key_width=16, value_width=16),
    "fused, one query head each": Case(query_heads=3, kv_heads=3, strides="fused", dtype=BF16),
    "head-major, width 80": Case(key_width=80, value_width=80, strides="head_major"),
    "head-major, width 128, bfloat16": Case(
        key_width=128, value_width=128, strides="head_major", dtype=BF16, tokens_per_block=64
    ),
    "values wider": Case(key_width=16, value_width=40, tokens_per_block=16, dtype=BF16),
    "keys wider and odd": Case(key_width=35, value_width=21, tokens_per_block=48, dtype=BF16),
    "keys wider and odd, float32": Case(key_width=35, value_width=21, tokens_per_block=512),
    "window": Case(window=37, tokens_per_block=16),
    "window beyond a span, bfloat16": Case(window=300, dtype=BF16),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True, window=20),
    "all together, bfloat16": Case(sinks=True, window=70, softcap=3.0, dtype=BF16, tokens_per_block=64),
    "float32 into a bfloat16 pool": Case(pool_dtype=BF16),
    "bfloat16 into a float32 pool": Case(dtype=BF16, pool_dtype=torch.float32),
}


@EACH_ISA
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ragged_steps_agree_with_the_oracle(case: Case, isa: _native.Isa) -> None:
    """Whatever is stored and attended over in whatever pieces, each token sees its own history and no other."""
    sequences = Sequences(case, [1, 5, 33, 64, 130, 300, 530], isa)
    outs = sequences.run_ragged(random.Random(1))
    low = BF16 in (case.dtype, case.pool_dtype)
    for i, out in enumerate(outs):
        assert out.dtype == case.dtype
        assert error(out, sequences.oracle(i)) < TOLERANCE[BF16 if low else torch.float32]


@EACH_ISA
def test_a_wrong_table_is_seen(isa: _native.Isa) -> None:
    """The negative control: with its blocks rotated, a sequence's result is far from the oracle's."""
    sequences = Sequences(Case(), [96, 40], isa)
    sequences.step({0: 95, 1: 40})
    assert sequences.tables.shape[1] == 3
    sequences.tables[0] = sequences.tables[0].roll(1)
    out = sequences.step({0: 1})[0]
    assert not error(out, sequences.oracle(0)[-1:]) < 0.05


@EACH_ISA
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("window", [None, 290])
def test_no_bit_depends_on_mates_chunks_or_threads(
    isa: _native.Isa, dtype: torch.dtype, window: int | None
) -> None:
    """Alone and whole on one thread, or in ragged company on two: the same bits."""
    case = Case(query_heads=6, kv_heads=2, dtype=dtype, window=window)
    lengths = [20, 700, 90, 333]
    ragged = Sequences(case, lengths, isa).run_ragged(random.Random(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = Sequences(case, lengths, isa)
        for i, out in enumerate(ragged):
            assert torch.equal(alone.step({i: lengths[i]})[i], out)
    finally:
        torch.set_num_threads(threads)


@EACH_ISA
def test_a_long_history_is_shared_out(isa: _native.Isa) -> None:
    """One token after a long history is cut along its cells when there are threads to feed, to no effect."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = Case(query_heads=2, kv_heads=1, dtype=BF16, sinks=True)
        sequences = Sequences(case, [2100], isa)
        sequences.step({0: 2099})
        plan = sequences.pool.plan(sequences.tables, [0, 1], [2100], 2, None)
        assert plan.num_items == 8
        assert error(sequences.step({0: 1})[0], sequences.oracle(0)[-1:]) < TOLERANCE[BF16]
    finally:
        torch.set_num_threads(threads)


def test_a_window_leaves_old_blocks_unread() -> None:
    """Blocks before the window may already belong to somebody else."""
    sequences = Sequences(Case(window=32), [200], ISAS[-1])
    sequences.step({0: 199})
    sequences.pool.data[sequences.tables[0, :5].long()] = float("nan")
    assert error(sequences.step({0: 1})[0], sequences.oracle(0)[-1:]) < TOLERANCE[torch.float32]


def test_a_block_may_be_copied_as_a_whole() -> None:
    """A fork continues on a copy of its last block."""
    sequences = Sequences(Case(dtype=BF16), [70], ISAS[-1])
    sequences.step({0: 69})
    last = int(sequences.tables[0, 2])
    spare = next(b for b in range(len(sequences.pool.data)) if b not in sequences.tables[0].tolist())
    sequences.pool.data[spare] = sequences.pool.data[last]
    sequences.pool.data[last] = float("nan")
    sequences.tables[0, 2] = spare
    assert error(sequences.step({0: 1})[0], sequences.oracle(0)[-1:]) < TOLERANCE[BF16]


def test_extreme_scores_stay_finite() -> None:
    """Scores in the thousands, whose plain exponentials overflow."""
    case = Case(scale=100.0)
    for isa in ISAS:
        sequences = Sequences(case, [300], isa)
        out = sequences.step({0: 300})[0]
        assert error(out, sequences.oracle(0)) < 1e-3  # float32 scores of 1e4 carry an error of 1e-3


def test_neighbours_survive_numbers_that_are_none() -> None:
    """A sequence of NaN leaves its mates, and whoever gets its blocks next, as they are."""
    sequences = Sequences(Case(dtype=BF16), [50, 81], ISAS[-1])
    sequences.values[0].fill_(float("nan"))
    sequences.keys[0].fill_(float("nan"))
    outs = sequences.step({0: 50, 1: 81})
    assert bool(outs[0].isnan().all())
    assert error(outs[1], sequences.oracle(1)) < TOLERANCE[BF16]


def make_inputs(pool_heads: int = 2) -> tuple[NativePool, torch.Tensor, torch.Tensor]:
    pool = NativePool(4, 32, KVShape(pool_heads, 16, 16), torch.float32)
    return pool, torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)


def test_what_does_not_fit_is_refused() -> None:
    """Bare addresses reach the kernels, so every mismatch must be caught before."""
    pool, q, kv = make_inputs()
    tables = torch.zeros(1, 1, dtype=torch.int32)
    plan = pool.plan(tables, [0, 3], [3], 4, None)
    with pytest.raises(ValueError, match=r"must be \(\(3, 4, 16\)"):
        pool.attend(plan, q[:2], kv, kv, 1.0)
    with pytest.raises(ValueError, match="innermost stride"):
        pool.attend(plan, q.transpose(0, 2).contiguous().transpose(0, 2), kv, kv, 1.0)
    with pytest.raises(ValueError, match="must be of one type"):
        pool.attend(plan, q, kv, kv.bfloat16(), 1.0)
    with pytest.raises(ValueError, match=r"float16.*torch\.float32 and torch\.bfloat16"):
        pool.attend(plan, q.half(), kv, kv, 1.0)
    with pytest.raises(ValueError, match="scale is 0"):
        pool.attend(plan, q, kv, kv, 0.0)
    with pytest.raises(ValueError, match="sinks have the shape"):
        pool.attend(plan, q, kv, kv, 1.0, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="other blocks or heads"):
        NativePool(5, 32, KVShape(2, 16, 16), torch.float32).attend(plan, q, kv, kv, 1.0)
    with pytest.raises(ValueError, match="block 4 of sequence 0 is not one of the 4"):
        pool.plan(tables + 4, [0, 3], [3], 4, None)
    with pytest.raises(ValueError, match="runs 3 tokens and has 33 cells in a table of 1 blocks"):
        pool.plan(tables, [0, 3], [33], 4, None)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        pool.plan(tables, [0, 3], [3], 3, None)
    with pytest.raises(ValueError, match="tokens_per_block is 20, must be a multiple of 16"):
        NativePool(4, 20, KVShape(2, 16, 16), torch.float32)


def test_the_version_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_INFLIGHT_ISA picks a version; what cannot run is refused with what can."""
    for isa in ISAS:
        monkeypatch.setenv("TRITON_INFLIGHT_ISA", isa.name)
        assert _native.chosen_isa() == isa
    monkeypatch.setenv("TRITON_INFLIGHT_ISA", "avx1024")
    with pytest.raises(ValueError, match=r"'avx1024'.*can run: portable"):
        NativePool(4, 32, KVShape(2, 16, 16), torch.float32)
    monkeypatch.delenv("TRITON_INFLIGHT_ISA")
    assert _native.chosen_isa() == ISAS[-1]
