"""Text over the wire: no half character, no lost space, no beginning of a stop, however it is cut into responses."""

from __future__ import annotations

import json
import queue
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import sentencepiece
import tritonclient.grpc as grpcclient
from transformers import LlamaTokenizer, PreTrainedTokenizerBase

from scripted import Scripts
from serving import add_model, generate
from triton_inflight.launcher import TritonServer
from triton_inflight.weights import DEFAULT_REFERENCE, describe

pytestmark = pytest.mark.server

INTERVALS = [1, 2, 3, 4, 5]
MODELS = ["byte_level", "sentencepiece"]
TEXTS = {
    "emoji": "Hi 👩‍🚀🏳️‍🌈👍🏽 🇺🇦!",
    "cyrillic": "Привет, как дела?",
    "cjk": "你好,世界。日本語 한국어",
    "arabic": "مرحبا بالعالم",
    "combining marks": "e\u0301 a\u0308\u0323 z\u0351\u036b",
    "spaces": "  two before, two after  ",
    "newlines": "\n\nlines\n\tand tabs\r\n",
    "no characters of one token": "\U0001d518\U0001d52b ⌈x⌉",
}


class Stop(NamedTuple):
    """Where a stop string ends a text.

    Attributes:
        pieces: the text, by tokens of the byte-level tokenizer.
        stops: what is asked for.
        shown: what is left of the text.
        ended_by: which of them ended it; None where none does.
        parameters: what else is asked for.
    """

    pieces: list[str]
    stops: list[str]
    shown: str
    ended_by: str | None
    parameters: Mapping[str, Any] = MappingProxyType({})


STOPS = {
    "inside a token": Stop([" one", " wonderful", " day"], ["onde"], " one w", "onde"),
    "over three tokens": Stop([" one", " two", " three", " four"], ["wo three fo"], " one t", "wo three fo"),
    "overlapping, the first complete": Stop(
        [" one", " two", " three", " four"], [" two three four", "wo three"], " one t", "wo three"
    ),
    "overlapping, complete together": Stop(
        [" one", " two", " three"], ["three", "two three"], " one ", "two three"
    ),
    "at the very first token": Stop([" one", " two"], [" one"], "", " one"),
    "in the very first token": Stop([" one", " two"], ["o"], " ", "o"),
    "only begun": Stop([" one", " two"], [" two three", "two four"], " one two", None),
    "begun twice": Stop(["aa", "aa", "b"], ["aab"], "aa", "aab"),
    "a character of several tokens": Stop(["x", "👍🏽", " y"], ["👍🏽"], "x", "👍🏽"),
    "the text of EOS": Stop([" one"], ["<|im_end|>"], " one", None),
    "the text of EOS, which is shown and does not end": Stop(
        [" one"],
        ["<|im_end|>"],
        " one",
        "<|im_end|>",
        {"ignore_eos": True, "skip_special_tokens": False},
    ),
}


def _trained(folder: Path) -> PreTrainedTokenizerBase:
    """A small sentencepiece vocabulary with byte fallback, as Llama 2 and Mistral have."""
    corpus = folder / "corpus.txt"
    text = "the quick brown fox jumps over a lazy dog and says hello two lines before after tabs"
    corpus.write_text("\n".join(f"{first} {second}." for first in text.split() for second in text.split()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return LlamaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    return {
        "byte_level": describe(DEFAULT_REFERENCE).tokenizer,
        "sentencepiece": _trained(tmp_path_factory.mktemp("sentencepiece")),
    }


@pytest.fixture(scope="module")
def scripts(tokenizers: dict[str, PreTrainedTokenizerBase]) -> dict[str, Scripts]:
    def ids(model: str, text: str) -> list[int]:
        return tokenizers[model].encode(text, add_special_tokens=False)

    texts = {model: {name: ids(model, text) for name, text in TEXTS.items()} for model in MODELS}
    for name, stop in STOPS.items():
        texts["byte_level"][name] = [i for piece in stop.pieces for i in ids("byte_level", piece)]
    return {model: Scripts(texts[model], tokenizers[model]) for model in MODELS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Scripts]) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("models")
    for model in MODELS:
        folder = scripts[model].save(tmp_path_factory.mktemp("weights"))
        add_model(repository, model, folder, dtype="float32", max_tokens_in_paged_kv_cache=8192)
    with TritonServer(repository) as running:
        yield running


class Asking:
    """Requests for texts that the models have by heart."""

    def __init__(
        self,
        server: TritonServer,
        scripts: dict[str, Scripts],
        tokenizers: dict[str, PreTrainedTokenizerBase],
    ) -> None:
        self._server, self._scripts, self._tokenizers = server, scripts, tokenizers

    def whole(self, model: str, name: str, **fields: Any) -> dict[str, Any]:
        """The unstreamed reply."""
        return generate(self._server, model, "", **self._fields(model, name), **fields)

    def http(self, model: str, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream; each must be UTF-8 by itself."""
        body = {"text_input": "", "stream": True, **self._fields(model, name), **fields}
        address = f"{self._server.http_url}/v2/models/{model}/generate_stream"
        with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=60) as response:
            events = [event.removeprefix(b"data: ") for event in response.read().split(b"\n\n") if event]
        return [json.loads(event.decode("utf-8", "strict")) for event in events]

    def grpc(self, model: str, name: str, **fields: Any) -> list[str]:
        """The texts of a gRPC stream; each must be UTF-8 by itself."""
        results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with grpcclient.InferenceServerClient(self._server.grpc_url) as client:
            client.start_stream(callback=lambda result, error: results.put((result, error)))
            tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[b""]], dtype=object))
            parameters = {"stream": True, **self._fields(model, name), **fields}
            client.async_stream_infer(model, [tensor], parameters=parameters)
            texts = []
            while True:
                result, error = results.get(timeout=60)
                assert error is None, error
                texts.append(result.as_numpy("text_output").item().decode("utf-8", "strict"))
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return texts

    def _fields(self, model: str, name: str) -> dict[str, Any]:
        filler = self._tokenizers[model].encode("the", add_special_tokens=False)[-1]
        return {"input_ids": self._scripts[model].prompt(name, filler), "max_tokens": 200}


@pytest.fixture(scope="module")
def asking(
    server: TritonServer, scripts: dict[str, Scripts], tokenizers: dict[str, PreTrainedTokenizerBase]
) -> Asking:
    return Asking(server, scripts, tokenizers)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_joined_stream_is_the_whole_text_in_whole_characters(asking: Asking, model: str, name: str) -> None:
    expected = TEXTS[name]
    if model == "sentencepiece" and not expected.startswith(" "):
        expected = (
            f" {expected}"  # it begins every text with a space, which is the first word's after a prompt
        )
    with ThreadPoolExecutor(2 * len(INTERVALS)) as pool:
        over_http = [pool.submit(asking.http, model, name, stream_interval=i) for i in INTERVALS]
        over_grpc = [pool.submit(asking.grpc, model, name, stream_interval=i) for i in INTERVALS]
        whole = asking.whole(model, name)
    assert whole["text_output"] == expected
    for interval, events, texts in zip(INTERVALS, over_http, over_grpc, strict=True):
        pieces = [event["text_output"] for event in events.result()]
        assert "".join(pieces) == expected
        assert "".join(texts.result()) == expected
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in (*pieces, *texts.result()))
        if interval == 1:
            assert len(pieces) > 3, "the text came in pieces"


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_ends_the_text_and_nothing_of_it_is_ever_sent(
    asking: Asking, name: str, interval: int
) -> None:
    case = STOPS[name]
    fields = {
        "stop": json.dumps(case.stops),
        "return_finish_reason": True,
        "return_stop_reason": True,
        **case.parameters,
    }
    events = asking.http("byte_level", name, stream_interval=interval, **fields)
    assert "".join(event["text_output"] for event in events) == case.shown
    assert events[-1]["finish_reason"] == "stop"
    assert events[-1]["stop_reason"] == (case.ended_by or "")
    assert not any("finish_reason" in event for event in events[:-1])
    if interval == 1:
        assert asking.whole("byte_level", name, **fields)["text_output"] == case.shown


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_can_be_kept_and_nothing_after_it_is_sent(asking: Asking, name: str, interval: int) -> None:
    case = STOPS[name]
    fields = {"stop": json.dumps(case.stops), "include_stop_str_in_output": True, **case.parameters}
    events = asking.http("byte_level", name, stream_interval=interval, **fields)
    expected = case.shown + (case.ended_by or "")
    assert "".join(event["text_output"] for event in events) == expected


def test_each_response_has_at_least_as_many_tokens_as_the_interval(asking: Asking) -> None:
    """But for the first, which comes at once, and the last."""
    for interval in INTERVALS:
        events = asking.http("byte_level", "spaces", stream_interval=interval, return_num_output_tokens=True)
        counts = [event["num_output_tokens"] for event in events]
        assert counts[0] == 1
        assert all(count >= interval for count in counts[1:-1])
        assert (
            sum(counts)
            == asking.whole("byte_level", "spaces", return_num_output_tokens=True)["num_output_tokens"]
        )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prompt", ["Привет 👋🏽 ", " 你好\n", "e\u0301\t"])
def test_a_prompt_comes_back_letter_for_letter_where_it_is_asked_for(
    server: TritonServer, tokenizers: dict[str, PreTrainedTokenizerBase], model: str, prompt: str
) -> None:
    reply = generate(
        server, model, prompt, max_tokens=1, exclude_input_in_output=False, return_num_input_tokens=True
    )
    assert reply["text_output"].startswith(prompt)
    assert reply["num_input_tokens"] == len(tokenizers[model].encode(prompt))
