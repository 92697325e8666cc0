"""The engine: one step over new and in-flight sequences. Runs without Triton."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from triton_inflight.batch import Batch, build_batch
from triton_inflight.errors import RequestError
from triton_inflight.generation import Choice, Generation, Update
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.logprobs import PositionLogprobs, logprobs_of
from triton_inflight.planner import Plan, Planner, Run
from triton_inflight.prompts import prompt_text, prompt_tokens, sampling_params
from triton_inflight.protocol import GenerationRequest
from triton_inflight.runner import Runner
from triton_inflight.sampling import NO_TOKEN, sample
from triton_inflight.sampling_state import SamplingState
from triton_inflight.sequence import Sequence
from triton_inflight.stops import StopStrings
from triton_inflight.text import Detokenizer
from triton_inflight.trace import Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What a step did.

    Attributes:
        updates: one for every choice that got a token, finished or failed.
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
        log_plans: log every step's plan.

    Attributes:
        tracer: where to note every step, if anywhere.
    """

    tracer: Tracer | None = None

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
        log_plans: bool = False,
    ) -> None:
        self.store = store
        self.max_seq_len = max_seq_len
        self._limit_remedy = limit_remedy
        self._log_plans = log_plans
        self._runner = runner
        self._tokenizer = tokenizer
        self._tensors = tensors
        self._planner = planner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._live: dict[int, Generation] = {}
        self._arrivals = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._live

    def __len__(self) -> int:
        """Number of live sequences."""
        return len(self._live)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def waiting(self) -> list[int]:
        """IDs of the live sequences that hold no blocks: new or preempted, in the order of arrival."""
        return [i for i, live in self._live.items() if not any(s.num_computed for s in live.sequences)]

    def add(self, sequence_id: int, request: GenerationRequest) -> int:
        """Take in a new sequence; it holds no blocks until a step runs it.

        Returns:
            The number of tokens of its prompt.

        Raises:
            RequestError: the prompt is empty or leaves no room for output, a token id is not in the vocabulary,
                or there are more choices than may run at a time.
        """
        assert sequence_id not in self._live, sequence_id
        tokens = prompt_tokens(
            request,
            self._tokenizer,
            self._runner.vocabulary_size,
            max_tokens=self.max_seq_len - 1,
            remedy=f"prompt and output have to fit into {self.max_seq_len} tokens; {self._limit_remedy}",
        )
        if request.best_of > self._planner.max_running_sequences:
            raise RequestError(
                f"n or best_of is {request.best_of}; at most {self._planner.max_running_sequences} choices can run at "
                "a time (max_running_sequences in config.pbtxt)"
            )
        sequence = Sequence(
            sequence_id,
            tokens,
            limit=min(len(tokens) + request.max_tokens, self.max_seq_len),
            order=self._arrivals,
            priority=request.request_priority,
            num_forks=request.best_of - 1,
            # Log probabilities of a prompt are those of its rows, so all of them have to run.
            reuses_prefix=request.sampling.prompt_logprobs is None,
        )
        params = sampling_params(request, self._tokenizer, self._runner.vocabulary_size)
        choice = Choice(
            sequence,
            SamplingState(params, tokens, self._eos_token_ids),
            Detokenizer(self._tokenizer, tokens, skip_special_tokens=request.skip_special_tokens),
            StopStrings(request.stop, include=request.include_stop_str_in_output),
            keeps_stop=request.include_stop_str_in_output,
            echo="" if request.exclude_input_in_output else prompt_text(request, tokens, self._tokenizer),
        )
        self._arrivals += 1
        self._live[sequence_id] = Generation(request, {0: choice})
        return len(tokens)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence and give its blocks back; unknown IDs are no error."""
        was_live = self._live.pop(sequence_id, None) is not None
        self.store.free(sequence_id)
        if was_live and self.tracer is not None:
            self.tracer.dropped(sequence_id, len(self._live))

    def finish(self, sequence_id: int, reason: str) -> list[Update]:
        """End a live sequence early, for a reason of the caller's; what was held back is in the updates."""
        updates = [choice.end(reason) for choice in self._live[sequence_id].choices.values()]
        self.drop(sequence_id)
        return updates

    def step(self, sequence_ids: Iterable[int]) -> Step:
        """Plan, batch, run, sample, commit: one forward pass over the given live sequences.

        A sequence that got no tokens in the plan has no update and waits for a later step.
        """
        began = time.perf_counter()
        offered = [s for sequence_id in sequence_ids for s in self._live[sequence_id].sequences]
        plan = self._planner.plan(offered, [s for live in self._live.values() for s in live.sequences])
        if self._log_plans:
            log.info("plan: %s", plan.explain(offered))
        if self.tracer is not None:
            self.tracer.step_begins(began, plan, len(self._live))
        if not plan.runs:
            return Step([], num_preempted=len(plan.preempted))
        decodes = sum(run.sequence.num_output > 0 and run.sequence.num_pending == 1 for run in plan.runs)
        started = time.perf_counter()
        try:
            updates = self._forward(plan)
        except Exception as error:
            log.exception("a step failed; its %d sequences end with an error", len(plan.runs))
            updates = [self._fail(i, error) for i in {run.sequence.sequence_id for run in plan.runs}]
        if self.tracer is not None:
            self.tracer.step_ends(updates, len(self._live))
        forward_seconds = time.perf_counter() - started
        prefills = sum(run.count for run in plan.runs) - decodes
        self._planner.observe(forward_seconds, decodes, prefills)
        return Step(
            updates,
            num_sequences=len(plan.runs),
            num_prefill_tokens=prefills,
            num_decode_tokens=decodes,
            num_preempted=len(plan.preempted),
            num_prefix_hit_tokens=plan.num_prefix_hit_tokens,
            forward_seconds=forward_seconds,
        )

    def _forward(self, plan: Plan) -> list[Update]:
        """Run the plan; where memory does not suffice, in two parts."""
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
        return [update for part in parts for update in self._run(part)]

    def _run(self, runs: list[Run]) -> list[Update]:
        """One forward pass; the next token of every choice that has no more tokens pending."""
        batch = build_batch(runs, self.store, self._runner.device)
        asking = [i for i, run in enumerate(runs) if self._wants_prompt_logprobs(run)]
        if asking:
            logits = self._run_with_prompt_logprobs(runs, batch, asking)
        else:
            logits = self._runner.run(batch, self._tensors)
        for run in runs:
            run.sequence.advance(run.count)
            self._publish(run)
        rows, choices = self._sampled(batch)
        if len(rows) != len(logits):  # several choices are sampled from the last row of one prompt
            logits = logits[rows]
        tokens = sample(logits, [choice.sampling for choice in choices])
        asked = [choice.sampling.params.logprobs for choice in choices]
        logprobs: Rows[PositionLogprobs | None] = [None] * len(tokens)
        if any(count is not None for count in asked):
            logprobs = logprobs_of(logits, tokens, asked)
        return [self._commit(*taken) for taken in zip(choices, tokens, logprobs, strict=True)]

    def _sampled(self, batch: Batch) -> tuple[list[int], list[Choice]]:
        """The choices that get a token, each with its row of the logits; a computed prompt is forked here."""
        rows, choices = [], []
        for row, sequence in enumerate(batch.sampled):
            live = self._live[sequence.sequence_id]
            chosen = [live.choices[sequence.choice]]
            if sequence.num_forks:
                chosen += [self._fork(live, number) for number in range(1, sequence.num_forks + 1)]
                sequence.num_forks = 0
            rows += [row] * len(chosen)
            choices += chosen
        return rows, choices

    def _fork(self, live: Generation, number: int) -> Choice:
        """A further choice, which shares the blocks of the prompt with the first one."""
        first = live.choices[0]
        prompt = first.sequence
        self.store.fork(prompt.sequence_id, 0, number)
        sequence = Sequence(
            prompt.sequence_id,
            list(prompt.tokens),
            prompt.limit,
            number,
            order=prompt.order,
            priority=prompt.priority,
        )
        sequence.advance(prompt.num_computed)
        live.choices[number] = Choice(
            sequence,
            first.sampling.fork(number),
            Detokenizer(self._tokenizer, prompt.tokens, skip_special_tokens=live.request.skip_special_tokens),
            StopStrings(live.request.stop, include=live.request.include_stop_str_in_output),
            first.keeps_stop,
            first.echo,
        )
        return live.choices[number]

    def _wants_prompt_logprobs(self, run: Run) -> bool:
        live = self._live[run.sequence.sequence_id]
        done = len(live.prompt_logprobs)
        return (
            live.request.sampling.prompt_logprobs is not None
            and run.sequence.choice == 0
            and run.sequence.num_computed <= done < run.sequence.num_prompt - 1
        )

    def _run_with_prompt_logprobs(self, runs: list[Run], batch: Batch, asking: list[int]) -> torch.Tensor:
        """A forward pass that also gives the log probabilities of prompt tokens; the logits of the last rows."""
        spans = [torch.arange(batch.starts[i], batch.starts[i + 1]) for i in asking]
        extra = torch.cat(spans).to(self._runner.device)
        logits = self._runner.run_rows(batch, self._tensors, torch.cat([batch.last_rows, extra]))
        last = len(batch.last_rows)
        for i, part in zip(asking, torch.split(logits[last:], [len(span) for span in spans]), strict=True):
            sequence, live = runs[i].sequence, self._live[runs[i].sequence.sequence_id]
            skip = len(live.prompt_logprobs) - sequence.num_computed  # known from before a preemption
            following = sequence.tokens[sequence.num_computed + 1 + skip : sequence.num_prompt][
                : len(part) - skip
            ]
            count = live.request.sampling.prompt_logprobs
            live.prompt_logprobs += logprobs_of(
                part[skip : skip + len(following)], following, [count] * len(following)
            )
        return logits[:last]

    def _publish(self, run: Run) -> None:
        """Make the full blocks of a prompt findable once they are computed."""
        sequence = run.sequence
        if sequence.num_computed - run.count < sequence.num_prompt:
            prompt = np.asarray(sequence.tokens[: sequence.num_prompt], dtype=np.int64)
            self.store.publish(sequence.sequence_id, sequence.choice, prompt, sequence.num_computed)

    def _commit(self, choice: Choice, token: int, logprobs: PositionLogprobs | None) -> Update:
        """Give a choice its token, and forget the choice if that was its last one."""
        sequence_id, number = choice.sequence.sequence_id, choice.sequence.choice
        live = self._live.get(sequence_id)
        if live is None:  # another choice of it failed in this step
            return Update(sequence_id, number, finish_reason="error", error="another choice failed")
        first = choice.sequence.num_output == 0
        try:
            if token == NO_TOKEN:
                raise ValueError("no token can follow: the scores are not numbers, or every token is banned")
            update = choice.take(token, logprobs)
        except Exception as error:
            log.exception("sequence %d ends with an error", sequence_id)
            return self._fail(sequence_id, error)
        if first and live.request.sampling.prompt_logprobs is not None:
            update = dataclasses.replace(update, prompt_logprobs=(None, *live.prompt_logprobs))
        if update.finish_reason is not None:
            self.store.drop(sequence_id, number)
            del live.choices[number]
            if not live.choices:
                self.drop(sequence_id)
        return update

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
