"""Packed weights and fused modules compute what the modules they stand in for compute, or are put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from conftest import FAMILIES, generate_all, make_engine, random_prompt, solo, tiny_model
from triton_inflight import _native, native_attention
from triton_inflight.conformance import logits_in_pieces
from triton_inflight.decoder_stack import DecoderStack
from triton_inflight.fused import GatedMLP, NativeRMSNorm, PackedLinear, SharedInput, native_rotary
from triton_inflight.fused_layer import FusedLayer
from triton_inflight.packed_weight import packed_floats, unpacked
from triton_inflight.packing import Packed, pack
from triton_inflight.rotary_takeover import fast_rotary

ROUNDING = {torch.bfloat16: 1e-2, torch.float32: 2e-6}  # of the largest output
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=_native.supported_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version of the kernels that this machine can run."""
    monkeypatch.setenv("TRITON_INFLIGHT_ISA", request.param.name)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.shape == expected.shape
    difference = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert difference < ROUNDING[dtype]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 29, 57])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (33, 7), (64, 64), (100, 129)])
def test_a_packed_linear_layer_multiplies(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    x = random(rows, inputs, dtype=dtype, seed=2)
    result = packed_floats([weight], [bias]).linear(x)
    assert result.dtype is dtype
    if rows:
        assert_close(result, F.linear(x.double(), weight.double(), bias.double()), dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_logits_come_from_any_weight(dtype: torch.dtype) -> None:
    weight, x = random(40, 24, dtype=dtype), random(1, 3, 24, dtype=dtype, seed=1)
    result = PackedLinear(packed_floats([weight], [None]), torch.float32)(x)
    assert result.dtype is torch.float32
    difference = (result.double() - F.linear(x.double(), weight.double())).abs().max()
    assert difference < 1e-4, "not rounded to bfloat16 on the way"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_who_shares_its_batch(dtype: torch.dtype) -> None:
    packed = packed_floats([random(96, 70, dtype=dtype)], [None])
    x = random(61, 70, dtype=dtype, seed=1)
    together = packed.linear(x)
    for first, last in [(0, 1), (3, 18), (40, 61)]:
        assert torch.equal(packed.linear(x[first:last]), together[first:last])


def test_threads_do_not_change_the_result() -> None:
    packed = packed_floats([random(2048, 600, dtype=torch.bfloat16)], [None])
    x = random(200, 600, dtype=torch.bfloat16, seed=1)
    one = packed.linear(x)
    packed.runtime.threads = 3
    assert torch.equal(packed.linear(x), one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2048, 2049])
def test_inputs_whose_rows_collide_in_the_cache_are_copied_right(inputs: int, dtype: torch.dtype) -> None:
    weight, x = random(32, inputs, dtype=dtype), random(20, inputs, dtype=dtype, seed=1)
    assert_close(packed_floats([weight], [None]).linear(x), F.linear(x.double(), weight.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_over_one_input_are_views_of_one_product(dtype: torch.dtype) -> None:
    weights = [random(n, 30, dtype=dtype, seed=n) for n in (36, 20, 5)]
    biases = [random(36, dtype=dtype), None, random(5, dtype=dtype)]
    shared = SharedInput(packed_floats(weights, biases))
    for seed in (1, 2):
        x = random(1, 4, 30, dtype=dtype, seed=seed)
        for part in (2, 0, 1):
            expected = F.linear(x, weights[part], biases[part])
            assert_close(shared.take(part, x), expected, dtype)
    x, y = random(1, 4, 30, dtype=dtype, seed=3), random(1, 9, 30, dtype=dtype, seed=4)
    shared.take(0, x)
    assert_close(shared.take(1, y), F.linear(y, weights[1]), dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 31])
@pytest.mark.parametrize("width", [16, 33, 96])
def test_a_gated_mlp(width: int, rows: int, dtype: torch.dtype) -> None:
    gate, up = (random(width, 50, dtype=dtype, seed=i) for i in (1, 2))
    down, bias = random(50, width, dtype=dtype, seed=3), random(width, dtype=dtype, seed=4)
    mlp = GatedMLP(packed_floats([gate, up], [bias, None], gated=True), packed_floats([down], [None]))
    x = random(rows, 50, dtype=dtype, seed=5)
    inner = F.silu(F.linear(x.double(), gate.double(), bias.double())) * F.linear(x.double(), up.double())
    assert_close(mlp(x), F.linear(inner, down.double()), dtype)


@pytest.mark.usefixtures("isa")
def test_silu_of_large_numbers() -> None:
    """exp overflows there, silu does not."""
    weights = [torch.eye(16) * scale for scale in (1.0, 1.0)]
    mlp = GatedMLP(packed_floats(weights, [None, None], gated=True), packed_floats([torch.eye(16)], [None]))
    x = torch.tensor([-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4] * 2)[None]
    assert torch.allclose(mlp(x), F.silu(x) * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_unpacking_gives_back_every_bit(gated: bool, dtype: torch.dtype) -> None:
    weights = [random(n, 31, dtype=dtype, seed=i) for i, n in enumerate((37, 37) if gated else (37, 5, 64))]
    packed = packed_floats(weights, [None] * len(weights), gated)
    assert all(torch.equal(a, b) for a, b in zip(unpacked(packed), weights, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (700, 64)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    stock = Gemma2RMSNorm(width, eps=1e-6)
    stock.weight.data = random(width, seed=1)
    x = random(2, rows, width, dtype=dtype, seed=2) * 3
    ours = NativeRMSNorm(1.0 + stock.weight, stock.eps)(x)
    assert ours.dtype is dtype
    assert_close(ours, stock(x), dtype)
    strided = x.transpose(0, 1)
    assert_close(NativeRMSNorm(1.0 + stock.weight, stock.eps)(strided), stock(strided), dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_positions(dtype: torch.dtype) -> None:
    stock = modeling_llama.apply_rotary_pos_emb
    q, k = (random(1, 5, heads, 24, dtype=dtype, seed=heads).transpose(1, 2) for heads in (4, 2))
    cos, sin = (random(1, 5, 24, dtype=dtype, seed=seed) for seed in (1, 2))

    def never(*_: Any) -> Any:
        raise AssertionError("the native path must take this")

    for ours, theirs in zip(native_rotary(never)(q, k, cos, sin), stock(q, k, cos, sin), strict=True):
        assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("change", ["batch", "angles in float32", "unsqueeze_dim"])
def test_rotary_positions_of_anything_else_are_left_to_the_model(change: str) -> None:
    stock = modeling_llama.apply_rotary_pos_emb
    q, k = random(1, 4, 5, 16, dtype=torch.bfloat16), random(1, 4, 5, 16, dtype=torch.bfloat16, seed=1)
    cos, sin = (random(1, 5, 16, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    options: dict[str, Any] = {}
    if change == "batch":
        q, k = q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1)
    elif change == "angles in float32":
        cos, sin = cos.float(), sin.float()
    else:
        q, k, options = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    expected = stock(q, k, cos, sin, **options)
    for ours, theirs in zip(native_rotary(stock)(q, k, cos, sin, **options), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_rotary_positions_in_another_order_are_not_taken_over() -> None:
    """GPT-J turns neighbours instead of halves, and has another signature."""

    def neighbours(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(x * cos[:, None] + modeling_gptj.rotate_every_two(x) * sin[:, None] for x in (q, k))

    assert fast_rotary(modeling_llama.apply_rotary_pos_emb, torch.float32) is not None
    assert fast_rotary(neighbours, torch.float32) is None
    assert fast_rotary(modeling_gptj.apply_rotary_pos_emb, torch.float32) is None


def packed_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, Packed]:
    served = copy.deepcopy(model)
    return served, pack(served, lambda shared: logits_in_pieces(served, 16, shared))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_packed_model_generates_what_the_stock_model_does(family: str) -> None:
    model = tiny_model(family)
    served, packed = packed_copy(model)
    assert packed.num_modules > 0
    assert packed.difference < 1e-5
    prompts = [random_prompt(i, 20 + 13 * i) for i in range(3)]
    engine = make_engine(model, max_num_tokens=32)
    engine._runner.model = served
    expected = [solo(model, engine._tokenizer.encode(p), 12) for p in prompts]
    assert generate_all(engine, prompts, [12] * 3, [0, 2, 5])[0] == expected


def test_in_bfloat16_as_well() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    served, packed = packed_copy(model)
    assert 0 < packed.difference < 3e-2
    names = {type(module).__name__ for module in served.modules()}
    assert {"FusedLayer", "PackedLinear", "SharedLinear", "GatedMLP", "NativeRMSNorm"} <= names
    assert not {"Linear", "LlamaMLP", "LlamaRMSNorm"} & names, "all of them are replaced"


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_layers_of_known_code_are_one_module(family: str) -> None:
    served, packed = packed_copy(tiny_model(family))
    layers = [m for m in served.modules() if isinstance(m, FusedLayer)]
    assert len(layers) == served.config.num_hidden_layers
    assert packed.difference < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_all_layers_of_known_code_are_one_call(family: str) -> None:
    served, _ = packed_copy(tiny_model(family))
    stacks = [m for m in served.modules() if isinstance(m, DecoderStack)]
    assert len(stacks) == 1
    assert len(stacks[0].layers) == served.config.num_hidden_layers
    assert list(served.model.layers) == stacks


def test_layers_that_differ_are_called_one_by_one() -> None:
    """In one of these layers, each token sees its last few only."""
    served, packed = packed_copy(
        tiny_model(
            "qwen2",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    )
    assert not any(isinstance(m, DecoderStack) for m in served.modules())
    assert sum(isinstance(m, FusedLayer) for m in served.modules()) == 3
    assert packed.difference < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_a_stack_and_its_layers_one_by_one_give_the_same_bits(family: str) -> None:
    served, _ = packed_copy(tiny_model(family))
    stacked = logits_in_pieces(served, 16)
    served.model.layers = served.model.layers[0].layers
    assert torch.equal(stacked, logits_in_pieces(served, 16))


def test_a_stack_is_right_over_the_pools_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    served, _ = packed_copy(tiny_model("llama"))
    native = logits_in_pieces(served, 16)
    monkeypatch.setattr(native_attention, "supported", lambda *_: False)
    assert torch.allclose(logits_in_pieces(served, 16), native, atol=1e-5)


def test_layers_of_other_code_are_not() -> None:
    """Same parts, but Gemma 2 has norms after attention and MLP as well."""
    served, packed = packed_copy(tiny_model("gemma2"))
    assert packed.num_modules > 0
    assert not any(isinstance(m, FusedLayer) for m in served.modules())


def test_a_fused_layer_leaves_what_it_does_not_know_to_the_original() -> None:
    """A batch of two goes the way it always did."""
    model = tiny_model("llama")
    served, _ = packed_copy(model)
    served.set_attn_implementation("sdpa")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(served(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)


def test_weights_are_held_once_and_an_embedding_stays_readable() -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    embedding = model.get_input_embeddings().weight
    before = embedding.clone()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    packed = pack(model, lambda shared: logits_in_pieces(model, 16, shared))
    assert torch.equal(embedding, before)
    assert model.get_input_embeddings().weight is embedding
    assert [m.weight.numel() for m in linears if m.weight is not embedding] == [0] * (len(linears) - 1)
    weights = sum(m.in_features * m.out_features for m in linears)
    assert weights * 2 <= packed.weight_bytes <= weights * 2 * 1.2


def test_another_model_of_the_family_stays_stock() -> None:
    other = tiny_model("llama")
    function = modeling_llama.apply_rotary_pos_emb
    packed_copy(other)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert all("forward" not in vars(module) for module in other.modules())


class ReadsAWeight(LlamaForCausalLM):
    """Multiplies with a layer's weight itself, which a packed layer does not have."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + self.model.layers[0].self_attn.q_proj.weight.sum()
        return output


class CountsCalls(LlamaForCausalLM):
    """Answers otherwise once it is packed."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        if not isinstance(self.lm_head, torch.nn.Linear):
            output.logits = output.logits.roll(1, dims=-1)
        return output


@pytest.mark.parametrize("kind", [ReadsAWeight, CountsCalls])
def test_a_model_that_differs_when_packed_is_put_back(
    kind: type[LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = kind(tiny_model("llama").config).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = logits_in_pieces(model, 16)
    assert pack(model, lambda shared: logits_in_pieces(model, 16, shared)).num_modules == 0
    assert f"{kind.__name__} is served without packed weights" in caplog.text
    assert torch.equal(logits_in_pieces(model, 16), before)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())


def test_a_module_that_someone_listens_to_stays() -> None:
    model = tiny_model("llama")
    heard: list[object] = []
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda *_: heard.append(None))
    pack(model, lambda shared: logits_in_pieces(model, 16, shared))
    assert model.model.layers[0].mlp.down_proj is layer
    heard.clear()
    logits_in_pieces(model, 16)
    assert heard


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 9), torch.zeros(2, 8, dtype=torch.float16), torch.zeros(2, 8, device="meta")]
)
def test_inputs_that_a_kernel_would_misread_are_refused(x: torch.Tensor) -> None:
    layer = PackedLinear(packed_floats([random(16, 8)], [None]))
    with pytest.raises(ValueError, match="packed layer; it takes"):
        layer(x)
    with pytest.raises(ValueError, match="native RMSNorm; it takes"):
        NativeRMSNorm(torch.ones(8), 1e-6)(x)
