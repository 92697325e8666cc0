"""The conformance probe: is this model's output through the flat, paged path that of the stock model?

Several model families give silently wrong answers in a flat batch: their window hides in a mask, their state
is recurrent, their positions are their own. So nothing is served on trust. At load, in float32, two random
sequences run through the stock model, each alone and whole, and through the runner, in ragged pieces that
share steps; the logits of every token must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from triton_inflight.batch import build_batch
from triton_inflight.errors import ModelError
from triton_inflight.kv_shape import KVShape
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.planner import Run
from triton_inflight.runner import Runner
from triton_inflight.sequence import Sequence

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit of the stock model."""


class Conformance(NamedTuple):
    """What the probe found.

    Attributes:
        difference: largest relative difference of a logit.
        shapes: what each attention call of a forward pass stores per token.
    """

    difference: float
    shapes: tuple[KVShape, ...]


def probe(model: PreTrainedModel, tokens_per_block: int) -> Conformance:
    """Compare a model with itself run by the runner; the given model is left as it was.

    A float32 copy of the model is probed. Where two copies do not fit into half of the free memory, it is
    a copy of the model's code with random weights and few layers: the probe then still tells how this model
    treats flat batches, which depends on its code and configuration.

    Raises:
        ModelError: the difference is above the tolerance (the message gives it), or the model cannot run
            over flat batches at all.
    """
    subject = _float32_copy(model)
    with torch.inference_mode(), _shrunk_windows(subject, _window(tokens_per_block)):
        prompts = _prompts(subject, tokens_per_block)
        stock = [
            subject(input_ids=torch.tensor([p], device=subject.device), use_cache=False).logits[0].float()
            for p in prompts
        ]
        try:
            ours, shapes = _run_in_pieces(subject, prompts, tokens_per_block)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot run over flat batches: {type(error).__name__}: {error}"
            ) from error
    scale = max(float(logits.abs().max()) for logits in stock)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, stock, strict=True)) / scale
    if not difference <= TOLERANCE:  # NaN is refused as well
        raise ModelError(
            f"{type(model).__name__} is refused: run in ragged pieces, its logits differ from the stock model's "
            f"by {difference:.1e} of the largest (allowed: {TOLERANCE:.0e}), so its output would depend on "
            "batch mates and on how prompts are cut; serve a model family whose output can be reproduced"
        )
    return Conformance(difference, shapes)


@torch.inference_mode()
def logits_in_pieces(model: PreTrainedModel, tokens_per_block: int, shared: bool = True) -> torch.Tensor:
    """Logits of the probe's sequences, run in its ragged pieces by a model as it is, in its own type.

    Args:
        shared: whether pieces of both sequences share steps; else each has a step of its own.

    Returns:
        (tokens, vocabulary).
    """
    prompts = _prompts(model, tokens_per_block)
    return torch.cat(_run_in_pieces(model, prompts, tokens_per_block, shared)[0])


def _window(tokens_per_block: int) -> int:
    """What sliding windows are shrunk to."""
    return tokens_per_block // 2 + 1


def _prompts(model: PreTrainedModel, tokens_per_block: int) -> list[list[int]]:
    """Random tokens of unequal lengths; both cross a block edge and the window."""
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    lengths = (tokens_per_block + _window(tokens_per_block) + 3, 2 * tokens_per_block + 5)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _run_in_pieces(
    model: PreTrainedModel, prompts: list[list[int]], tokens_per_block: int, shared: bool = True
) -> tuple[list[torch.Tensor], tuple[KVShape, ...]]:
    """Logits of every token of two sequences that share steps, in pieces of changing size and order."""
    first, second = (Sequence(i + 1, prompt, limit=len(prompt)) for i, prompt in enumerate(prompts))
    edge = tokens_per_block - 1
    pieces = [
        [(first, edge)],
        [(second, edge + 4), (first, 1)],
        [(first, 1), (second, 1)],
        [(second, second.num_pending - edge - 5), (first, first.num_pending - edge - 2)],
    ]
    if not shared:
        pieces = [[part] for piece in pieces for part in piece]
    num_blocks = sum(-(-len(prompt) // tokens_per_block) for prompt in prompts) + 1
    store = KVStore(num_blocks, tokens_per_block)
    # Block 0 goes to a sequence that never runs, so that no table is right by being all zeros.
    store.reserve(99, 0, 0, 1)
    tensors = KVTensors(num_blocks, tokens_per_block, model.dtype, model.device)
    runner = Runner(model)
    rows: dict[Sequence, list[torch.Tensor]] = {first: [], second: []}
    for piece in pieces:
        for sequence, count in piece:
            store.reserve(sequence.sequence_id, 0, sequence.num_computed, sequence.num_computed + count)
        batch = build_batch([Run(*part) for part in piece], store, model.device)
        logits = runner.run_rows(batch, tensors, torch.arange(batch.tokens.shape[1], device=model.device))
        for (sequence, count), part in zip(piece, torch.split(logits, [n for _, n in piece]), strict=True):
            rows[sequence].append(part)
            sequence.advance(count)
    assert first.num_pending == second.num_pending == 0
    return [torch.cat(rows[first]), torch.cat(rows[second])], tensors.shapes


def _float32_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy of a model, or of its code alone where memory is short."""
    size = sum(p.numel() for p in model.parameters()) * 4
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    if 2 * size <= free // 2:
        # Each weight is converted rather than copied and then converted; tied ones stay tied.
        converted: dict[int, Any] = {
            id(p): torch.nn.Parameter(p.detach().to(torch.float32, copy=True), requires_grad=False)
            for p in model.parameters()
        }
        return _to(copy.deepcopy(model, converted), torch.float32)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(config.num_hidden_layers, _period(config))
    from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    small = from_config(config, dtype=torch.float32, attn_implementation="eager")
    small.train(False)
    return _to(small, model.device)


def _to(model: PreTrainedModel, where: torch.dtype | torch.device) -> PreTrainedModel:
    to: Any = model.to  # transformers' annotation of its own wrapper is wrong
    moved: PreTrainedModel = to(where)
    return moved


def _period(config: PreTrainedConfig) -> int:
    """How many layers it takes to meet every type of layer twice, or once if the second is far."""
    types: list[str] | None = getattr(config, "layer_types", None)
    if not types:
        return 2
    firsts = [types.index(kind) + 1 for kind in set(types)]
    return max(2, *firsts)


@contextmanager
def _shrunk_windows(model: PreTrainedModel, window: int) -> Iterator[None]:
    """Make every sliding window small enough for a short probe to cross it, in the config and in the modules."""
    holders: list[Any] = [model.config, *model.modules()]
    found = [h for h in holders if type(getattr(h, "sliding_window", None)) is int]
    before = [h.sliding_window for h in found]
    for holder in found:
        holder.sliding_window = min(holder.sliding_window, window)
    try:
        yield
    finally:
        for holder, value in zip(found, before, strict=True):
            holder.sliding_window = value
