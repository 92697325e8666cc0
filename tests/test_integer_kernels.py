"""Products of whole numbers: every version of the kernels is exact, and each row is on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from triton_inflight import _native
from triton_inflight.fused import GatedMLP
from triton_inflight.packed_weight import PackedWeight, packed_floats, packed_int4, packed_int8
from triton_inflight.quantized_numbers import GROUP, Int4Numbers, Int8Numbers, quantized_int4, quantized_int8

ISAS = pytest.mark.parametrize("isa", _native.supported_integer_isas(), ids=lambda isa: isa.name)
SHAPES = pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (33, 7), (64, 64), (100, 129), (40, 4096)])
ROWS = pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 29])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers from ``low`` to ``high``, as floats."""
    return torch.randint(low, high + 1, shape, generator=generator(seed)).float()


def rows_of_whole_numbers(rows: int, inputs: int) -> torch.Tensor:
    """Rows that stay as they are when they are quantised: the largest of each group is 127, so its scale is 1."""
    x = integers(-127, 127, rows, inputs, seed=1)
    x[:, ::GROUP] = 127
    return x


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """What rows become, in float32 operations, one for one those of the kernels."""
    missing = -x.shape[1] % GROUP
    groups = F.pad(x.float(), (0, missing)).view(len(x), -1, GROUP)
    peak = groups.abs().amax(-1, keepdim=True)
    # Between tensors: torch would turn 127 / peak into a product with the reciprocal.
    values = torch.round(groups * torch.where(peak > 0, torch.tensor(127.0) / peak, 0.0))
    return (peak / torch.tensor(127.0) * values).flatten(1)[:, : x.shape[1]]


def run(packed: PackedWeight, x: torch.Tensor, isa: _native.IntegerIsa) -> torch.Tensor:
    packed.runtime.integer_isa = isa
    return packed.linear(x)


def int8_weight(outputs: int, inputs: int) -> tuple[PackedWeight, torch.Tensor]:
    numbers = integers(-127, 127, outputs, inputs).to(torch.int8)
    scales = 2.0 ** integers(-3, 3, outputs, 1, seed=2)
    weight = Int8Numbers(numbers, scales)
    return packed_int8([weight], torch.float32, [None]), weight.dequantized()


def int4_weight(outputs: int, inputs: int) -> tuple[PackedWeight, torch.Tensor]:
    depth = -(-inputs // GROUP) * GROUP
    numbers = integers(0, 15, outputs, depth).to(torch.uint8)
    scales = (2.0 ** integers(-1, 1, outputs, depth // GROUP, seed=2)).half()
    minima = integers(-8, 0, outputs, depth // GROUP, seed=3).half()
    weight = Int4Numbers(numbers, scales, minima)
    return packed_int4([weight], inputs, torch.float32, [None]), weight.dequantized()[:, :inputs]


@ISAS
@SHAPES
@ROWS
@pytest.mark.parametrize("weight", [int8_weight, int4_weight])
def test_products_of_whole_numbers_are_exact(
    weight: object, outputs: int, inputs: int, rows: int, isa: _native.IntegerIsa
) -> None:
    """Sums of whole numbers below 2^24 times powers of two: floats hold every one of them exactly."""
    assert callable(weight)
    packed, numbers = weight(outputs, min(inputs, 1000))
    x = rows_of_whole_numbers(rows, min(inputs, 1000))
    assert torch.equal(run(packed, x, isa), (x.double() @ numbers.double().T).float())


@ISAS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_each_number_of_a_row_becomes_the_nearest_of_its_group(
    scale: float, dtype: torch.dtype, isa: _native.IntegerIsa
) -> None:
    """Seen through a weight that hands every input on as it is."""
    numbers = torch.eye(96).to(torch.uint8)
    ones, zeros = torch.ones(96, 3).half(), torch.zeros(96, 3).half()
    packed = packed_int4([Int4Numbers(numbers, ones, zeros)], 96, dtype, [None])
    x = (random(50, 96) * scale).to(dtype)
    x[3, :32] = 0
    packed.runtime.integer_isa = isa
    assert torch.equal(packed.linear(x, torch.float32), quantized_rows(x))


@ISAS
@SHAPES
@ROWS
def test_quantised_weights_with_bias_in_any_version(
    outputs: int, inputs: int, rows: int, isa: _native.IntegerIsa
) -> None:
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(rows, inputs, seed=2)
    int8, int4 = quantized_int8(weight), quantized_int4(weight)
    pairs = [
        (packed_int8([int8], torch.float32, [bias]), int8.dequantized()),
        (packed_int4([int4], inputs, torch.float32, [bias]), int4.dequantized()[:, :inputs]),
    ]
    for packed, numbers in pairs:
        expected = F.linear(quantized_rows(x).double(), numbers.double(), bias.double())
        assert torch.allclose(run(packed, x, isa).double(), expected, rtol=1e-5, atol=2e-6 * inputs)


@ISAS
@pytest.mark.parametrize("weight", [int8_weight, int4_weight])
def test_a_row_does_not_depend_on_who_shares_its_batch(weight: object, isa: _native.IntegerIsa) -> None:
    assert callable(weight)
    packed, _ = weight(96, 70)
    x = random(61, 70, seed=1)
    together = run(packed, x, isa)
    for first, last in [(0, 1), (3, 18), (40, 61)]:
        assert torch.equal(packed.linear(x[first:last]), together[first:last])
    packed.runtime.threads = 3
    assert torch.equal(packed.linear(x), together)


@ISAS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weight", [int8_weight, int4_weight])
def test_what_is_no_number_is_not_hidden_and_stays_in_its_row(
    weight: object, value: float, isa: _native.IntegerIsa
) -> None:
    assert callable(weight)
    packed, _ = weight(48, 70)
    x = random(9, 70)
    clean = run(packed, x, isa)
    x[4, 40] = value
    result = packed.linear(x)
    assert result[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], clean[others])


@ISAS
@pytest.mark.parametrize("rows", [1, 31])
@pytest.mark.parametrize("width", [16, 33, 96])
@pytest.mark.parametrize("kinds", ["int8 int8", "int4 int4", "floats int8", "int4 floats"])
def test_a_gated_mlp_of_any_two_weights(kinds: str, width: int, rows: int, isa: _native.IntegerIsa) -> None:
    gate, up, down = random(width, 50, seed=1), random(width, 50, seed=2), random(50, width, seed=3)
    bias, x = random(width, seed=4), random(rows, 50, seed=5)
    above, below = kinds.split()
    packed, (gate, up) = packed_as(above, [gate, up], [bias, None], gated=True)
    packed_below, (down,) = packed_as(below, [down], [None])
    packed.runtime.integer_isa = isa
    first = x if above == "floats" else quantized_rows(x)
    inner = F.silu(F.linear(first.double(), gate.double(), bias.double())) * F.linear(
        first.double(), up.double()
    )
    # A number that lies between two may go to either of them, as the last bit of what came before decides.
    step = inner.abs().amax() / 127 * down.abs().max() if below != "floats" else 0
    inner = inner if below == "floats" else quantized_rows(inner.float())
    expected = F.linear(inner.double(), down.double())
    result = GatedMLP(packed, packed_below)(x).double()
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max() + step


def packed_as(
    kind: str, weights: list[torch.Tensor], biases: list[torch.Tensor | None], gated: bool = False
) -> tuple[PackedWeight, list[torch.Tensor]]:
    """Packed weights, and what they are worth."""
    if kind == "int8":
        int8 = [quantized_int8(weight) for weight in weights]
        return packed_int8(int8, torch.float32, biases, gated), [numbers.dequantized() for numbers in int8]
    if kind == "int4":
        inputs = weights[0].shape[1]
        int4 = [quantized_int4(weight) for weight in weights]
        dequantized = [numbers.dequantized()[:, :inputs] for numbers in int4]
        return packed_int4(int4, inputs, torch.float32, biases, gated), dequantized
    return packed_floats(weights, biases, gated), weights


def test_whole_numbers_are_the_nearest_ones() -> None:
    weight = random(40, 70)
    int8 = quantized_int8(weight)
    assert int8.numbers.abs().amax(1).eq(127).all(), "the whole range is used"
    assert ((int8.dequantized() - weight).abs() <= 0.501 * int8.scales).all()
    int4 = quantized_int4(weight)
    difference = int4.dequantized()[:, :70] - weight
    assert difference.norm() / weight.norm() < 0.085, (
        "what rounding to 16 steps between the ends of a group costs"
    )


def test_weights_made_of_four_bits_come_out_as_they_were() -> None:
    numbers = integers(0, 15, 24, 96).to(torch.uint8)
    numbers[:, ::GROUP], numbers[:, 1::GROUP] = 0, 15
    made = Int4Numbers(numbers, random(24, 3).abs().half(), random(24, 3, seed=1).half())
    assert all(map(torch.equal, quantized_int4(made.dequantized()), made))


@pytest.mark.parametrize(
    "weight", [torch.zeros(32, 64), torch.full((32, 64), -0.5), torch.full((32, 40), 3.0)]
)
def test_weights_without_any_range(weight: torch.Tensor) -> None:
    assert torch.allclose(quantized_int8(weight).dequantized(), weight)
    int4 = quantized_int4(weight).dequantized()
    assert torch.equal(int4[:, : weight.shape[1]], weight)


def test_memory_of_packed_weights() -> None:
    weight = random(512, 576)
    int8 = packed_int8([quantized_int8(weight)], torch.bfloat16, [None])
    int4 = packed_int4([quantized_int4(weight)], 576, torch.bfloat16, [None])
    assert int8.nbytes == weight.numel() + 4 * 512
    assert int4.nbytes == weight.numel() * 5 // 8


_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_FLAGS = {
    "integer_avx2.cpp": _AVX2,
    "integer_avx_vnni.cpp": [*_AVX2, "-mavxvnni"],
    "integer_avx512.cpp": [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))],
}


def test_random_products_under_sanitizers(tmp_path: Path) -> None:
    """Memory errors and undefined behaviour in every version that runs here."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    sources = Path(__file__).parents[1] / "cpp_ext"
    on_x86 = len(_native.supported_integer_isas()) > 1
    files = ["tests/integer_fuzz.cpp", "cpu_features.cpp", "integer_kernel.cpp", "integer_portable.cpp"]
    files += _FLAGS if on_x86 else []
    sanitize = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = []
    for file in files:
        objects.append(tmp_path / f"{Path(file).stem}.o")
        command = [compiler, *sanitize, *_FLAGS.get(file, []), "-c", sources / file, "-o", objects[-1]]
        subprocess.run(command, check=True)
    program = tmp_path / "integer_fuzz"
    subprocess.run([compiler, *sanitize, *objects, "-o", program], check=True)
    done = subprocess.run([program, "300"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 300 products") == len(_native.supported_integer_isas())
