"""A model that is ready to be served on this machine: loaded, found to be reproducible, packed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from triton_inflight import weights
from triton_inflight.conformance import Conformance, logits_in_pieces, probe
from triton_inflight.errors import ModelError
from triton_inflight.gguf_numbers import GGUFNumbers
from triton_inflight.packed_cache import Entry, PackedCache, parameters_of
from triton_inflight.packing import Logits, Packed, pack, pack_ready, sample
from triton_inflight.phases import Phases
from triton_inflight.rope import freeze_rope
from triton_inflight.settings import Settings
from triton_inflight.weight_formats import WeightFormats
from triton_inflight.weights import ModelSource

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A model to be served.

    Attributes:
        conformance: what the probe found, now or when the model's packed weights were kept.
        max_seq_len: the longest sequence that it can be given, in tokens.
        is_from_cache: its packed weights are those of an earlier load.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    conformance: Conformance
    packed: Packed
    max_seq_len: int
    is_from_cache: bool


def prepare(settings: Settings, base: Path | None, phases: Phases) -> Prepared:
    """Load a model, prove that it can be reproduced, and pack its weights; or take what was kept of that.

    Args:
        settings: the model's.
        base: directory that relative model references start from.
        phases: told what is being done.

    Raises:
        ModelError: the model cannot be loaded or reproduced, or not with these settings.
    """
    source = weights.resolve(settings.model, base)
    with phases.phase("cache"):
        cache = PackedCache.of(settings, source)
        entry = cache.find() if cache is not None else None
    if entry is not None:
        try:
            return _again(settings, base, phases, entry)
        except (ModelError, ValueError, RuntimeError) as error:
            log.warning("the packed weights of %s that were kept are not used: %s", settings.model, error)
    return _anew(settings, base, phases, source, cache)


def _again(settings: Settings, base: Path | None, phases: Phases, entry: Entry) -> Prepared:
    """A model of what the cache has.

    Raises:
        ModelError, ValueError, RuntimeError: it does not say what it said then.
    """
    with phases.phase("model"):
        model, tokenizer = weights.load_state(
            settings.model,
            model_class=entry.model_class,
            generation_config=entry.generation_config,
            state=entry.state,
            dtype=settings.dtype,
            base=base,
        )
    max_seq_len = _max_seq_len(settings, model.config)
    with phases.phase("packed weights"):
        logits = _logits(settings, model)
        packed = pack_ready(model, logits, entry.ready, entry.logits, entry.difference)
    return Prepared(model, tokenizer, entry.conformance, packed, max_seq_len, True)


def _anew(
    settings: Settings, base: Path | None, phases: Phases, source: ModelSource, cache: PackedCache | None
) -> Prepared:
    """A model of its own files, for the cache as well."""
    with phases.phase("model"):
        model, tokenizer = weights.load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
            base=base,
        )
    with phases.phase("probe"):
        conformance = probe(model, settings.tokens_per_block)
    max_seq_len = _max_seq_len(settings, model.config)
    parameters = parameters_of(model)
    logits = _logits(settings, model)
    with phases.phase("packing"):
        packed = pack(model, logits, _weight_formats(settings, model, source))
    if cache is not None and packed.weights:
        with phases.phase("keeping"):
            cache.keep(model, parameters, packed, conformance, sample(logits(True)))
    return Prepared(model, tokenizer, conformance, packed, max_seq_len, False)


def _logits(settings: Settings, model: PreTrainedModel) -> Logits:
    return lambda shared: logits_in_pieces(model, settings.tokens_per_block, shared)


def _weight_formats(settings: Settings, model: PreTrainedModel, source: ModelSource) -> WeightFormats:
    """How the model's weights are to be packed; numbers of 4 bits are those of its GGUF file, if it has one."""
    if settings.quantization == "int4" and source.kind == "gguf":
        return WeightFormats(settings.quantization, GGUFNumbers(Path(source.location), model))
    return WeightFormats(settings.quantization)


def _max_seq_len(settings: Settings, config: PreTrainedConfig) -> int:
    """The longest sequence served: what the config asks for, bounded by what the model can do."""
    context = weights.context_length(config)
    wanted = freeze_rope(config, settings.max_seq_len)
    if wanted is None:
        wanted = context
    if wanted is None:
        raise ModelError("this model does not say how long its context is; set max_seq_len in config.pbtxt")
    if context is not None and wanted > context:
        raise ModelError(
            f"max_seq_len is {wanted}, but this model has positions for {context} tokens only; "
            f"set max_seq_len to at most {context} in config.pbtxt"
        )
    return wanted
