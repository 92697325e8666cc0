"""Packed weights that are kept: the next load has the same bits, and what is stale or damaged is never served."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from conftest import FAMILIES, tiny_model
from serving import save_model
from tiny_gguf import tiny_llama, write_gguf
from triton_inflight import _native, packed_cache, tensor_file, weights
from triton_inflight.conformance import logits_in_pieces
from triton_inflight.errors import ModelError
from triton_inflight.gguf_cache import CACHE_VARIABLE, cache_directory
from triton_inflight.loader import load_engine
from triton_inflight.packed_weight import PackedWeight
from triton_inflight.packer import Packer
from triton_inflight.phases import Phases
from triton_inflight.prepared import Prepared, prepare
from triton_inflight.settings import Quantization, Settings
from triton_inflight.weight_formats import WeightFormats

QUANTIZATIONS: list[Quantization] = ["none", "int8", "int4"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has an empty cache, which takes tiny models, too."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "SMALLEST", 0)


def folder_of(tmp_path: Path, family: str = "llama", **changes: object) -> Path:
    return save_model(tmp_path / "weights", tiny_model(family, **changes))


def load(folder: Path, **settings: Any) -> Prepared:
    return prepare(
        Settings(str(folder), **{"dtype": "bfloat16", "tokens_per_block": 16} | settings), None, Phases("")
    )


def entries() -> list[Path]:
    return sorted((cache_directory() / "packed").glob("*/*"))


def logits(model: PreTrainedModel) -> torch.Tensor:
    return logits_in_pieces(model, 16)


def assert_same(ours: Prepared, theirs: Prepared) -> None:
    """To the last bit, in every weight."""
    assert ours.packed.weights.keys() == theirs.packed.weights.keys()
    for path, expected in theirs.packed.weights.items():
        for a, b in zip(ours.packed.weights[path], expected, strict=True):
            assert a.kind == b.kind
            assert a.tensors().keys() == b.tensors().keys()
            assert all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())
    state, expected_state = ours.model.state_dict(), theirs.model.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert state[name].dtype is tensor.dtype
        if tensor.device.type != "meta":
            assert torch.equal(state[name], tensor), name
    assert torch.equal(logits(ours.model), logits(theirs.model))
    assert ours.packed._replace(weights={}) == theirs.packed._replace(weights={})
    assert ours.conformance == theirs.conformance
    assert ours.max_seq_len == theirs.max_seq_len
    for config in ("config", "generation_config"):
        a, b = (getattr(one.model, config).to_dict() for one in (ours, theirs))
        assert a == b


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_next_load_is_the_same_model(
    family: str, quantization: Quantization, dtype: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, family)
    first = load(folder, dtype=dtype, quantization=quantization)
    assert first.packed.num_modules > 0
    (entry,) = entries()
    written = entry.stat().st_ino
    second = load(folder, dtype=dtype, quantization=quantization)
    assert (first.is_from_cache, second.is_from_cache) == (False, True)
    assert_same(second, first)
    assert [path.stat().st_ino for path in entries()] == [written]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_tied_weights_stay_one(quantization: Quantization, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tie_word_embeddings=True)
    first, second = (load(folder, quantization=quantization) for _ in range(2))
    assert second.is_from_cache
    assert_same(second, first)
    _, tensors = tensor_file.read(entries()[0])
    assert [name for name in tensors if "lm_head.weight" in name] == []


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_gguf_file(quantization: Quantization, tmp_path: Path) -> None:
    model = tiny_llama()
    kind = gguf.GGMLQuantizationType.Q4_1
    types = {name: kind for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name}
    path = write_gguf(tmp_path / "tiny.gguf", model, types=types)
    first, second = (load(path, quantization=quantization) for _ in range(2))
    assert second.is_from_cache
    assert_same(second, first)


def test_an_engine_says_where_its_weights_came_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(str(folder_of(tmp_path)), max_tokens_in_paged_kv_cache=512)
    with caplog.at_level("INFO"):
        first, second = load_engine(settings), load_engine(settings)
    lines = [line for line in caplog.messages if "modules packed" in line]
    assert ["from the cache" in line for line in lines] == [False, True]
    assert all("of packed weights and KV-state store" in line for line in lines)
    assert second.defaults == first.defaults


def test_weights_of_the_model_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    load(folder)
    monkeypatch.setattr(weights, "load", lambda *_, **__: pytest.fail("the model's own weights are read"))
    assert load(folder).is_from_cache


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_undone_after_a_load_from_the_cache(quantization: Quantization, tmp_path: Path) -> None:
    """The model's own code has its own weights again; with whole numbers, what these mean."""
    folder = folder_of(tmp_path)
    load(folder, quantization=quantization)
    settings = Settings(str(folder), dtype="bfloat16", tokens_per_block=16, quantization=quantization)
    states = []
    for cached in (False, True):
        if cached:
            cache = packed_cache.PackedCache.of(settings, weights.resolve(str(folder)))
            assert cache is not None
            entry = cache.find()
            assert entry is not None
            model = weights.load_state(
                str(folder),
                model_class=entry.model_class,
                generation_config=entry.generation_config,
                state=entry.state,
                dtype="bfloat16",
            ).model
        else:
            entry, model = None, weights.load(str(folder), dtype="bfloat16", device="cpu").model
        packer = Packer(model, WeightFormats(quantization), entry and entry.ready)
        packer.run()
        assert packer.num_changes > 0
        packer.undo()
        states.append((model.state_dict(), logits(model)))
    (expected, said), (state, says) = states
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(says, said)
    if quantization == "none":
        stock = weights.load(str(folder), dtype="bfloat16", device="cpu").model
        assert all(torch.equal(state[name], weight) for name, weight in stock.state_dict().items())


def other_weights(folder: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data *= 2
    model.save_pretrained(folder)


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))


@pytest.mark.parametrize("change", [other_weights, other_config])
def test_a_model_that_has_changed_is_packed_anew(change: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    load(folder)
    load(folder, dtype="float32")
    assert len(entries()) == 2
    change(folder)
    changed = load(folder)
    assert not changed.is_from_cache
    assert len(entries()) == 1, "those of the model as it was are removed"
    again = load(folder)
    assert again.is_from_cache
    assert_same(again, changed)


def test_other_code_packs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    load(folder)
    monkeypatch.setattr(packed_cache, "_code", lambda: "another version's")
    assert not load(folder).is_from_cache
    assert load(folder).is_from_cache
    assert len(entries()) == 1


def test_the_code_is_told_by_its_files() -> None:
    assert len(packed_cache._code()) == 64
    assert Path(_native.__file__).is_file()


def test_settings_and_instruction_sets_have_entries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    variants: list[dict[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"tokens_per_block": 32},
        {"max_seq_len": 100},
    ]
    for settings in variants:
        assert not load(folder, **settings).is_from_cache
    if len(_native.supported_isas()) > 1:
        monkeypatch.setenv("TRITON_INFLIGHT_ISA", "portable")
        variants.append({})
        assert not load(folder).is_from_cache
        assert load(folder).is_from_cache
        monkeypatch.delenv("TRITON_INFLIGHT_ISA")
    assert len(entries()) == len(variants)
    assert all(load(folder, **settings).is_from_cache for settings in variants)


def test_what_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    load(folder, trust_remote_code=True)
    load(folder, dtype="float16")
    monkeypatch.setattr(packed_cache, "SMALLEST", 2**30)
    load(folder)
    assert entries() == []


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"\x00" * 4096)


def damaged_in_a_weight(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damaged_in_the_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 0x01
    path.write_bytes(data)


def with_other_weights(path: Path) -> None:
    """Whole, but not what was compared."""
    meta, tensors = tensor_file.read(path)
    name = next(name for name in tensors if "mlp" in name)
    tensor_file.write(path, meta, tensors | {name: tensors[name].roll(1, dims=0)})


def with_a_weight_too_small(path: Path) -> None:
    meta, tensors = tensor_file.read(path)
    name = next(name for name in tensors if "mlp" in name)
    tensor_file.write(path, meta, tensors | {name: tensors[name][:-1]})


def without_a_weight(path: Path) -> None:
    meta, tensors = tensor_file.read(path)
    tensors.pop(next(name for name in tensors if "norm" in name))
    tensor_file.write(path, meta, tensors)


def with_a_place_too_many(path: Path) -> None:
    meta, tensors = tensor_file.read(path)
    meta["kinds"]["model.nowhere"] = ["bf16"]
    tensor_file.write(path, meta, tensors)


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        emptied,
        foreign,
        damaged_in_a_weight,
        damaged_in_the_header,
        with_other_weights,
        with_a_weight_too_small,
        without_a_weight,
        with_a_place_too_many,
    ],
)
def test_a_damaged_entry_is_packed_anew(damage: Any, quantization: Quantization, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    first = load(folder, quantization=quantization)
    (entry,) = entries()
    damage(entry)
    second = load(folder, quantization=quantization)
    assert not second.is_from_cache
    assert_same(second, first)
    third = load(folder, quantization=quantization)
    assert third.is_from_cache
    assert_same(third, first)


def test_kernels_that_are_wrong_on_this_machine_are_not_hidden_by_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as a whole is compared at every load, and then all that an entry settles is looked at again."""
    folder = folder_of(tmp_path, "gpt2")
    load(folder, quantization="int8")
    right = PackedWeight._product

    def wrong(self: PackedWeight, *args: Any) -> torch.Tensor:
        out = right(self, *args)
        out[:, 7] *= 3
        return out

    monkeypatch.setattr(PackedWeight, "_product", wrong)
    with pytest.raises(ModelError, match=r"do not work on this machine|cannot be served with quantization"):
        load(folder, quantization="int8")


@pytest.mark.parametrize("reason", ["not a folder", "full"])
def test_a_cache_that_cannot_be_written_costs_the_caching(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path)
    if reason == "full":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(tensor_file, "write", full)
    else:
        (tmp_path / "cache").touch()
    assert load(folder).packed.num_modules > 0
    lines = [line for line in caplog.messages if "packed weights are not kept" in line]
    assert len(lines) == 1
    assert CACHE_VARIABLE in lines[0]


def test_two_processes_at_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    code = (
        "import sys; from pathlib import Path; from triton_inflight import packed_cache;"
        "from triton_inflight.phases import Phases; from triton_inflight.prepared import prepare;"
        "from triton_inflight.settings import Settings; packed_cache.SMALLEST = 0;"
        "print('ready', flush=True); sys.stdin.readline();"
        f"print(prepare(Settings({str(folder)!r}, tokens_per_block=16), None, Phases('')).packed.num_modules)"
    )
    loads = [
        subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    for process in loads:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = [process.communicate("go\n", timeout=240) for process in loads]
    assert [process.returncode for process in loads] == [0, 0], results
    assert len({int(out) for out, _ in results} | {load(folder).packed.num_modules}) == 1
    assert load(folder).is_from_cache
    assert len(entries()) == 1


def test_entries_of_models_that_are_gone_are_removed_and_what_crashes_left(tmp_path: Path) -> None:
    gone = folder_of(tmp_path / "gone")
    load(gone)
    folder = folder_of(tmp_path)
    load(folder)
    (entry,) = [
        path for path in entries() if json.dumps(str(folder)) in json.dumps(tensor_file.read_meta(path))
    ]
    old, new = (entry.with_name(f"{tensor_file.WRITING}{name}") for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    load(folder, dtype="float32")
    assert not old.exists()
    assert new.exists(), "someone is writing it"
    assert len(entries()) == 3
    assert {path.parent for path in entries()} == {entry.parent}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_a_file_gives_back_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(21).view(3, 7).to(dtype),
        "turned": torch.arange(12).view(3, 4).T.to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "scalar": torch.tensor(5).to(dtype),
    }
    path = tmp_path / "file"
    tensor_file.write(path, {"a": [1, None]}, tensors)
    meta, read = tensor_file.read(path)
    assert meta == tensor_file.read_meta(path) == {"a": [1, None]}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
        assert read[name].data_ptr() % 64 == 0
    read["odd"].zero_()
    assert torch.equal(tensor_file.read(path)[1]["odd"], tensors["odd"]), "the file stays as it is"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_numbers(tmp_path: Path) -> None:
    tensor_file.write(tmp_path / "file", {}, {"empty": torch.empty(0)})
    assert tensor_file.read(tmp_path / "file")[1]["empty"].shape == (0,)


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    tensor_file.write(path, 1, {"a": torch.ones(3)})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "chmod", fail)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        tensor_file.write(path, 2, {"a": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == [path]
    assert tensor_file.read(path)[0] == 1


def test_a_setting_that_nobody_has_thought_of_makes_an_entry_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {field.name for field in dataclasses.fields(Settings)} > packed_cache._UNRELATED
    folder = folder_of(tmp_path)
    load(folder)
    assert load(folder, max_time=1.0).is_from_cache
    monkeypatch.setattr(packed_cache, "_UNRELATED", packed_cache._UNRELATED - {"max_time"})
    load(folder, max_time=1.0)
    assert load(folder, max_time=1.0).is_from_cache
    assert not load(folder, max_time=2.0).is_from_cache


@pytest.mark.parametrize("cached", [False, True])
def test_memory_grows_by_the_weights_and_the_store(cached: bool, tmp_path: Path) -> None:
    """In a fresh process, by a model that is large beside all else that a load leaves."""
    folder = folder_of(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout);"
        "from triton_inflight.loader import load_engine; from triton_inflight.settings import Settings;"
        f"load_engine(Settings({str(folder)!r}, max_tokens_in_paged_kv_cache=4096))"
    )
    for _ in range(1 + cached):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr
    assert ("from the cache" in result.stdout) is cached
    grown = re.search(r"grew by \d+ MiB, ([\d.]+) of packed weights and KV-state store", result.stdout)
    assert grown is not None, result.stdout
    print(result.stdout)
    assert float(grown[1]) <= 1.3
