"""Sequence: one generation, as tokens and three lengths."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """One choice of one generation: its tokens are its only truth; everything else can be recomputed.

    ``num_computed <= len(tokens) <= limit`` always holds. A sequence knows nothing of blocks: a preempted
    one merely has ``num_computed`` set back, and is recomputed by the rule that runs every other sequence.

    Attributes:
        sequence_id: Triton's correlation ID, an unsigned 64-bit integer.
        tokens: token ids, the prompt and then the output.
        num_prompt: how many of them are the prompt.
        limit: the most tokens it may ever hold (prompt and output).
        choice: which of the answers of this sequence ID it is; the store's key is (sequence_id, choice).
        order: arrival number; the smaller, the older.
        priority: larger goes first where sequences compete.
        num_forks: further choices that will be forked from it once its prompt is computed.
        reuses_prefix: take what the store has cached of its tokens, rather than compute all of them.
        num_computed: tokens whose keys and values are in the store.
        finish_reason: why it ended (``stop``, ``length``, ...); ``None`` while it is unfinished.
    """

    sequence_id: int
    tokens: list[int]
    limit: int
    choice: int = 0
    order: int = 0
    priority: int = 0
    num_forks: int = 0
    reuses_prefix: bool = True
    num_prompt: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        assert 0 < self.num_prompt <= self.limit, (self.num_prompt, self.limit)

    @property
    def num_pending(self) -> int:
        """Tokens that still have to run before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def advance(self, count: int) -> None:
        """Record that the keys and values of the next ``count`` tokens are now in the store."""
        self.num_computed += count
        assert self.num_computed <= len(self.tokens)

    def append(self, token: int) -> None:
        """Add the token sampled from the last row; every earlier token must have been computed."""
        assert self.num_pending == 0
        assert len(self.tokens) < self.limit
        self.tokens.append(token)

    def preempt(self) -> None:
        """Forget what was computed: the store took the blocks back."""
        self.num_computed = 0
