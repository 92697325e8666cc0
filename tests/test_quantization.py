"""Quantised models: what they may lose, that each sequence is on its own, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from conftest import FAMILIES, generate_all, make_engine, random_prompt, tiny_model
from tiny_gguf import tiny_llama, write_gguf
from triton_inflight.batch import build_batch
from triton_inflight.conformance import logits_in_pieces
from triton_inflight.errors import ModelError
from triton_inflight.fused import PackedLinear
from triton_inflight.gguf_cache import CACHE_VARIABLE
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.loader import load_engine
from triton_inflight.packed_weight import PackedWeight, packed_int4, packed_int8, unpacked
from triton_inflight.packing import Packed, pack
from triton_inflight.planner import Run
from triton_inflight.quantized_numbers import quantized_int4, quantized_int8
from triton_inflight.runner import Runner
from triton_inflight.sequence import Sequence
from triton_inflight.settings import Settings
from triton_inflight.weight_formats import Quantization, WeightFormats

DTYPES = [torch.bfloat16, torch.float32]
QUANTIZATIONS: list[Quantization] = ["int8", "int4"]


def quantized(model: PreTrainedModel, quantization: Quantization) -> tuple[PreTrainedModel, Packed]:
    served = copy.deepcopy(model)
    logits = lambda shared: logits_in_pieces(served, 16, shared)  # noqa: E731
    return served, pack(served, logits, WeightFormats(quantization))


def packed_weights(model: PreTrainedModel) -> dict[str, PackedWeight]:
    """By the names of the modules that hold one."""
    return {name: m.packed for name, m in model.named_modules() if isinstance(m, PackedLinear)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_family_can_be_quantised(family: str, quantization: Quantization, dtype: torch.dtype) -> None:
    """Random weights lose about as much with every rounding as they ever could."""
    model = tiny_model(family).to(dtype)
    _, packed = quantized(model, quantization)
    assert packed.num_quantized > 0
    assert 0 < packed.difference < {"int8": 0.05, "int4": 0.4}[quantization]


def test_the_output_layer_has_8_bits_where_others_have_4() -> None:
    served, packed = quantized(tiny_model("llama"), "int4")
    kinds = {name: weight.kind.name for name, weight in packed_weights(served).items()}
    assert kinds.pop("lm_head") == "int8"
    assert set(kinds.values()) == {"int4"}
    assert packed.weight_bytes < quantized(tiny_model("llama"), "int8")[1].weight_bytes


def test_a_tied_embedding_keeps_its_numbers() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    served, _ = quantized(model, "int8")
    assert packed_weights(served)["lm_head"].kind.name == "int8"
    assert torch.equal(served.get_input_embeddings().weight, model.get_input_embeddings().weight)


def logits_of(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """Of the last token of each prompt, all in one step after a first one of a single token each."""
    store = KVStore(len(prompts) * 4, 16)
    tensors = KVTensors(len(prompts) * 4, 16, model.dtype, torch.device("cpu"))
    runner = Runner(model)
    sequences = [Sequence(i + 1, prompt, limit=len(prompt)) for i, prompt in enumerate(prompts)]
    for count in (1, None):
        runs = [Run(sequence, count or sequence.num_pending) for sequence in sequences]
        for run in runs:
            done = run.sequence.num_computed
            store.reserve(run.sequence.sequence_id, 0, done, done + run.count)
        batch = build_batch(runs, store, torch.device("cpu"))
        result = runner.run_rows(batch, tensors, torch.tensor(batch.starts[1:]) - 1)
        for run in runs:
            run.sequence.advance(run.count)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_are_the_same_alone_and_in_a_batch_of_32(
    family: str, quantization: Quantization, dtype: torch.dtype
) -> None:
    """With activations of very different sizes beside each other, as outliers of one prompt are."""
    model = tiny_model(family).to(dtype)
    embeddings: Any = model.get_input_embeddings()
    embeddings.weight.data[:128] *= 30
    served, _ = quantized(model, quantization)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(257, (2 + i,), generator=generator).tolist() for i in range(32)]
    together = logits_of(served, prompts)
    for i in (0, 7, 31):
        difference = (logits_of(served, [prompts[i]])[0] - together[i]).abs().max()
        assert difference <= 1e-4 * together[i].abs().max()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_is_generated_does_not_depend_on_mates_nor_on_when_they_come(quantization: Quantization) -> None:
    model = tiny_model("llama")
    served, _ = quantized(model, quantization)
    prompts = [random_prompt(i, 10 + 3 * i) for i in range(16)]

    def engine() -> Any:
        made = make_engine(model, max_num_tokens=48)
        made._runner.model = served
        return made

    alone = [generate_all(engine(), [prompt], [12])[0][0] for prompt in prompts]
    assert generate_all(engine(), prompts, [12] * 16, [i // 3 for i in range(16)])[0] == alone
    assert len({tuple(tokens) for tokens in alone}) > 8, "the prompts do not all end alike"


def test_a_layer_that_cannot_be_quantised_keeps_its_floats(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights are beyond float16, in which scales of 4 bits are kept."""
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.weight.data *= 1e6
    with caplog.at_level(logging.INFO):
        served, _ = quantized(model, "int4")
    floats = [name for name, packed in packed_weights(served).items() if not packed.is_quantized]
    assert [name.split(".")[-3:] for name in floats] == [["original", "self_attn", "o_proj"]]
    assert "layers.1.self_attn.o_proj is not packed as int4: it would differ by nan" in caplog.text


class FallsApart(GPT2LMHeadModel):
    """Says something else once its output layer has the values of whole numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if getattr(self.lm_head, "weight", None) is not self.transformer.wte.weight:
            output.logits = output.logits.roll(1, dims=-1)
        return output


class NeedsItsInputs(GPT2LMHeadModel):
    """Says something else once the inputs of its output layer are rounded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not isinstance(self.lm_head, torch.nn.Linear):
            output.logits = output.logits.roll(1, dims=-1)
        return output


class HearsItsMates(GPT2LMHeadModel):
    """Adds to its logits something of the whole step once its output layer is quantised."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not isinstance(self.lm_head, torch.nn.Linear):
            output.logits = output.logits * (1 + 1e-3 * output.logits.shape[1])
        return output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FallsApart, r"its logits then differ by .* of their root mean square \(allowed: 1.5e-01\)"),
        (NeedsItsInputs, r"with inputs of 8 bits its logits differ by .* \(allowed: 1.0e-01\)"),
        (HearsItsMates, r"the logits of a sequence then change by .* with who shares its steps"),
    ],
)
def test_a_model_that_quantisation_breaks_is_refused(kind: type[GPT2LMHeadModel], reason: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    with pytest.raises(
        ModelError, match=f"{kind.__name__} cannot be served with quantization int8: {reason}"
    ):
        quantized(kind(config).eval(), "int8")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_kernel_that_is_wrong_in_one_row_of_many_is_refused(
    quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PackedWeight.products

    def wrong(self: PackedWeight, x: torch.Tensor) -> list[torch.Tensor]:
        parts = right(self, x)
        if len(x) > 8:
            parts[-1][:, 7] *= 1.01
        return parts

    monkeypatch.setattr(PackedWeight, "products", wrong)
    with pytest.raises(ModelError, match=r"the product of 15 rows with .* do not work on this machine"):
        quantized(tiny_model("llama"), quantization)


def test_what_whole_numbers_mean_is_read_back_from_the_packed_order() -> None:
    """Parts of sizes that fill no panel, gated ones too."""
    weights = [torch.randn(n, 70, generator=torch.Generator().manual_seed(n)) for n in (37, 5, 64)]
    for parts, gated in ((weights, False), ([weights[0], -weights[0]], True)):
        biases = [None] * len(parts)
        int8, int4 = [quantized_int8(part) for part in parts], [quantized_int4(part) for part in parts]
        for numbers, packed in (
            (int8, packed_int8(int8, torch.float32, biases, gated)),
            (int4, packed_int4(int4, 70, torch.float32, biases, gated)),
        ):
            expected = [one.dequantized()[:, :70] for one in numbers]
            assert all(map(torch.equal, unpacked(packed), expected))


def test_a_model_without_linear_layers_is_refused() -> None:
    model = tiny_model("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"no linear layers that could be, .* set quantization to none"):
        quantized(model, "int8")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
def test_four_bits_of_a_gguf_file_are_taken_over_as_they_are(
    kind: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path
) -> None:
    """The served weights are the file's, though the model was made of floats rounded to dtype.

    The rows of queries and keys have another order in the file; what the file has in 8 bits is rounded anew.
    """
    original = tiny_llama()
    names = [name for name, weight in original.named_parameters() if weight.ndim == 2 and "layers" in name]
    types = dict.fromkeys(names, kind) | {names[3]: gguf.GGMLQuantizationType.Q8_0}
    path = write_gguf(tmp_path / "tiny.gguf", original, types=types)
    engine = load_engine(
        Settings(str(path), dtype=dtype, quantization="int4", max_tokens_in_paged_kv_cache=512)  # type: ignore[arg-type]
    ).engine
    served: Any = engine._runner.model
    layer = served.model.layers[0].layers[0].original
    gate_up, down = layer.mlp.gate_up, layer.mlp.down
    expected = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))
        for name, weight in original.named_parameters()
        if name in names
    }
    parts = ("gate_proj", "up_proj")
    of_file = [expected[f"model.layers.0.mlp.{part}.weight"] for part in parts]
    assert all(map(same, weights_in(gate_up), of_file))
    assert same(weights_in(down)[0], expected["model.layers.0.mlp.down_proj.weight"])
    attention = layer.self_attn
    for name, weight in zip("qkv", weights_in(attention.q_proj.shared.packed), strict=True):
        assert same(weight, expected[f"model.layers.0.self_attn.{name}_proj.weight"]), name
    assert names[3].endswith("o_proj.weight")
    assert attention.o_proj.packed.kind.name == "int4"


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """But for the last bits of a product; rounding to bfloat16 or to 4 bits anew would be seen."""
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def weights_in(packed: PackedWeight) -> list[torch.Tensor]:
    """What a packed weight multiplies with: its product with rows that stay as they are when quantised."""
    rows = torch.zeros(packed.inputs, packed.inputs).fill_diagonal_(127.0)
    product = packed.linear(rows, torch.float32) / 127
    return packed.order.parts(product.T)
