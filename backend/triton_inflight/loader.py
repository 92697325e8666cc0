"""The loader: settings -> an engine that is ready to step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from triton_inflight import weights
from triton_inflight.engine import Engine
from triton_inflight.errors import ModelError
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.memory import resident_bytes, return_freed_memory
from triton_inflight.pace import Pace
from triton_inflight.phases import Phases
from triton_inflight.planner import Planner
from triton_inflight.prepared import prepare
from triton_inflight.protocol import model_defaults
from triton_inflight.runner import Runner
from triton_inflight.settings import Settings

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """An engine, and what its requests get where they say nothing: values by the name of the field."""

    engine: Engine
    defaults: dict[str, Any]


def load_engine(settings: Settings, base: Path | None = None) -> Loaded:
    """Load a model, prove that it can be reproduced, and make the store it runs over.

    Args:
        settings: the model's.
        base: directory that relative model references start from.

    Raises:
        ModelError: the model cannot be loaded or reproduced, or its store does not fit into memory.
    """
    resident, phases = resident_bytes(), Phases(settings.model_name)
    device = torch.device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    model, tokenizer, conformance, packed, max_seq_len, is_cached = prepare(settings, base, phases)
    return_freed_memory()
    # A single block of every pool tells what a token takes, padding included.
    sample = KVTensors(1, settings.tokens_per_block, dtype, device)
    sample.preallocate(conformance.shapes)
    num_blocks = _num_blocks(settings, sample.bytes_per_token, device, max_seq_len)
    store = KVStore(num_blocks, settings.tokens_per_block, settings.enable_kv_cache_reuse)
    tensors = KVTensors(num_blocks, settings.tokens_per_block, dtype, device)
    try:
        tensors.preallocate(conformance.shapes)
    except (RuntimeError, OSError) as error:
        raise ModelError(f"the KV-state store does not fit into memory: {error}; {_BUDGET_REMEDY}") from error
    capacity = num_blocks * settings.tokens_per_block
    budget, grown = capacity * tensors.bytes_per_token, resident_bytes() - resident
    log.info(
        "%s: %s in %s on %s, loaded in %s; probe difference %.1e; %d modules packed in "
        "%.0f MiB%s, %d weights in whole numbers, difference %.1e; KV-state store %d blocks of %d tokens, "
        "%.0f MiB when full; sequences of up to %d tokens; resident memory grew by %.0f MiB, "
        "%.2f of packed weights and KV-state store",
        settings.model_name, settings.model, settings.dtype, device, phases,
        conformance.difference, packed.num_modules, packed.weight_bytes / 2**20,
        " from the cache" if is_cached else "", packed.num_quantized, packed.difference,
        num_blocks, settings.tokens_per_block,
        budget / 2**20, min(max_seq_len, capacity), grown / 2**20, grown / (packed.weight_bytes + budget),
    )  # fmt: skip
    planner = Planner(
        store,
        settings.max_num_tokens,
        settings.max_running_sequences,
        settings.batch_scheduler_policy,
        Pace(settings.max_step_stretch),
    )
    engine = Engine(
        Runner(model),
        tokenizer,
        store,
        tensors,
        planner,
        weights.eos_token_ids(model, tokenizer),
        min(max_seq_len, capacity),
        limit_remedy=(
            "the KV-state store holds no more; raise max_tokens_in_paged_kv_cache or kv_cache_bytes in config.pbtxt"
            if capacity < max_seq_len
            else "max_seq_len in config.pbtxt and the model's context bound them"
        ),
        log_plans=settings.log_plans,
    )
    generation_config = model.generation_config.to_dict() if model.generation_config is not None else {}
    return Loaded(engine, model_defaults(settings, generation_config, log.warning))


_BUDGET_REMEDY = "lower max_tokens_in_paged_kv_cache or kv_cache_bytes in config.pbtxt"


def _num_blocks(settings: Settings, bytes_per_token: int, device: torch.device, max_seq_len: int) -> int:
    """Blocks of the store: the configured budget, or what every sequence could need within half the memory.

    Raises:
        ModelError: the budget does not hold a single block.
    """
    block_bytes = bytes_per_token * settings.tokens_per_block
    if settings.max_tokens_in_paged_kv_cache is not None:
        num_blocks = settings.max_tokens_in_paged_kv_cache // settings.tokens_per_block
    elif settings.kv_cache_bytes is not None:
        num_blocks = settings.kv_cache_bytes // block_bytes
    else:
        most = -(-max_seq_len // settings.tokens_per_block) * settings.max_running_sequences
        num_blocks = min(most, _free_memory(device) // 2 // block_bytes)
    if num_blocks < 1:
        raise ModelError(
            f"the KV-state store has no room for one block of {settings.tokens_per_block} tokens ({block_bytes} "
            "bytes); raise max_tokens_in_paged_kv_cache or kv_cache_bytes in config.pbtxt"
        )
    return num_blocks


def _free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
