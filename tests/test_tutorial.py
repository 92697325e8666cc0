"""The tutorial does what it says: its baseline is an honest one, and the notebook runs from top to bottom."""

from __future__ import annotations

import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from transformers import PreTrainedModel

from conftest import byte_tokenizer, printable_model, random_prompt, solo
from serving import generate_stream, save_model
from triton_inflight.launcher import TritonServer

TUTORIALS = Path(__file__).parent.parent / "tutorials"
NOTEBOOK = TUTORIALS / "iterative_scheduling.ipynb"
MEASURE = TUTORIALS / "recompute_baseline" / "measure.py"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return printable_model()


@pytest.mark.server
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


def test_the_notebook_and_its_script_hold_the_same_cells() -> None:
    """The script is what is reviewed; `make tutorial` brings the notebook up to date."""
    script, notebook = jupytext.read(NOTEBOOK.with_suffix(".py")), nbformat.read(NOTEBOOK, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]


def test_the_saved_outputs_read_well() -> None:
    """Everything ran in order, without errors, warnings and progress bars, and nothing names a place of the machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    shown = "\n".join(
        output.text if output.output_type == "stream" else output.data.get("text/markdown", "")
        for output in outputs
    )
    assert re.findall(r"(?:/home|/root|/tmp|/work|/usr|/opt)/\S*|it/s\]|\x1b", shown) == []
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4


@pytest.mark.server
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model, and less of everything."""
    folder = save_model(tmp_path / "weights", model)
    monkeypatch.setenv("TUTORIAL_MODEL", str(folder))
    monkeypatch.setenv("TUTORIAL_SHORT", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
