# Types of the C++ module; the docstrings are its own (help(KVStore)).
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

interface_hash: str

class Isa:
    portable: Isa
    avx2: Isa
    avx512: Isa
    avx512_bf16: Isa
    name: str

def supported_isas() -> list[Isa]: ...
def chosen_isa() -> Isa: ...

class PoolLayout:
    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        heads: int,
        key_width: int,
        value_width: int,
        bf16: bool,
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def key_width(self) -> int: ...
    @property
    def value_width(self) -> int: ...
    @property
    def block_size(self) -> int: ...

class AttentionPlan:
    def __init__(
        self,
        tables: NDArray[np.int32],
        starts: Sequence[int],
        lengths: Sequence[int],
        layout: PoolLayout,
        query_heads: int,
        window: int,
        threads: int,
    ) -> None: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_items(self) -> int: ...

def paged_attention(
    plan: AttentionPlan,
    layout: PoolLayout,
    isa: Isa,
    pool: int,
    queries: tuple[int, int, int, bool],
    keys: tuple[int, int, int, bool],
    values: tuple[int, int, int, bool],
    out: tuple[int, int, int, bool],
    scale: float,
    softcap: float,
    sinks: int,
) -> None: ...

class IntegerIsa:
    portable: IntegerIsa
    avx2: IntegerIsa
    avx_vnni: IntegerIsa
    avx512_vnni: IntegerIsa
    name: str

def supported_integer_isas() -> list[IntegerIsa]: ...

class Runtime:
    threads: int
    integer_isa: IntegerIsa
    def __init__(self, isa: Isa, threads: int) -> None: ...
    @property
    def isa(self) -> Isa: ...

class WeightType:
    float32: WeightType
    bf16: WeightType
    int8: WeightType
    int4: WeightType
    name: str

class PackedWeight:
    def __init__(
        self, address: int, bias: int, scales: int, columns: int, depth: int, type: WeightType
    ) -> None: ...

_Rows = tuple[int, int, bool]
_Heads = tuple[int, int, int, int]

def linear(
    runtime: Runtime,
    weight: PackedWeight,
    input: _Rows,
    width: int,
    rows: int,
    out: _Rows,
    columns: int,
) -> None: ...
def gated_mlp(
    runtime: Runtime,
    gate_up: PackedWeight,
    down: PackedWeight,
    input: _Rows,
    width: int,
    rows: int,
    out: _Rows,
    columns: int,
) -> None: ...
def rms_norm(
    runtime: Runtime, input: _Rows, out: _Rows, scale: int, width: int, rows: int, epsilon: float
) -> None: ...
def rotate(
    runtime: Runtime,
    input: _Heads,
    out: _Heads,
    cosines: _Rows,
    sines: _Rows,
    width: int,
    total: int,
    tokens: int,
) -> None: ...

class LayerWeights:
    def __init__(
        self,
        first_norm: tuple[int, float],
        attention_input: PackedWeight,
        attention_output: PackedWeight,
        second_norm: tuple[int, float],
        gate_up: PackedWeight,
        down: PackedWeight,
        hidden: int,
        input_columns: int,
        output_depth: int,
        head_width: int,
        query_heads: int,
        key_heads: int,
        first_key: int,
        first_value: int,
    ) -> None: ...

def decoder_stack(
    runtime: Runtime,
    layers: Sequence[LayerWeights],
    rows: int,
    bf16: bool,
    x: int,
    cosines: int,
    sines: int,
    plan: AttentionPlan,
    layout: PoolLayout,
    isa: Isa,
    pools: Sequence[int],
    scale: float,
) -> None: ...
def layer_input(
    runtime: Runtime,
    layer: LayerWeights,
    rows: int,
    bf16: bool,
    input: int,
    cosines: int,
    sines: int,
    out: int,
) -> None: ...
def layer_output(
    runtime: Runtime, layer: LayerWeights, rows: int, bf16: bool, input: int, attention: int, out: int
) -> None: ...

class KVStore:
    def __init__(self, num_blocks: int, tokens_per_block: int, reuse: bool = False) -> None: ...
    def reserve(
        self, sequence: int, choice: int, start: int, length: int
    ) -> list[tuple[int, int]] | None: ...
    def blocks_needed(self, sequence: int, choice: int, start: int, length: int) -> int: ...
    def layout(
        self,
        sequences: NDArray[np.uint64],
        choices: NDArray[np.uint32],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
    def trim(self, sequence: int, choice: int, length: int) -> None: ...
    def fork(self, sequence: int, source: int, destination: int) -> None: ...
    def drop(self, sequence: int, choice: int) -> int: ...
    def free(self, sequence: int) -> int: ...
    def publish(
        self, sequence: int, choice: int, tokens: NDArray[np.int32] | NDArray[np.int64], computed: int
    ) -> None: ...
    def match_prefix(
        self, sequence: int, choice: int, tokens: NDArray[np.int32] | NDArray[np.int64]
    ) -> int: ...
    def blocks(self, sequence: int, choice: int) -> list[int]: ...
    def live(self) -> list[int]: ...
    def check(self) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def reuse(self) -> bool: ...
