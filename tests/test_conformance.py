"""The probe lets through what can be reproduced, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from conftest import FAMILIES, generate_all, make_engine, random_prompt, solo, tiny_model
from triton_inflight.batch import Batch
from triton_inflight.conformance import TOLERANCE, probe
from triton_inflight.errors import ModelError
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.rope import freeze_rope
from triton_inflight.runner import Runner


@pytest.mark.parametrize("tokens_per_block", [16, 32])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_that_can_be_reproduced_passes(family: str, tokens_per_block: int) -> None:
    model = tiny_model(family)
    before = model.config.to_dict()
    found = probe(model, tokens_per_block)
    assert found.difference < TOLERANCE / 10
    assert len(found.shapes) == model.config.num_hidden_layers
    assert model.config.to_dict() == before, "the probe leaves the model as it was"


def test_the_probe_works_in_float32_whatever_the_model_is_in() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    assert probe(model, 16).difference < TOLERANCE / 10
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}),
    ],
)
def test_a_family_outside_the_attention_interface_is_refused(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="does not call attention through transformers' attention interface"):
        probe(tiny_model(family, **config), 16)


class MixesBatchMates(LlamaForCausalLM):
    """Adds to every token something of all tokens of the forward pass, as recurrent state would."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + 0.01 * input_ids.float().mean()
        return output


class CountsItsOwnPositions(LlamaForCausalLM):
    """Ignores the positions that it is given."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        own = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, **{**kwargs, "position_ids": own})


def _tiny_llama(kind: type[LlamaForCausalLM]) -> PreTrainedModel:
    config = tiny_model("llama").config
    assert isinstance(config, LlamaConfig)
    torch.manual_seed(0)
    return kind(config).eval()


@pytest.mark.parametrize("kind", [MixesBatchMates, CountsItsOwnPositions])
def test_a_model_that_answers_otherwise_in_a_batch_is_refused_with_the_number(
    kind: type[LlamaForCausalLM],
) -> None:
    with pytest.raises(ModelError, match=rf"{kind.__name__} is refused: .* differ .* by \d\.\de.\d\d of the"):
        probe(_tiny_llama(kind), 16)


class RotatesTables(Runner):
    """Reads every sequence's blocks in the wrong order."""

    def run_rows(self, batch: Batch, tensors: KVTensors, rows: torch.Tensor) -> torch.Tensor:
        return super().run_rows(
            dataclasses.replace(batch, tables=batch.tables.roll(1, dims=1)), tensors, rows
        )


class ShiftsPositions(Runner):
    """Is off by one."""

    def run_rows(self, batch: Batch, tensors: KVTensors, rows: torch.Tensor) -> torch.Tensor:
        return super().run_rows(dataclasses.replace(batch, positions=batch.positions + 1), tensors, rows)


@pytest.mark.parametrize("kind", [RotatesTables, ShiftsPositions])
def test_the_oracle_notices_a_runner_that_is_wrong(kind: type[Runner]) -> None:
    model = tiny_model("gpt2")
    prompts = [random_prompt(i, 40 + i) for i in range(3)]
    engine = make_engine(model, max_num_tokens=32)
    expected = [solo(model, engine._tokenizer.encode(p), 12) for p in prompts]
    assert generate_all(engine, prompts, [12] * 3)[0] == expected
    wrong = make_engine(model, max_num_tokens=32, runner=kind)
    assert generate_all(wrong, prompts, [12] * 3)[0] != expected


def test_a_window_that_is_ignored_is_noticed() -> None:
    """A sequence longer than the window differs from the same model without one."""
    model = tiny_model("mistral")
    prompt = random_prompt(0, 60)
    tokens = make_engine(model)._tokenizer.encode(prompt)
    windowed = solo(model, tokens, 12)
    assert generate_all(make_engine(model), [prompt], [12])[0] == [windowed]
    full = tiny_model("mistral", sliding_window=None)
    assert solo(full, tokens, 12) != windowed


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_depends_on_batch_mates_is_held_in_its_first_regime(kind: str) -> None:
    factors = [1.0] * 8
    scaling = {"factor": 2.0} if kind == "dynamic" else {"short_factor": factors, "long_factor": factors}
    config = AutoConfig.for_model(
        "llama",
        **FAMILIES["llama"],
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
            **scaling,
        },
    )
    assert freeze_rope(config, None) == 128
    assert freeze_rope(config, 100) == 100
    with pytest.raises(ModelError, match=rf"max_seq_len is 129.*{kind}.*at most 128"):
        freeze_rope(config, 129)


def test_an_ordinary_rope_sets_no_limit() -> None:
    assert freeze_rope(tiny_model("llama").config, None) is None
