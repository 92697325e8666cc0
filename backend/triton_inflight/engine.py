"""The engine: one step over new and in-flight sequences. Runs without Triton."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from triton_inflight.batch import build_batch
from triton_inflight.errors import RequestError
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.planner import Plan, Planner, Run
from triton_inflight.protocol import GenerationRequest
from triton_inflight.runner import Runner
from triton_inflight.sampling import sample
from triton_inflight.sequence import Sequence
from triton_inflight.text import Detokenizer, encode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What a step did for one sequence.

    Attributes:
        sequence_id: whose it is.
        text: what can be shown of the new output, possibly nothing yet.
        tokens: output tokens generated in this step.
        finish_reason: ``stop``, ``length``, or ``error``; None while the sequence is unfinished.
        error: what went wrong, where the reason is ``error``.
    """

    sequence_id: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """What a step did.

    Attributes:
        updates: one for every sequence that got a token, finished or failed.
        num_sequences: sequences in the forward pass.
        num_prefill_tokens: tokens of prompts, and of outputs that are computed again after a preemption.
        num_decode_tokens: tokens of sequences that run their newest token only.
        num_preempted: sequences that gave their blocks back.
        num_prefix_hit_tokens: tokens of prompts that were found in the store and did not run.
        forward_seconds: duration of the forward pass.
    """

    updates: list[Update]
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preempted: int = 0
    num_prefix_hit_tokens: int = 0
    forward_seconds: float = 0.0


@dataclass
class _Generation:
    """A live sequence and the text it turns into."""

    sequence: Sequence
    detokenizer: Detokenizer


class Engine:
    """Generates for many sequences at once over one model and one KV-state store.

    Args:
        runner: runs the model.
        tokenizer: the model's.
        store, tensors: the KV-state store and what it indexes.
        planner: plans over the same store.
        eos_token_ids: tokens that end a generation.
        max_seq_len: most tokens of a sequence, prompt and output.
        limit_remedy: what sets ``max_seq_len``, for the error of a prompt that is too long.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: PreTrainedTokenizerBase,
        store: KVStore,
        tensors: KVTensors,
        planner: Planner,
        eos_token_ids: Iterable[int],
        max_seq_len: int,
        limit_remedy: str = "max_seq_len in config.pbtxt bounds them",
    ) -> None:
        self.store = store
        self.max_seq_len = max_seq_len
        self._limit_remedy = limit_remedy
        self._runner = runner
        self._tokenizer = tokenizer
        self._tensors = tensors
        self._planner = planner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._live: dict[int, _Generation] = {}
        self._arrivals = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._live

    def __len__(self) -> int:
        """Number of live sequences."""
        return len(self._live)

    @property
    def num_active(self) -> int:
        """Number of live sequences that hold blocks."""
        return len(self) - len(self.waiting())

    def waiting(self) -> list[int]:
        """IDs of the live sequences that hold no blocks: new or preempted, in the order of arrival."""
        return [i for i, generation in self._live.items() if generation.sequence.num_computed == 0]

    def add(self, sequence_id: int, request: GenerationRequest) -> int:
        """Take in a new sequence; it holds no blocks until a step runs it.

        Returns:
            The number of tokens of its prompt.

        Raises:
            RequestError: the prompt is empty or leaves no room for output.
        """
        assert sequence_id not in self._live, sequence_id
        tokens = encode(self._tokenizer, request.text_input)
        if len(tokens) >= self.max_seq_len:
            raise RequestError(
                f"text_input is {len(tokens)} tokens long; this model takes at most {self.max_seq_len - 1}, so that "
                f"prompt and output fit into {self.max_seq_len} tokens: {self._limit_remedy}"
            )
        sequence = Sequence(
            sequence_id,
            tokens,
            limit=min(len(tokens) + request.max_tokens, self.max_seq_len),
            order=self._arrivals,
            priority=request.request_priority,
        )
        self._arrivals += 1
        self._live[sequence_id] = _Generation(sequence, Detokenizer(self._tokenizer, tokens))
        return len(tokens)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence and give its blocks back; unknown IDs are no error."""
        self._live.pop(sequence_id, None)
        self.store.free(sequence_id)

    def finish(self, sequence_id: int, reason: str) -> Update:
        """End a live sequence early, for a reason of the caller's; its last text is in the update."""
        text = self._live[sequence_id].detokenizer.flush()
        self.drop(sequence_id)
        return Update(sequence_id, text, finish_reason=reason)

    def step(self, sequence_ids: Iterable[int]) -> Step:
        """Plan, batch, run, sample, commit: one forward pass over the given live sequences.

        A sequence that got no tokens in the plan has no update and waits for a later step.
        """
        offered = [self._live[sequence_id].sequence for sequence_id in sequence_ids]
        plan = self._planner.plan(offered, (g.sequence for g in self._live.values()))
        if not plan.runs:
            return Step([], num_preempted=len(plan.preempted))
        decodes = sum(run.sequence.num_output > 0 and run.sequence.num_pending == 1 for run in plan.runs)
        started = time.perf_counter()
        try:
            tokens = self._forward(plan)
        except Exception as error:
            log.exception("a step failed; its %d sequences end with an error", len(plan.runs))
            updates = [self._fail(run.sequence.sequence_id, error) for run in plan.runs]
        else:
            updates = [self._commit(sequence, token) for sequence, token in tokens]
        return Step(
            updates,
            num_sequences=len(plan.runs),
            num_prefill_tokens=sum(run.count for run in plan.runs) - decodes,
            num_decode_tokens=decodes,
            num_preempted=len(plan.preempted),
            num_prefix_hit_tokens=plan.num_prefix_hit_tokens,
            forward_seconds=time.perf_counter() - started,
        )

    def _forward(self, plan: Plan) -> list[tuple[Sequence, int]]:
        """Run the plan; the next token of each sequence that has no more tokens pending."""
        self._tensors.copy_blocks(plan.copies)
        try:
            return self._run(plan.runs)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            parts = _halves(plan.runs)
            log.warning(
                "out of memory in a step of %d sequences; again in two parts: %s", len(plan.runs), error
            )
        return [pair for part in parts for pair in self._run(part)]

    def _run(self, runs: list[Run]) -> list[tuple[Sequence, int]]:
        batch = build_batch(runs, self.store, self._runner.device)
        tokens = sample(self._runner.run(batch, self._tensors))
        for run in runs:
            run.sequence.advance(run.count)
            self._publish(run)
        return list(zip(batch.sampled, tokens, strict=True))

    def _publish(self, run: Run) -> None:
        """Make the full blocks of a prompt findable once they are computed."""
        sequence = run.sequence
        if sequence.num_computed - run.count < sequence.num_prompt:
            prompt = np.asarray(sequence.tokens[: sequence.num_prompt], dtype=np.int64)
            self.store.publish(sequence.sequence_id, sequence.choice, prompt, sequence.num_computed)

    def _commit(self, sequence: Sequence, token: int) -> Update:
        """Append a sampled token, turn it into text, and end the sequence if that was the last one."""
        try:
            sequence.append(token)
            detokenizer = self._live[sequence.sequence_id].detokenizer
            if token in self._eos_token_ids:
                sequence.finish_reason = "stop"
                text = detokenizer.flush()
            else:
                text = detokenizer.push(token)
                if len(sequence.tokens) == sequence.limit:
                    sequence.finish_reason = "length"
                    text += detokenizer.flush()
        except Exception as error:
            log.exception("sequence %d ends with an error", sequence.sequence_id)
            return self._fail(sequence.sequence_id, error)
        if sequence.finish_reason is not None:
            self.drop(sequence.sequence_id)
        return Update(sequence.sequence_id, text, (token,), sequence.finish_reason)

    def _fail(self, sequence_id: int, error: Exception) -> Update:
        self.drop(sequence_id)
        return Update(sequence_id, finish_reason="error", error=f"{type(error).__name__}: {error}")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch's CPU allocator says so in the message alone."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def _halves(runs: list[Run]) -> list[list[Run]]:
    """A step's runs in two parts; of a single run the first half of its tokens, the rest is for a later step."""
    if len(runs) == 1:
        return [[Run(runs[0].sequence, -(-runs[0].count // 2))]]
    middle = len(runs) // 2
    return [runs[:middle], runs[middle:]]
