"""The KV-state store: every key reads back its own tokens, whatever is shared, evicted or refused.

A cell's content stands for keys and values, which depend on all tokens before it; so the tests keep, for each
cell, a number that stands for the whole text up to there. A block shared wrongly is then always seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from triton_inflight.kv_store import KVStore

WIDTH = 4
Key = tuple[int, int]
Layout = tuple[list[int], list[list[int]]]


def layout(store: KVStore, *rows: tuple[int, int, int, int]) -> Layout:
    """The arrays of a step, for rows of (sequence, choice, start, count)."""
    sequences, choices, starts, counts = zip(*rows, strict=True)
    cells, tables = store.layout(
        np.array(sequences, np.uint64),
        np.array(choices, np.uint32),
        np.array(starts, np.int64),
        np.array(counts, np.int64),
    )
    return cells.tolist(), tables.tolist()


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def publish_text(store: KVStore, sequence: int, tokens: list[int]) -> list[int]:
    """Reserve and publish a text as if it had been computed; its blocks."""
    assert store.reserve(sequence, 0, 0, len(tokens)) == []
    store.publish(sequence, 0, array(tokens), len(tokens))
    return store.blocks(sequence, 0)


# Reserving and the arrays of a step


def test_reserve_takes_only_the_blocks_that_are_new() -> None:
    store = KVStore(8, WIDTH)
    assert store.reserve(1, 0, 0, 5) == []
    assert (store.num_held, store.num_free) == (2, 6)
    assert store.blocks_needed(1, 0, 5, 8) == 0
    assert store.reserve(1, 0, 5, 8) == []
    assert store.num_held == 2
    assert store.blocks_needed(1, 0, 8, 9) == 1
    assert store.reserve(1, 0, 8, 9) == []
    assert store.num_held == 3
    store.check()


def test_a_refused_reserve_changes_nothing() -> None:
    store = KVStore(3, WIDTH)
    store.reserve(1, 0, 0, 8)
    store.fork(1, 0, 1)
    before = store.blocks(1, 0), store.blocks(1, 1), store.num_free
    assert store.blocks_needed(1, 1, 7, 9) == 2  # a copy of the second block, and a third
    assert store.reserve(1, 1, 7, 9) is None
    assert store.reserve(2, 0, 0, 5) is None
    assert (store.blocks(1, 0), store.blocks(1, 1), store.num_free) == before
    assert store.live() == [1]
    store.check()


def test_layout_gives_cells_and_padded_tables_of_mixed_rows() -> None:
    store = KVStore(8, WIDTH)
    for sequence, length in ((2**63, 6), (7, 9)):
        store.reserve(sequence, 0, 0, length)
    first, second = store.blocks(2**63, 0), store.blocks(7, 0)
    cells, tables = layout(store, (2**63, 0, 3, 3), (7, 0, 8, 1), (7, 0, 0, 0))
    assert cells == [first[0] * WIDTH + 3, first[1] * WIDTH, first[1] * WIDTH + 1, second[2] * WIDTH]
    assert tables == [[*first, 0], second, [0, 0, 0]]


def test_layout_dtypes_and_the_empty_step() -> None:
    store = KVStore(2, WIDTH)
    cells, tables = store.layout(*(np.array([], dtype) for dtype in ("u8", "u4", "i8", "i8")))
    assert (cells.dtype, cells.shape) == (np.int64, (0,))
    assert (tables.dtype, tables.shape) == (np.int32, (0, 0))


def test_trim_gives_back_whole_blocks_and_keeps_the_key() -> None:
    store = KVStore(8, WIDTH)
    store.reserve(1, 0, 0, 12)
    kept = store.blocks(1, 0)[:2]
    store.trim(1, 0, 5)
    assert store.blocks(1, 0) == kept
    store.trim(1, 0, 0)
    assert store.blocks(1, 0) == []
    assert store.live() == [1]
    assert store.reserve(1, 0, 0, 1) == []


# Choices


def test_a_forked_block_is_copied_by_the_first_to_write_and_owned_by_the_last() -> None:
    store = KVStore(8, WIDTH)
    store.reserve(1, 0, 0, 6)
    whole, partial = store.blocks(1, 0)
    store.fork(1, 0, 1)
    store.fork(1, 0, 2)
    assert store.num_held == 2
    for choice in (1, 0):
        assert store.blocks_needed(1, choice, 6, 7) == 1
        copies = store.reserve(1, choice, 6, 7)
        assert copies == [(partial, store.blocks(1, choice)[1])]
    assert store.reserve(1, 2, 6, 7) == []
    assert [store.blocks(1, choice)[0] for choice in range(3)] == [whole] * 3
    assert store.num_held == 4
    store.check()


def test_a_shared_full_block_is_not_copied_when_the_next_one_is_written() -> None:
    store = KVStore(8, WIDTH)
    store.reserve(1, 0, 0, WIDTH)
    store.fork(1, 0, 1)
    assert store.reserve(1, 1, WIDTH, WIDTH + 1) == []
    assert store.num_held == 2


def test_drop_ends_one_choice_and_free_ends_all_once() -> None:
    store = KVStore(8, WIDTH)
    store.reserve(1, 0, 0, 6)
    store.fork(1, 0, 1)
    store.reserve(1, 1, 6, 7)
    assert store.drop(1, 0) == 1  # the whole block is still choice 1's
    assert store.drop(1, 0) == 0
    assert store.free(1) == 2
    assert store.free(1) == 0
    assert (store.live(), store.num_held, store.num_free) == ([], 0, 8)
    store.check()


# Prefix reuse


def test_a_published_prefix_is_found_by_others_up_to_the_last_token() -> None:
    store = KVStore(16, WIDTH, reuse=True)
    tokens = list(range(12))
    blocks = publish_text(store, 1, tokens)
    assert store.match_prefix(2, 0, array(tokens)) == 8  # the last token is left, so its block is too
    assert store.blocks(2, 0) == blocks[:2]
    assert store.match_prefix(3, 0, array([*tokens, 99]).astype(np.int32)) == 12
    assert store.match_prefix(4, 0, array([*tokens[:6], 99, 99, 99])) == 4
    assert store.match_prefix(5, 0, array([99, *tokens])) == 0
    assert store.match_prefix(6, 0, array([])) == 0
    assert store.live() == [1, 2, 3, 4]
    assert store.num_held == 3
    store.check()


def test_only_full_computed_blocks_are_published_and_publishing_goes_on() -> None:
    store = KVStore(16, WIDTH, reuse=True)
    tokens = array(list(range(11)))
    store.reserve(1, 0, 0, 11)
    for computed, found in ((3, 0), (7, 4), (11, 8)):
        store.publish(1, 0, tokens, computed)
        assert store.match_prefix(2, 0, tokens) == found
        store.free(2)
    store.check()


def test_a_freed_prefix_stays_findable_and_counts_as_free() -> None:
    store = KVStore(4, WIDTH, reuse=True)
    tokens = list(range(9))
    blocks = publish_text(store, 1, tokens)
    assert store.free(1) == 3
    assert (store.num_held, store.num_cached, store.num_free) == (0, 2, 4)
    assert store.match_prefix(2, 0, array(tokens)) == 8
    assert store.blocks(2, 0) == blocks[:2]
    assert (store.num_held, store.num_cached, store.num_free) == (2, 0, 2)
    store.check()


def test_eviction_takes_free_blocks_then_the_least_recently_used_tail_before_head() -> None:
    store = KVStore(6, WIDTH, reuse=True)
    old, recent = [1] * 9, [2] * 9
    publish_text(store, 1, old)
    store.free(1)
    publish_text(store, 2, recent)
    store.free(2)
    assert store.match_prefix(3, 0, array(old)) == 8  # `old` is now the more recent of the two
    store.free(3)
    assert (store.num_cached, store.num_free) == (4, 6)

    store.reserve(4, 0, 0, 2 * WIDTH)
    assert store.num_cached == 4  # the two free blocks went first
    store.reserve(4, 0, 2 * WIDTH, 3 * WIDTH)
    assert store.match_prefix(5, 0, array(recent)) == 4
    store.check()


def test_two_computing_the_same_prefix_keep_one_findable_copy_and_go_on_publishing() -> None:
    store = KVStore(16, WIDTH, reuse=True)
    shared, longer = list(range(8)), list(range(12))
    store.reserve(2, 0, 0, 13)
    store.fork(2, 0, 1)
    first = publish_text(store, 1, shared)
    store.publish(2, 0, array(longer), 12)
    assert store.blocks(2, 0)[:2] == first
    assert store.blocks(2, 1) == store.blocks(2, 0)  # the choice that shared them changed over too
    assert store.num_held == 4
    store.free(1)
    assert store.match_prefix(3, 0, array([*longer, 1])) == 12
    store.check()


def test_writing_into_a_published_block_never_changes_what_is_found() -> None:
    store = KVStore(16, WIDTH, reuse=True)
    tokens = list(range(8))
    first, second = publish_text(store, 1, tokens)
    store.match_prefix(2, 0, array([*tokens, 8]))

    store.trim(1, 0, 6)
    assert store.blocks_needed(1, 0, 6, 7) == 1
    copies = store.reserve(1, 0, 6, 7)
    assert copies == [(second, store.blocks(1, 0)[1])]
    assert store.match_prefix(3, 0, array([*tokens, 8])) == 8

    store.free(1)
    store.free(3)
    store.trim(2, 0, 6)
    assert store.reserve(2, 0, 6, 7) == []  # nobody else holds it: no longer findable, written in place
    assert store.blocks(2, 0) == [first, second]
    assert store.match_prefix(4, 0, array([*tokens, 8])) == 4
    store.check()


def test_a_published_block_with_a_cached_child_is_copied_even_in_a_full_store() -> None:
    store = KVStore(3, WIDTH, reuse=True)
    blocks = publish_text(store, 1, list(range(12)))
    store.trim(1, 0, 7)  # the third block is cached, a child of the second
    assert store.num_free == 1
    assert store.reserve(1, 0, 7, 8) == [(blocks[1], blocks[2])]
    store.check()


def test_the_only_holder_of_a_full_store_can_write_again_from_its_start() -> None:
    store = KVStore(3, WIDTH, reuse=True)
    blocks = publish_text(store, 1, list(range(12)))
    assert store.num_free == 0
    assert store.blocks_needed(1, 0, 0, 12) == 0
    assert store.reserve(1, 0, 0, 12) == []
    assert store.blocks(1, 0) == blocks
    store.check()


def test_without_reuse_publish_and_match_do_nothing() -> None:
    store = KVStore(8, WIDTH)
    tokens = list(range(9))
    publish_text(store, 1, tokens)
    assert store.match_prefix(2, 0, array(tokens)) == 0
    assert store.free(1) == 3
    assert store.num_cached == 0
    store.check()


# Errors


def test_unknown_keys_are_key_errors_that_name_them() -> None:
    store = KVStore(8, WIDTH, reuse=True)
    store.reserve(5, 0, 0, 1)
    for verb in (
        lambda: store.trim(5, 3, 0),
        lambda: store.fork(5, 3, 4),
        lambda: store.blocks(5, 3),
        lambda: store.publish(5, 3, array([1]), 0),
        lambda: layout(store, (5, 3, 0, 1)),
    ):
        with pytest.raises(KeyError, match="sequence 5, choice 3"):
            verb()
    store.check()


def test_bad_arguments_are_errors_that_change_nothing() -> None:
    store = KVStore(8, WIDTH, reuse=True)
    tokens = array(list(range(5)))
    store.reserve(5, 0, 0, 5)
    store.fork(5, 0, 1)
    for verb in (
        lambda: store.reserve(5, 0, 6, 7),
        lambda: store.reserve(5, 0, -1, 7),
        lambda: store.reserve(5, 0, 5, 4),
        lambda: store.blocks_needed(6, 0, 1, 2),
        lambda: store.trim(5, 0, 6),
        lambda: store.trim(5, 0, -1),
        lambda: store.fork(5, 0, 1),
        lambda: store.publish(5, 0, tokens, 6),
        lambda: store.match_prefix(5, 0, tokens),
        lambda: store.match_prefix(6, 0, tokens.astype(np.float32)),
        lambda: store.match_prefix(6, 0, tokens[::2]),
        lambda: store.layout(np.array([5], "u8"), np.array([0, 1], "u4"), np.array([0]), np.array([0])),
        lambda: KVStore(0, WIDTH),
        lambda: KVStore(1, 2**31),
    ):
        with pytest.raises(ValueError, match=r"."):
            verb()
    for start, count in ((0, 6), (5, 1), (-1, 1), (2**62, 2**62), (0, -1)):
        with pytest.raises(IndexError, match=r"sequence 5, choice 0: .* 5 cells"):
            layout(store, (5, 0, start, count))
    with pytest.raises(TypeError):
        store.layout(np.array([5], "i8"), np.array([0], "u4"), np.array([0]), np.array([0]))
    assert store.reserve(5, 0, 5, 2**63 - 1) is None
    assert store.live() == [5]
    assert store.num_held == 2
    store.check()


def test_tokens_that_contradict_a_shared_published_block_are_refused() -> None:
    store = KVStore(8, WIDTH, reuse=True)
    store.reserve(1, 0, 0, WIDTH)
    store.fork(1, 0, 1)
    store.publish(1, 0, array([1] * WIDTH), WIDTH)
    with pytest.raises(ValueError, match=r"sequence 1, choice 1: .*block 0"):
        store.publish(1, 1, array([2] * WIDTH), WIDTH)
    store.check()


# Random verbs


class StoreMachine(RuleBasedStateMachine):
    """Random verbs against a model: the tokens of each key, and what every cell holds."""

    sequences = st.integers(0, 2)
    choices = st.integers(0, 1)
    picks = st.integers(0, 5)
    # Mostly one whole block of the same tokens after the other: equal beginnings are common.
    pieces = st.sampled_from([[0] * WIDTH, [0] * WIDTH, [1] * WIDTH, [0], [1, 0]])
    texts = st.lists(pieces, min_size=1, max_size=4).map(lambda drawn: [*chain.from_iterable(drawn)])

    @initialize(
        num_blocks=st.integers(4, 24),
        reuse=st.sampled_from([True, True, True, False]),
        first=st.tuples(texts, texts, texts),
    )
    def start(self, num_blocks: int, reuse: bool, first: tuple[list[int], ...]) -> None:
        self.store = KVStore(num_blocks, WIDTH, reuse)
        self.cells = np.zeros((num_blocks, WIDTH), np.int64)
        self.texts_by_key: dict[Key, list[int]] = {}
        self.published_by_key: dict[Key, int] = {}
        self.contents: dict[tuple[int, ...], int] = {}
        self.ever_published: set[tuple[int, ...]] = set()
        # Hypothesis leaves some rules out of some runs; there is always something to work on.
        for sequence, tokens in enumerate(first):
            self.begin((sequence, 0), tokens)

    def live_key(self, pick: int) -> Key | None:
        keys = sorted(self.texts_by_key)
        return keys[pick % len(keys)] if keys else None

    def content(self, prefix: list[int]) -> int:
        return self.contents.setdefault(tuple(prefix), len(self.contents) + 1)

    def compute(self, key: Key, tokens: list[int], start: int) -> bool:
        """Reserve, copy and write as a step does; False when the store refuses, which changes nothing."""
        store = self.store
        needed, free = store.blocks_needed(*key, start, len(tokens)), store.num_free
        copies = store.reserve(*key, start, len(tokens))
        assert (copies is None) == (needed > free)
        if copies is None:
            assert store.num_free == free
            return False
        assert store.num_free >= free - needed
        for source, destination in copies:
            self.cells[destination] = self.cells[source]
        cells, _ = layout(store, (*key, start, len(tokens) - start))
        for position, cell in enumerate(cells, start):
            self.cells.flat[cell] = self.content(tokens[: position + 1])
        self.texts_by_key[key] = tokens
        self.published_by_key[key] = min(self.published_by_key.get(key, 0), start // WIDTH * WIDTH)
        return True

    def findable_bounds(self, tokens: list[int]) -> Iterator[int]:
        """Lengths of beginnings of tokens that live keys have published: held, so never evicted."""
        for key, published in self.published_by_key.items():
            for end in range(WIDTH, min(published, len(tokens) - 1) + 1, WIDTH):
                if self.texts_by_key[key][:end] == tokens[:end]:
                    yield end

    @rule(sequence=sequences, choice=choices, tokens=texts, rewind=st.just(0) | st.integers(0, 2 * WIDTH))
    def run_tokens(self, sequence: int, choice: int, tokens: list[int], rewind: int) -> None:
        """Begin the key with these tokens, or go on with them, some of its own written over."""
        key = (sequence, choice)
        if key in self.texts_by_key:
            start = max(0, len(self.texts_by_key[key]) - rewind)
            self.compute(key, self.texts_by_key[key][:start] + tokens, start)
        else:
            self.begin(key, tokens)

    def begin(self, key: Key, tokens: list[int]) -> None:
        found = self.store.match_prefix(*key, array(tokens))
        assert found == 0 or tuple(tokens[:found]) in self.ever_published
        assert max(self.findable_bounds(tokens), default=0) <= found < len(tokens)
        self.published_by_key[key] = found
        if not self.compute(key, tokens, found):
            self.store.drop(*key)
            del self.published_by_key[key]

    @rule(pick=picks, fewer=st.integers(0, 2 * WIDTH))
    def trim(self, pick: int, fewer: int) -> None:
        if not (key := self.live_key(pick)):
            return
        length = max(0, len(self.texts_by_key[key]) - fewer)
        self.store.trim(*key, length)
        self.texts_by_key[key] = self.texts_by_key[key][:length]
        self.published_by_key[key] = min(self.published_by_key[key], length // WIDTH * WIDTH)

    @rule(pick=picks, destination=choices)
    def fork(self, pick: int, destination: int) -> None:
        key = self.live_key(pick)
        if not key or key[1] == destination:
            return
        sequence, source = key
        self.end(sequence, destination)
        self.store.fork(sequence, source, destination)
        self.texts_by_key[sequence, destination] = self.texts_by_key[sequence, source]
        self.published_by_key[sequence, destination] = self.published_by_key[sequence, source]

    @rule(pick=picks, uncomputed=st.just(0) | st.integers(0, WIDTH))
    def publish(self, pick: int, uncomputed: int) -> None:
        if not (key := self.live_key(pick)):
            return
        tokens = self.texts_by_key[key]
        computed = max(0, len(tokens) - uncomputed)
        self.store.publish(*key, array(tokens), computed)
        if self.store.reuse:
            full = computed // WIDTH * WIDTH
            self.published_by_key[key] = max(self.published_by_key[key], full)
            self.ever_published.update(tuple(tokens[:end]) for end in range(WIDTH, full + 1, WIDTH))

    @rule(sequence=sequences, choice=st.none() | choices)
    def end(self, sequence: int, choice: int | None) -> None:
        free = self.store.num_free
        given_back = self.store.free(sequence) if choice is None else self.store.drop(sequence, choice)
        assert self.store.num_free == free + given_back
        for key in [key for key in self.texts_by_key if key[0] == sequence and choice in (None, key[1])]:
            del self.texts_by_key[key], self.published_by_key[key]

    @invariant()
    def holds_together(self) -> None:
        store = self.store
        store.check()
        keys = sorted(self.texts_by_key)
        assert store.live() == sorted({sequence for sequence, _ in keys})
        tables = [store.blocks(*key) for key in keys]
        assert store.num_held == len({block for table in tables for block in table})
        assert store.num_free + store.num_held == store.num_blocks
        if not keys:
            return
        cells, padded = layout(store, *((*key, 0, len(self.texts_by_key[key])) for key in keys))
        texts = [self.texts_by_key[key] for key in keys]
        expected = [self.content(text[: i + 1]) for text in texts for i in range(len(text))]
        assert self.cells.flat[cells].tolist() == expected
        for key, table, row in zip(keys, tables, padded, strict=True):
            covering = -(-len(self.texts_by_key[key]) // WIDTH)
            assert row == table[:covering] + [0] * (len(row) - covering)


StoreMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestRandomVerbs = StoreMachine.TestCase


def test_random_verbs_under_sanitizers_also_with_a_hash_that_always_collides(tmp_path: Path) -> None:
    """The C++ driver: memory errors, undefined behaviour, and collisions, which Python cannot provoke."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    sources = Path(__file__).parents[1] / "cpp_ext"
    program = tmp_path / "kv_store_fuzz"
    files = [sources / name for name in ("tests/kv_store_fuzz.cpp", "kv_store.cpp", "block_pool.cpp")]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, "-std=c++20", "-O1", "-g", *sanitize, *files, "-o", program], check=True)
    done = subprocess.run([program, "5000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "every hash collides: 5000 verbs" in done.stdout
