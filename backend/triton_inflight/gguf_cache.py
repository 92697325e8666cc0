"""GGUF files, converted once to Hugging Face folders and kept in a cache of the user.

transformers can only dequantise a GGUF file whole, about 15 s for each 100 MB; the converted folder loads in
a fraction of a second because its float32 weights are memory-mapped. It takes 4 bytes for each parameter.

    <cache>/gguf/<file name>-<hash of its path>.lock     held while the entries of this file change
    <cache>/gguf/<file name>-<hash of its path>/
        <hash of the fingerprint>/                       one entry: config, weights, tokenizer, manifest.json
        building-.../                                    an entry being written, or left by a crash
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from triton_inflight.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TRITON_INFLIGHT_CACHE"
FORMAT = 1
"""Version of what this file writes; a new number makes every old entry stale."""

_MANIFEST = "manifest.json"
# Tokens at which a GGUF file says that a generation ends: of the text, of the turn, of the message.
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_PROBE_TEXT = "  Hello, world!\n\n1234 it's\tnaïve Привет 你好 مرحبا 👩‍🚀 <|im_start|>user</s>\n"


def cache_directory() -> Path:
    """``$TRITON_INFLIGHT_CACHE``, or ``triton-inflight`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()).absolute() / "triton-inflight"


def converted_folder(gguf: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted now unless the cache holds it already.

    A changed file, another version of transformers or a damaged entry converts again and replaces the entry.
    Safe when several processes ask at once: one converts, the others wait for it.

    Raises:
        ModelError: the file is not a GGUF model that transformers reads, or the cache cannot be written.
    """
    gguf = gguf.resolve()
    root = cache_directory()
    entries = root / "gguf" / f"{gguf.stem}-{_digest(str(gguf))}"
    try:
        fingerprint = _fingerprint(gguf)
        entry = entries / _digest(json.dumps(fingerprint, sort_keys=True))
        if _is_complete(entry, fingerprint):
            return entry
        entries.mkdir(parents=True, exist_ok=True)
        with _locked(entries.with_name(entries.name + ".lock"), gguf):
            # Whoever held the lock before may have made it.
            if not _is_complete(entry, fingerprint):
                _replace_entries(entry, gguf, fingerprint)
    except OSError as error:
        raise ModelError(
            f"cannot convert {gguf} into the cache {root}: {error}; "
            f"set the environment variable {CACHE_VARIABLE} to a folder with enough space that can be written"
        ) from error
    return entry


def _fingerprint(gguf: Path) -> dict[str, Any]:
    """What an entry depends on."""
    status = gguf.stat()
    return {
        "path": str(gguf),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "format": FORMAT,
        "transformers": version("transformers"),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_complete(entry: Path, fingerprint: dict[str, Any]) -> bool:
    """Whether the entry was made from this very source and still holds every file in its full size."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        sizes = {name: (entry / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest["source"] == fingerprint and manifest["files"] == sizes)


@contextmanager
def _locked(path: Path, gguf: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("another process is converting %s; waiting for it", gguf)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _replace_entries(entry: Path, gguf: Path, fingerprint: dict[str, Any]) -> None:
    """Write the entry under a passing name and rename it, in place of whatever this source had before."""
    for stale in entry.parent.iterdir():
        shutil.rmtree(stale)
    _remove_orphans(entry.parent.parent)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=entry.parent))
    started = time.monotonic()
    log.info("converting %s once, about 15 s for each 100 MB", gguf)
    try:
        _convert(gguf, building)
        files = {path.name: path.stat().st_size for path in building.iterdir()}
        (building / _MANIFEST).write_text(json.dumps({"source": fingerprint, "files": files}, indent=2))
        building.rename(entry)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    log.info("converted in %.1f s; kept in %s", time.monotonic() - started, entry)


def _remove_orphans(conversions: Path) -> None:
    """Remove entries whose source is gone (a deleted virtual environment leaves half a gigabyte behind)."""
    for manifest in conversions.glob(f"*/*/{_MANIFEST}"):
        try:
            source = Path(json.loads(manifest.read_text())["source"]["path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not source.exists():
            log.info("removing the converted copy of %s, which is gone", source)
            shutil.rmtree(manifest.parent.parent, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, float32 weights, generation config and tokenizer of a GGUF file into an empty folder.

    transformers' ``from_pretrained(gguf_file=...)`` asks for the accelerate library, which nothing here
    needs; so its reader is called directly and its tensors are handed to the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model, missing = _dequantized_model(gguf, config)
    except Exception as error:
        raise ModelError(f"transformers cannot read {gguf} as a GGUF language model: {error}") from error
    if missing:
        raise ModelError(
            f"{gguf} lacks {len(missing)} of the tensors of a {config.model_type} model, such as "
            f"{missing[0]}; give a complete GGUF file (split files must be merged first)"
        )
    _state_special_tokens(gguf, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_saved_tokenizer(gguf, tokenizer, AutoTokenizer.from_pretrained(folder))


def _dequantized_model(gguf: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, list[str]]:
    """The model in float32, and the names of parameters that the file has no tensor for."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    checkpoint = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(gguf), return_tensors=True, model_to_load=skeleton
    )
    model, loading = type(skeleton).from_pretrained(
        None, config=config, state_dict=checkpoint["tensors"], dtype=torch.float32, output_loading_info=True
    )
    return model, sorted(loading["missing_keys"])


def _state_special_tokens(gguf: Path, model: PreTrainedModel) -> None:
    """Set the ids of special tokens from the file; transformers' defaults for the architecture may differ."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(gguf))
    stated: dict[str, int | list[int]] = {}
    if ends := sorted({metadata[key] for key in _END_KEYS if key in metadata}):
        stated["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            stated[name] = token_id
    for name, value in stated.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)


def _check_saved_tokenizer(
    gguf: Path, original: PreTrainedTokenizerBase, saved: PreTrainedTokenizerBase
) -> None:
    """Raise ModelError where saving changed how text is read."""
    for what in ("bos_token_id", "eos_token_id", "chat_template"):
        if getattr(original, what) != getattr(saved, what):
            raise ModelError(f"converting {gguf} changed the tokenizer's {what}")
    if original.encode(_PROBE_TEXT) != saved.encode(_PROBE_TEXT):
        raise ModelError(f"converting {gguf} changed the tokenizer: it encodes {_PROBE_TEXT!r} differently")
