"""The runner: an unmodified transformers model over the flat batch of a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from triton_inflight.attention import use_paged_attention
from triton_inflight.batch import Batch, current_scope, step_scope
from triton_inflight.errors import ModelError
from triton_inflight.kv_tensors import KVTensors


class Runner:
    """Runs a causal language model over batches; the model's attention is switched to the paged one.

    Args:
        model: in eval mode; its weights stay as they are.

    Raises:
        ModelError: the model's ``forward`` takes no positions, so a flat batch cannot be described to it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        accepts_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "position_ids" not in parameters and not accepts_any:
            raise ModelError(
                f"{type(model).__name__} takes no position_ids, so tokens of several sequences cannot share "
                "its forward pass; serve a model family whose forward accepts them"
            )
        self.model = model
        self.device = model.device
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary_size: int = embeddings.weight.shape[0]
        self._selects_rows = "logits_to_keep" in parameters
        use_paged_attention(model)
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] == "embed_positions":
                module.register_forward_pre_hook(_give_positions, with_kwargs=True)

    def run(self, batch: Batch, tensors: KVTensors) -> torch.Tensor:
        """One forward pass: store the new keys and values, return the logits of ``batch.last_rows``.

        Returns:
            (S, vocabulary) float32 on the model's device.

        Raises:
            ModelError: the forward pass never called attention through transformers' interface.
        """
        return self.run_rows(batch, tensors, batch.last_rows)

    @torch.inference_mode()
    def run_rows(self, batch: Batch, tensors: KVTensors, rows: torch.Tensor) -> torch.Tensor:
        """As ``run``, for any (S,) int64 rows of the batch."""
        selection = {"logits_to_keep": rows} if self._selects_rows else {}
        with step_scope(batch, tensors) as scope:
            output = self.model(
                input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **selection
            )
        if scope.calls == 0:
            raise ModelError(
                f"{type(self.model).__name__} does not call attention through transformers' attention interface, "
                "so its keys and values cannot be kept by sequence; serve a model family that does "
                "(Llama, Mistral, Qwen, Gemma, Phi, GPT-2, OPT and most others)"
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._selects_rows else logits[rows]).float()


def _give_positions(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Some decoders count positions from 0 themselves; within a step they get those of the batch."""
    scope = current_scope()
    if scope is None or kwargs.get("position_ids") is None:
        return None
    given: torch.Tensor = kwargs["position_ids"]
    return args, {**kwargs, "position_ids": scope.batch.positions.reshape(given.shape)}
