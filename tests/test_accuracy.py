"""The accuracy command: its figures are what they say, and the shipped text is what it says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from conftest import EOS, byte_tokenizer, solo, tiny_model
from serving import add_model, save_model
from triton_inflight.bench_served import copy_model
from triton_inflight.errors import InflightError, SettingsError
from triton_inflight.settings import Settings

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import accuracy  # noqa: E402
from accuracy_figures import Scored, agreement, change, same_best  # noqa: E402
from accuracy_runs import Task, prompts_of, run_engine, run_transformers, windows_of  # noqa: E402
from accuracy_variants import name_of, variants_of  # noqa: E402

TEXT = (BENCHMARKS / "texts" / "persuasion.txt").read_text(encoding="ascii")


def settings_of(folder: Path, **parameters: object) -> Settings:
    add_model(folder / "models", "tiny", folder / "llama", dtype="float32", **parameters)
    return copy_model(folder / "models", "tiny", {}, folder / "copy")


# -- figures ------------------------------------------------------------------------------------------------


def test_change_is_relative_and_its_error_paired() -> None:
    """Windows of very different difficulty, each 0.01 or 0.03 harder: only the 0.01 and 0.03 make the spread."""
    base = Scored([1.0, 5.0, 3.0, 4.0], [])
    worse = Scored([1.01, 5.03, 3.01, 4.03], [])
    found = change(worse, base)
    assert worse.perplexity / base.perplexity - 1 == pytest.approx(found.value)
    assert found.value == pytest.approx(math.exp(0.02) - 1)
    deviation = math.sqrt(4 * 0.01**2 / 3)  # of .01, .03, .01, .03, from three degrees of freedom
    assert found.error == pytest.approx(2 * math.exp(0.02) * deviation / math.sqrt(4))
    assert change(base, base).value == change(base, base).error == 0


def test_agreement_counts_the_tokens_that_an_answer_lacks() -> None:
    ours = [[1, 2, 3, 4], [5, 6], [7, 8]]
    theirs = [[1, 9, 3, 4], [5, 6, 7, 8], [7, 8]]
    found = agreement(ours, theirs)
    assert found.before_divergence == (1 + 2 + 2) / (4 + 4 + 2)
    assert found.overall == (3 + 2 + 2) / 10
    assert found.identical == 1 / 3
    assert agreement(theirs, ours) == found


def test_same_best_is_a_share_of_all_places() -> None:
    assert same_best(Scored([], [[1, 2, 3], [4]]), Scored([], [[1, 0, 3], [5]])) == 2 / 4


# -- what is measured ---------------------------------------------------------------------------------------


def test_the_shipped_text_is_clean_and_as_described() -> None:
    """Plain ASCII prose, one line a paragraph; of the size that its description gives, so both change together."""
    paragraphs = TEXT.removesuffix("\n").split("\n\n")
    assert all(paragraph == " ".join(paragraph.split()) for paragraph in paragraphs)
    assert "Gutenberg" not in TEXT
    assert f"{len(TEXT):,} bytes" in (BENCHMARKS / "texts" / "README.md").read_text()


def test_windows_follow_each_other_and_all_are_as_long() -> None:
    tokenizer = byte_tokenizer()
    windows = windows_of(TEXT[:1000], tokenizer, 64)
    assert [len(window) for window in windows] == [64] * (1000 // 64)
    assert "".join(map(tokenizer.decode, windows)) == TEXT[: 1000 // 64 * 64]
    assert windows_of(TEXT[:1000], tokenizer, 64, most=3) == windows[:3]
    with pytest.raises(InflightError, match="100 tokens, too few for two windows of 64"):
        windows_of(TEXT[:100], tokenizer, 64)


def test_each_window_begins_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    windows = windows_of(TEXT[:1000], tokenizer, 64)
    assert all(window[0] == EOS and len(window) == 64 for window in windows)
    assert "".join(tokenizer.decode(window[1:]) for window in windows) == TEXT[: 1000 // 63 * 63]


def test_prompts_are_chats_and_pieces_of_the_text_and_always_the_same() -> None:
    tokenizer = byte_tokenizer()
    windows = windows_of(TEXT, tokenizer, 256)
    prompts = prompts_of(windows, tokenizer, 9, seed=1)
    assert prompts == prompts_of(windows, tokenizer, 9, seed=1) != prompts_of(windows, tokenizer, 9, seed=2)
    assert all(tokenizer.decode(json.loads(prompt["input_ids"])) in TEXT for prompt in prompts)
    tokenizer.chat_template = "{{ messages }}"
    assert ["messages" in prompt for prompt in prompts_of(windows, tokenizer, 9, seed=1)] == [True] * 3 + [
        False
    ] * 6


def test_variants_are_the_dtypes_alone_and_all_combinations() -> None:
    names = [
        name_of(changes)
        for changes in variants_of(["dtype=bfloat16", "max_num_tokens=8", "max_num_tokens=9"])
    ]
    assert names == ["float32", "bfloat16", "bfloat16, max_num_tokens=8", "bfloat16, max_num_tokens=9"]
    with pytest.raises(SettingsError, match="'dtype' is not KEY=VALUE"):
        list(variants_of(["dtype"]))


# -- runs ---------------------------------------------------------------------------------------------------


def test_scores_and_answers_are_those_of_the_stock_model(tmp_path: Path) -> None:
    """With prompts in pieces: the engine must put their log probabilities together in the right order."""
    model = tiny_model("llama")
    save_model(tmp_path / "llama", model)
    settings = settings_of(tmp_path, max_num_tokens=48)
    windows = windows_of(TEXT, byte_tokenizer(), 100, most=3)
    task = Task(windows, prompts_of(windows, byte_tokenizer(), 3, seed=0), 8)
    done: list[int] = []
    ours, theirs = run_engine(settings, task, done.append), run_transformers(settings, task, done.append)
    for window, nll, best in zip(windows, ours.scored.nll, ours.scored.best, strict=True):
        logits = model(torch.tensor([window])).logits[0].double()
        picked = [logits[i].log_softmax(-1)[token].item() for i, token in enumerate(window[1:])]
        assert nll == pytest.approx(-sum(picked) / 99, rel=1e-5)
        assert best == logits[:-1].argmax(-1).tolist()
    assert theirs.scored.nll == pytest.approx(ours.scored.nll, rel=1e-5)
    assert theirs.scored.best == ours.scored.best
    for prompt, answer in zip(task.prompts, ours.answers, strict=True):
        assert answer == solo(model, json.loads(prompt["input_ids"]), 8)
    assert sum(done) <= task.tokens + len(windows) + task.text_tokens


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.get_output_embeddings().weight.data *= 1e-6  # not 0, which nothing could be compared with at load
    save_model(tmp_path / "llama", model)
    task = Task(windows_of(TEXT, byte_tokenizer(), 64, most=2), [], 1)
    outcome = run_engine(settings_of(tmp_path), task, lambda _: None)
    assert outcome.scored.perplexity == pytest.approx(model.config.vocab_size, rel=1e-4)


def test_the_command_reports_every_run_and_names_those_that_fail(tmp_path: Path) -> None:
    save_model(tmp_path / "llama", tiny_model("llama"))
    add_model(tmp_path / "models", "tiny", tmp_path / "llama")
    path = tmp_path / "report.json"
    arguments = ["--quick", "--model-repository", str(tmp_path / "models"), "--model", "tiny"]
    arguments += ["--set", "tokens_per_block=64", "--set", "tokens_per_block=33", "--json", str(path)]
    outcome = CliRunner().invoke(accuracy.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    plain = ["float32", "float32, transformers", "bfloat16"]
    assert set(rows) == {*plain, "float32, tokens_per_block=64", "bfloat16, tokens_per_block=64"}
    assert set(report["left_out"]) == {"float32, tokens_per_block=33", "bfloat16, tokens_per_block=33"}
    assert all("tokens_per_block" in reason for reason in report["left_out"].values())
    reference, same, other = rows["float32"], rows["float32, tokens_per_block=64"], rows["bfloat16"]
    assert reference["to_reference"] is reference["to_plain"] is None
    assert abs(same["to_plain"]["value"]) < 1e-5
    assert same["greedy"] == {"before_divergence": 1, "overall": 1, "identical": 1}
    assert 1e-5 < abs(other["to_reference"]["value"]) < 0.05, "bfloat16 is close to float32, and not float32"
    assert other["to_plain"] is None
    assert rows["float32, transformers"]["greedy"] is None
    assert report["counted_tokens"] == 3 * 127


def test_a_reference_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(accuracy.app, ["--quick", "--model-repository", str(tmp_path)])
    assert isinstance(outcome.exception, SettingsError)
