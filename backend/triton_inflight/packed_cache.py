"""Models that were packed and found right, kept in the user's cache so that the next load need not do it again.

    <cache>/packed/<model>-<hash of its path>/<dtype>-<quantization>-<hash of the conditions>.tensors

A file (tensor_file.py) holds the packed weights, every other weight, what the checks found, and some logits. Its
weights are mapped into memory: two instances share them, and the model's own files are not read.

Settled by an entry, because nothing it depends on has changed (the model's files, this package's code and kernels,
the versions of torch and transformers, the instruction set, the settings): that the model can be run over flat
batches, that its stand-ins compute what its modules do, and what quantisation costs. Looked at by every load: that
the file holds what was written (checksum), that its weights have the sizes of the model's layers, and that the whole
model still says what it said, which the processor's kernels have their part in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from triton_inflight import tensor_file, weights
from triton_inflight.conformance import Conformance
from triton_inflight.differences import MODULE_TOLERANCE
from triton_inflight.gguf_cache import CACHE_VARIABLE, cache_directory
from triton_inflight.kv_shape import KVShape
from triton_inflight.native import _native
from triton_inflight.packing import Packed
from triton_inflight.ready_weights import ReadyWeights, kinds_of, tensors_of
from triton_inflight.settings import Settings
from triton_inflight.weights import ModelSource

log = logging.getLogger(__name__)

SMALLEST = 16 * 2**20
"""Packed weights of fewer bytes are not kept: packing them takes no longer than finding them."""

_SUFFIX = ".tensors"
_ABANDONED_SECONDS = 3600.0
_MODEL = "model|"
_LOGITS = "logits"
# Settings that change nothing of what a model says. Any other, such as one that is added later, makes an entry of its
# own.
_UNRELATED = frozenset(
    {
        "model",  # known by its files
        "model_name",
        "model_directory",
        "scheduler",
        "max_batch_size",
        "max_candidate_sequences",
        "max_running_sequences",
        "max_queue_size",
        "batch_scheduler_policy",
        "decoupled",
        "instances",
        "ready_control",
        "max_sequence_idle",
        "inputs",
        "outputs",
        "defaults",
        "max_tokens_in_paged_kv_cache",
        "kv_cache_bytes",
        "enable_kv_cache_reuse",
        "max_num_tokens",
        "max_step_stretch",
        "max_steps_per_execute",
        "max_trip_ms",
        "max_tokens_in_one_trip",
        "ignored_parameters",
        "unknown_parameters",
        "use_generation_config",
        "default_max_tokens",
        "stream_interval",
        "max_time",
        "cancellation_check_period_ms",
        "log_plans",
        "trace_directory",
        "trace_max_bytes",
    }
)


@dataclass(frozen=True)
class Entry:
    """A model that is packed.

    Attributes:
        model_class: of transformers, by name.
        generation_config: as a dict.
        state: its weights by name, as transformers loads them; those that are packed have a shape only.
        ready: its packed weights.
        logits: a sample of what it said, see ``packing.sample``.
        conformance: what the probe found.
        difference: what packing changed.
    """

    model_class: str
    generation_config: Mapping[str, Any]
    state: Mapping[str, torch.Tensor]
    ready: ReadyWeights
    logits: torch.Tensor
    conformance: Conformance
    difference: float


class PackedCache:
    """Where the entry of a model under its settings is, on this machine.

    Args:
        settings: the model's.
        source: where the model is.
    """

    def __init__(self, settings: Settings, source: ModelSource) -> None:
        self._origin = {
            "source": weights.fingerprint(source),
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "code": _code(),
        }
        isas = _native.Runtime(_native.chosen_isa(), 1)
        related = (field.name for field in dataclasses.fields(settings) if field.name not in _UNRELATED)
        self._conditions = {name: str(getattr(settings, name)) for name in related} | {
            "isas": [isas.isa.name, isas.integer_isa.name]
        }
        name = f"{Path(source.location).stem}-{_digest(source.location)}"
        entry = f"{settings.dtype}-{settings.quantization}-{_digest(self._conditions)}"
        self._path = cache_directory() / "packed" / name / f"{entry}{_SUFFIX}"

    @staticmethod
    def of(settings: Settings, source: ModelSource) -> PackedCache | None:
        """The place of a model's entry; None for what is not kept: another device's, and code that comes with a
        model, which may change without notice."""
        dtype: torch.dtype = getattr(torch, settings.dtype)
        if torch.device(settings.device).type != "cpu" or dtype not in MODULE_TOLERANCE:
            return None
        if settings.trust_remote_code:
            return None
        try:
            return PackedCache(settings, source)
        except OSError as error:
            log.info("packed weights are not kept: %s", error)
            return None

    def find(self) -> Entry | None:
        """The entry, if there is one that is whole and of this very model, code and machine."""
        try:
            if tensor_file.read_meta(self._path)["origin"] != self._origin:
                return None
            meta, tensors = tensor_file.read(self._path)
            entry = _entry(meta, tensors)
        except FileNotFoundError:
            return None
        except (OSError, tensor_file.DamagedFileError, KeyError, TypeError, ValueError) as error:
            log.warning("the packed weights in %s are packed anew: %s", self._path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(self._path)
        return entry

    def keep(
        self,
        model: PreTrainedModel,
        state: Mapping[str, tuple[torch.Tensor, torch.Size]],
        packed: Packed,
        conformance: Conformance,
        logits: torch.Tensor,
    ) -> None:
        """Write an entry in place of others of the same model that are of no use any more.

        A cache that cannot be written costs the next load its time, and is no error.

        Args:
            model: that is packed.
            state: its parameters and persistent buffers as they are now, with their shapes before packing.
            packed: what was done to it.
            conformance: what the probe found.
            logits: a sample of what it says.
        """
        model_class = type(model).__name__
        if packed.weight_bytes < SMALLEST or getattr(transformers, model_class, None) is not type(model):
            return
        generation: Any = model.generation_config
        held = {name: tensor for name, (tensor, shape) in state.items() if tensor.shape == shape}
        first: dict[int, str] = {}
        for name, tensor in held.items():
            first.setdefault(id(tensor), name)
        meta = {
            "origin": self._origin,
            "conditions": self._conditions,
            "model_class": model_class,
            "generation_config": json.loads(generation.to_json_string(use_diff=False)) if generation else {},
            "kinds": kinds_of(packed.weights),
            "aliases": {name: first[id(tensor)] for name, tensor in held.items()},
            "shapes": {
                name: [str(tensor.dtype).removeprefix("torch."), list(shape)]
                for name, (tensor, shape) in state.items()
                if name not in held
            },
            "conformance": conformance,
            "difference": packed.difference,
        }
        tensors = tensors_of(packed.weights) | {
            _MODEL + name: tensor for name, tensor in held.items() if first[id(tensor)] == name
        }
        started = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_useless()
            tensor_file.write(self._path, meta, tensors | {_LOGITS: logits})
        except OSError as error:
            log.warning(
                "packed weights are not kept, so the next load takes as long: %s; set the environment variable %s to a "
                "folder with enough space that can be written", error, CACHE_VARIABLE,
            )  # fmt: skip
            return
        log.info("packed weights kept in %s, written in %.1f s", self._path, time.monotonic() - started)

    def _remove_useless(self) -> None:
        """Remove entries of the model as it was, those of other code, what crashes left, and those of models that
        are gone."""
        for path in self._path.parent.iterdir():
            if path.name.startswith(tensor_file.WRITING):
                useless = time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
            else:
                useless = _origin(path) != self._origin
            if useless:
                path.unlink(missing_ok=True)
        for path in self._path.parent.parent.glob(f"*/*{_SUFFIX}"):
            source = (_origin(path) or {}).get("source", {})
            if "files" in source and not Path(source["path"]).exists():
                shutil.rmtree(path.parent, ignore_errors=True)


def parameters_of(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Size]]:
    """A model's parameters and persistent buffers and their shapes, which packing takes from some of them."""
    return {name: (tensor, tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def _entry(meta: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Entry:
    """What ``keep`` wrote."""
    state = {name: tensors[_MODEL + alias] for name, alias in meta["aliases"].items()}
    for name, (dtype, shape) in meta["shapes"].items():
        state[name] = torch.zeros(1, dtype=getattr(torch, dtype)).expand(shape)
    difference, shapes = meta["conformance"]
    return Entry(
        meta["model_class"],
        meta["generation_config"],
        state,
        ReadyWeights(meta["kinds"], tensors),
        tensors[_LOGITS],
        Conformance(difference, tuple(KVShape(*shape) for shape in shapes)),
        meta["difference"],
    )


def _origin(path: Path) -> Any:
    """What a file was made of, or None where it does not say."""
    try:
        return tensor_file.read_meta(path)["origin"]
    except (OSError, tensor_file.DamagedFileError, KeyError, TypeError, ValueError):
        return None


@functools.cache
def _code() -> str:
    """A hash of this package's code and kernels: any change to them may change what packed weights are."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(_native.__file__)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
