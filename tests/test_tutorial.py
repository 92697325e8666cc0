"""The tutorial does what it says: its baseline is an honest one, and the notebook runs from top to bottom."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from conftest import byte_tokenizer, random_prompt, solo, tiny_model
from serving import generate_stream, save_model
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server

TUTORIALS = Path(__file__).parent.parent / "tutorials"
MEASURE = TUTORIALS / "recompute_baseline" / "measure.py"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Each of its tokens is a printable character, so that equal texts are equal tokens; it never ends by itself."""
    model = tiny_model("llama", tie_word_embeddings=False)
    letters = [byte_tokenizer().decode([token]) for token in range(256)]
    others = [not (letter.isascii() and letter.isprintable()) for letter in letters]
    model.lm_head.weight.data[torch.tensor([*others, True])] = 0
    return model


def test_the_baseline_without_a_cache_generates_the_same_tokens(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """Its sequences join and leave each other, so it is iterative, and its padding changes nothing."""
    folder = save_model(tmp_path / "weights", model)
    runpy.run_path(str(MEASURE))["make_repository"](tmp_path / "models", str(folder), "float32")
    prompts = [random_prompt(i, 5 + 12 * i) for i in range(4)]
    lengths = [12, 40, 7, 25]
    tokenizer = byte_tokenizer()
    expected = [
        tokenizer.decode(solo(model, tokenizer.encode(prompt), length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    with TritonServer(tmp_path / "models") as server, ThreadPoolExecutor(len(prompts)) as pool:
        for name in ("recompute", "inflight"):

            def ask(index: int, name: str = name) -> list[str]:
                events = generate_stream(server, name, prompts[index], max_tokens=lengths[index])
                return [event["text_output"] for event in events]

            answers = list(pool.map(ask, range(len(prompts))))
            assert ["".join(pieces) for pieces in answers] == expected
            assert [len(pieces) for pieces in answers] == lengths, "each token is a response"
