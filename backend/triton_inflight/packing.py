"""Faster modules for a model on the CPU: weights packed once, and several operations in one call.

The model's code stays as it is. Modules are found by their structure, never by the name of a model, and each is
replaced only if its stand-in computes the same on random input:

* linear layers, by ones over packed weights; the output layer gives float32 logits;
* three linear layers named q_proj, k_proj and v_proj, by one that computes them together;
* a module of gate_proj, up_proj, down_proj and SiLU, by one call;
* an RMSNorm, by one call;
* a decoder layer whose code is known, by one call before its attention and one after it;
* all layers of a model whose code is known, by one call;
* ``apply_rotary_pos_emb``, by one call: the module that uses it gets a forward of the same code over other
  globals, so no other model in the process sees it.

What the packed model says as a whole is compared as well; if it differs, everything is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from triton_inflight.differences import (
    COUPLING_TOLERANCE,
    MODEL_TOLERANCE,
    MODULE_TOLERANCE,
    QUANTIZED_MODEL_TOLERANCE,
    READY_MODEL_TOLERANCE,
    ROUNDED_INPUT_TOLERANCE,
    relative_maximum,
    relative_rms,
)
from triton_inflight.errors import ModelError
from triton_inflight.packed_weight import PackedWeight
from triton_inflight.packer import Packer
from triton_inflight.ready_weights import ReadyWeights
from triton_inflight.weight_formats import WeightFormats

log = logging.getLogger(__name__)


class Packed(NamedTuple):
    """What ``pack`` did.

    Attributes:
        num_modules: modules with a stand-in; 0 if the model is served as it was.
        weight_bytes: memory of packed weights.
        difference: of the logits, see ``MODEL_TOLERANCE``.
        num_quantized: packed weights of whole numbers, of one layer or several in one.
        weights: the packed weights, by the places of what holds them.
    """

    num_modules: int
    weight_bytes: int
    difference: float
    num_quantized: int = 0
    weights: Mapping[str, Sequence[PackedWeight]] = MappingProxyType({})


Logits = Callable[[bool], torch.Tensor]
"""Runs the model; (tokens, vocabulary) of some sequences, which share steps if it is told so."""


def pack(model: PreTrainedModel, logits: Logits, formats: WeightFormats | None = None) -> Packed:
    """Replace what can be replaced in a model that lives on the CPU; elsewhere, nothing.

    Args:
        model: in eval mode, and not trained any more. Weights that are packed are freed.
        logits: of the model.
        formats: of the packed weights, by default those that the model has.

    Returns:
        What was done.

    Raises:
        ModelError: the formats are quantised ones, and the model cannot be served with them: it has no layer for
            them, its logits fall apart, or they depend on who shares a step. The model is then of no further use.
    """
    formats = formats or WeightFormats()
    if model.device.type != "cpu" or model.dtype not in MODULE_TOLERANCE:
        return Packed(0, 0, 0.0)
    if formats.quantization != "none":
        return _quantize(model, logits, formats)
    before = logits(True)
    packer = Packer(model, formats)
    try:
        packer.run()
        difference = relative_rms(logits(True), before)
        reason = f"its logits then differ by {difference:.1e}"
    except Exception as error:
        log.debug("packing failed", exc_info=True)
        difference, reason = float("nan"), f"{type(error).__name__}: {error}"
    if not difference <= MODEL_TOLERANCE[model.dtype]:
        packer.undo()
        log.warning("%s is served without packed weights, so slower: %s", type(model).__name__, reason)
        return Packed(0, 0, difference)
    return _done(packer, difference)


def _quantize(model: PreTrainedModel, logits: Logits, formats: WeightFormats) -> Packed:
    """As ``pack``, with weights of whole numbers; what was asked for is done or refused, never left out.

    Whole numbers say something else than the floats they stand for, so two things are looked at. What the model's
    own code says with the numbers' values, beside what it said: that is the cost of the numbers. And what the
    stand-ins say beside that: they round their inputs, and else compute the same, or a kernel is wrong.
    """
    before = logits(True)
    packer = Packer(model, formats)
    try:
        packer.run()
        with packer.undone():
            stock, alone = logits(True), logits(False)
        ours, ours_alone = logits(True), logits(False)
    except Exception as error:
        raise _cannot_be_quantized(model, formats, f"{type(error).__name__}: {error}") from error
    loss, allowed = relative_rms(stock, before), QUANTIZED_MODEL_TOLERANCE[formats.quantization]
    rounding = relative_rms(ours, stock)
    coupling = relative_maximum(ours_alone, ours)
    # Parts of the model that are not replaced may have given a token other last bits in a batch before already.
    allowed_coupling = relative_maximum(alone, stock) + COUPLING_TOLERANCE
    reason = ""
    if packer.num_quantized == 0:
        reason = "it has no linear layers that could be, or each would lose too much"
    elif not loss <= allowed:
        reason = f"its logits then differ by {loss:.1e} of their root mean square (allowed: {allowed:.1e})"
    elif not rounding <= ROUNDED_INPUT_TOLERANCE:
        reason = (
            f"with inputs of 8 bits its logits differ by {rounding:.1e} of their root mean square from those of the "
            f"same weights in {model.dtype} (allowed: {ROUNDED_INPUT_TOLERANCE:.1e})"
        )
    elif not coupling <= allowed_coupling:
        reason = (
            f"the logits of a sequence then change by {coupling:.1e} of the largest with who shares its steps "
            f"(allowed: {allowed_coupling:.1e})"
        )
    if reason:
        raise _cannot_be_quantized(model, formats, reason)
    return _done(packer, relative_rms(ours, before))


def pack_ready(
    model: PreTrainedModel, logits: Logits, ready: ReadyWeights, before: torch.Tensor, difference: float
) -> Packed:
    """As ``pack``, with weights that it packed at an earlier load; the layers' own are not looked at.

    What was compared then need not be again, as long as weights, code and instruction set are those of then. What the
    model says as a whole is compared: with what it said then.

    Args:
        before: a sample of the logits, see ``sample``, of then.
        difference: what ``pack`` found.

    Raises:
        ValueError: the weights do not fit the model, or it says something else. It is then of no further use.
    """
    packer = Packer(model, WeightFormats(), ready)
    packer.run()
    if ready.left:
        raise ValueError(
            f"{len(ready.left)} packed weights have no place in the model, such as {ready.left[0]}"
        )
    change = relative_rms(sample(logits(True)), before)
    if not change <= READY_MODEL_TOLERANCE[model.dtype]:
        raise ValueError(
            f"the logits differ from those of then by {change:.1e} of their root mean square "
            f"(allowed: {READY_MODEL_TOLERANCE[model.dtype]:.1e})"
        )
    return _done(packer, difference)


def sample(logits: torch.Tensor) -> torch.Tensor:
    """Every eighth of the (tokens, vocabulary) logits; what comes before each of them has its part in it."""
    return logits[7::8].float()


def _done(packer: Packer, difference: float) -> Packed:
    return Packed(
        packer.num_changes,
        packer.weight_bytes,
        difference,
        packer.num_quantized,
        MappingProxyType(packer.weights),
    )


def _cannot_be_quantized(model: PreTrainedModel, formats: WeightFormats, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be served with quantization {formats.quantization}: {reason}; "
        f"set quantization to none in config.pbtxt, or delete it"
    )
