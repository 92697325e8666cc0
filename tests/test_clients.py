"""Clients as they are: each test sends what a client of another backend or tool sends, to a real server."""

from __future__ import annotations

import json
import queue
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from transformers import PreTrainedModel
from tritonclient.utils import np_to_triton_dtype

from conftest import byte_tokenizer, solo, tiny_model
from serving import add_model, generate, generate_stream, save_model
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model

pytestmark = pytest.mark.server

PROMPT = "What clients send"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its likeliest tokens are printable, and never the end of the sequence."""
    model = tiny_model("llama", tie_word_embeddings=False)
    printable = [
        token for token, letter in enumerate(_letters()) if letter.isascii() and letter.isprintable()
    ]
    others = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
    others[printable] = False
    model.lm_head.weight.data[others] = 0
    return model


def _letters() -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode([token]) for token in range(256)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "lean", folder, dtype="float32", max_tokens_in_paged_kv_cache=8192)
    compat = init_model(repository, "compat", str(folder), "float32", max_batch_size=8, compat=True)
    default = 'parameters { key: "default_max_tokens" value { string_value: "9" } }\n'
    compat.write_text(compat.read_text() + default)
    unary = init_model(repository, "unary", str(folder), "float32", max_batch_size=8, compat=True)
    unary.write_text(unary.read_text() + "model_transaction_policy { decoupled: false }\n")
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[int, str]:
    """What the stock model says to PROMPT alone, by the number of tokens, each of which is a letter."""
    ids = solo(model, byte_tokenizer().encode(PROMPT), 40)
    text = byte_tokenizer().decode(ids)
    assert len(text) == 40
    return {count: text[:count] for count in range(1, 41)}


def _inputs(kind: Any, tensors: dict[str, Any]) -> list[Any]:
    """Input tensors of one of tritonclient's two kinds; what is no array gets the shape [1, 1]."""
    inputs = []
    for name, value in tensors.items():
        array = value if isinstance(value, np.ndarray) else _one(value)
        tensor = kind.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _one(value: Any) -> np.ndarray:
    types = {str: np.object_, bool: np.bool_, int: np.int32, float: np.float32}
    return np.array([[value.encode() if isinstance(value, str) else value]], types[type(value)])


def _texts(*values: str) -> np.ndarray:
    return np.array([[value.encode() for value in values]], np.object_)


def stream(
    server: TritonServer,
    model: str,
    tensors: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    **options: Any,
) -> list[grpcclient.InferResult]:
    """The responses to one request on a gRPC stream, up to the one that is flagged as final.

    Raises:
        InferenceServerException: the answer is an error.
    """
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(
            model,
            _inputs(grpcclient, tensors),
            parameters=parameters,
            enable_empty_final_response=True,
            **options,
        )
        responses = []
        while not responses or not _is_final(responses[-1]):
            result, error = results.get(timeout=60)
            if error is not None:
                raise error
            responses.append(result)
        assert results.empty()
    return responses


def _is_final(result: grpcclient.InferResult) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def joined(responses: list[grpcclient.InferResult]) -> str:
    """The text of all responses; each has to hold one string that is not empty, as clients rely on."""
    texts = [result.as_numpy("text_output") for result in responses]
    assert all(text is not None and text.size == 1 and text.item() for text in texts)
    return "".join(text.item().decode() for text in texts)


# -- tritonclient, curl -------------------------------------------------------------------------------------


def test_tritonclient_over_a_grpc_stream(server: TritonServer, expected: dict[int, str]) -> None:
    """Numbers with a fraction come as text: gRPC parameters are integers, booleans and strings."""
    parameters = {"stream": True, "max_tokens": 12, "temperature": "0.0", "return_finish_reason": True}
    responses = stream(server, "lean", {"text_input": PROMPT}, parameters)
    assert joined(responses) == expected[12]
    assert len(responses) == 12, "the final flag is on the last text, not on a response of its own"
    assert responses[-1].as_numpy("finish_reason").item() == b"length"
    (whole,) = stream(server, "lean", {"text_input": PROMPT}, {"max_tokens": 12})
    assert joined([whole]) == expected[12]


@pytest.mark.parametrize("name", ["lean", "compat"])
def test_http_generate(server: TritonServer, expected: dict[int, str], name: str) -> None:
    reply = generate(server, name, PROMPT, max_tokens=12, temperature=0.0, return_num_output_tokens=True)
    assert (reply["status"], reply["text_output"], reply["num_output_tokens"]) == (200, expected[12], 12)


def _curl(server: TritonServer, path: str, body: str) -> str:
    address = f"{server.http_url}/v2/models/{path}"
    command = ["curl", "-sN", "-X", "POST", address, "-d", body]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_curl_generate_and_generate_stream(server: TritonServer, expected: dict[int, str]) -> None:
    reply = _curl(server, "lean/generate", f'{{"text_input": "{PROMPT}", "max_tokens": 5}}')
    assert json.loads(reply)["text_output"] == expected[5]
    body = f'{{"text_input": "{PROMPT}", "parameters": {{"stream": true, "max_tokens": 5}}}}'
    events = _curl(server, "lean/generate_stream", body).split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["text_output"] for event in events if event]
    assert texts == list(expected[5])


# -- TensorRT-LLM's backend ---------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_tensorrt_llm_end_to_end_grpc_client(
    server: TritonServer, expected: dict[int, str], streaming: bool
) -> None:
    responses = stream(
        server,
        "compat",
        {
            "text_input": PROMPT,
            "max_tokens": 16,
            "bad_words": _texts(""),
            "stop_words": _texts(""),
            "stream": streaming,
            "beam_width": 1,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
            "length_penalty": 1.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "random_seed": np.array([[0]], np.uint64),
            "end_id": 256,
            "pad_id": 256,
            "return_log_probs": True,
            "return_context_logits": False,
            "return_generation_logits": False,
        },
        request_id="1",
    )
    assert joined(responses) == expected[16]
    assert len(responses) == (16 if streaming else 1)
    assert responses[-1].as_numpy("cum_log_probs").shape == (1, 1)
    assert responses[0].as_numpy("output_log_probs").shape == (1, 1, 1 if streaming else 16)


def test_tensorrt_llm_stop_and_bad_words(server: TritonServer, expected: dict[int, str]) -> None:
    stop = expected[16][9:12]
    tensors = {"text_input": PROMPT, "max_tokens": 16, "stop_words": _texts("never comes", stop)}
    assert joined(stream(server, "compat", tensors)) == expected[16][: expected[16].index(stop)]
    bad = expected[1]
    tensors = {"text_input": PROMPT, "max_tokens": 16, "bad_words": _texts(bad)}
    assert bad not in joined(stream(server, "compat", tensors))


@pytest.mark.parametrize("streaming", [False, True])
def test_tensorrt_llm_inflight_batcher_client(
    server: TritonServer, model: PreTrainedModel, streaming: bool
) -> None:
    """It has a tokenizer of its own: token ids in, token ids out, no text_input at all."""
    prompt = byte_tokenizer().encode(PROMPT)
    responses = stream(
        server,
        "compat",
        {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": len(prompt),
            "request_output_len": 16,
            "beam_width": 1,
            "temperature": 1.0,
            "runtime_top_k": 1,
            "runtime_top_p": 1.0,
            "len_penalty": 1.0,
            "repetition_penalty": 1.0,
            "random_seed": np.array([[0]], np.uint64),
            "end_id": 256,
            "pad_id": 256,
            "streaming": streaming,
            "return_log_probs": False,
        },
    )
    said = []
    for result in responses:
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        said += ids[0][0][: lengths[0][0]].tolist()
    assert said == solo(model, prompt, 16)
    assert len(responses) == (16 if streaming else 1)


def test_tensorrt_llm_num_return_sequences(server: TritonServer) -> None:
    """A response for each answer, told apart by sequence_index."""
    responses = stream(
        server,
        "compat",
        {
            "text_input": PROMPT,
            "max_tokens": 8,
            "num_return_sequences": 3,
            "temperature": 1.0,
            "seed": np.array([[7]], np.uint64),
        },
    )
    assert [result.as_numpy("sequence_index").item() for result in responses] == [0, 1, 2]
    assert len({result.as_numpy("text_output").item() for result in responses}) == 3


# -- genai-perf and perf_analyzer ---------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_genai_perf_for_vllm(server: TritonServer, expected: dict[int, str], streaming: bool) -> None:
    """Its numbers are strings inside of JSON."""
    tensors = {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({"max_tokens": "16", "min_tokens": "16"}),
        **({"stream": True} if streaming else {}),
    }
    assert joined(stream(server, "compat", tensors)) == expected[16]


@pytest.mark.parametrize("streaming", [False, True])
def test_genai_perf_for_tensorrt_llm(server: TritonServer, expected: dict[int, str], streaming: bool) -> None:
    tensors = {
        "text_input": PROMPT,
        "max_tokens": 16,
        "min_length": 16,
        "exclude_input_in_output": True,
        **({"stream": True} if streaming else {}),
    }
    assert joined(stream(server, "compat", tensors)) == expected[16]


@pytest.mark.parametrize("name", ["lean", "compat"])
def test_genai_perf_for_generate(server: TritonServer, expected: dict[int, str], name: str) -> None:
    """Its prompt is a list of one; so is that of perf_analyzer with `--service-kind openai`, which sends the same."""
    events = generate_stream(server, name, [PROMPT], max_tokens=16)
    assert "".join(event["text_output"] for event in events) == expected[16]


def test_perf_analyzer_with_sequences_of_one_request(server: TritonServer, expected: dict[int, str]) -> None:
    """`--sequence-length 1`: both flags on each request, and every output of the config asked for by name."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        metadata = client.get_model_metadata("compat")
    outputs = [grpcclient.InferRequestedOutput(output.name) for output in metadata.outputs]
    for sequence_id in (2**32, 2**32 + 1):
        responses = stream(
            server,
            "compat",
            {"text_input": PROMPT, "max_tokens": 16, "stream": True},
            outputs=outputs,
            sequence_id=sequence_id,
            sequence_start=True,
            sequence_end=True,
        )
        assert joined(responses) == expected[16]


# -- Triton's OpenAI frontend and CLI -----------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_openai_frontend(server: TritonServer, expected: dict[int, str], streaming: bool) -> None:
    """Its route for backends that are not vLLM's; it adds the numbers of tokens up."""
    responses = stream(
        server,
        "compat",
        {
            "text_input": PROMPT,
            "stream": streaming,
            "max_tokens": 20,
            "temperature": 0.0,
            "top_p": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "stop_words": _texts("never comes", "nor this"),
            "seed": np.array([[2**63 + 5]], np.uint64),
            "exclude_input_in_output": True,
        },
    )
    assert joined(responses) == expected[20]
    for result in responses:
        assert result.as_numpy("num_input_tokens").tolist() == [len(PROMPT)]
        assert result.as_numpy("num_input_tokens").dtype == np.uint32
    assert sum(result.as_numpy("num_output_tokens").item() for result in responses) == 20


def test_triton_cli_sends_only_what_is_not_optional(server: TritonServer, expected: dict[int, str]) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        config = client.get_model_config("compat").config
    required = [tensor.name for tensor in config.input if not tensor.optional]
    assert required == ["text_input"]
    assert joined(stream(server, "compat", {"text_input": PROMPT})) == expected[9]


# -- vLLM's backend -----------------------------------------------------------------------------------------


def test_vllm_backend_http_bodies(server: TritonServer, expected: dict[int, str]) -> None:
    for model in ("lean", "compat"):
        nested = {"stream": False, "temperature": 0, "max_tokens": 12, "exclude_input_in_output": True}
        assert generate(server, model, PROMPT, parameters=nested)["text_output"] == expected[12]
        sampling = json.dumps({"temperature": "0", "top_p": "0.95", "max_tokens": "12"})
        reply = generate(
            server,
            model,
            PROMPT,
            stream=False,
            sampling_parameters=sampling,
            exclude_input_in_output=False,
            return_finish_reason=True,
            return_cumulative_logprob=True,
            return_logprobs=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        assert reply["text_output"] == PROMPT + expected[12]
        assert reply["finish_reason"] == "length"
        assert (reply["num_input_tokens"], reply["num_output_tokens"]) == (len(PROMPT), 12)
        assert len(json.loads(reply["logprobs"])) == 12
    events = generate_stream(server, "lean", PROMPT, parameters={"stream": True, "max_tokens": 12})
    assert "".join(event["text_output"] for event in events) == expected[12]


def test_a_missing_lora_adapter_is_named(server: TritonServer) -> None:
    reply = generate(server, "lean", PROMPT, parameters={"lora_name": "alpaca"})
    assert "lora_name: 'alpaca' is not allowed" in reply["error"]


# -- what any client may send -------------------------------------------------------------------------------


def test_lists_are_json_text_in_parameters_and_lists_in_tensors(
    server: TritonServer, expected: dict[int, str]
) -> None:
    stop = expected[12][7:9]
    shown = expected[12][: expected[12].index(stop)]
    as_text = generate(server, "lean", PROMPT, max_tokens=12, stop=json.dumps(["never comes", stop]))
    assert as_text["text_output"] == shown
    inside = json.dumps({"stop": ["never comes", stop]})
    assert generate(server, "lean", PROMPT, max_tokens=12, sampling_parameters=inside)["text_output"] == shown
    as_list = generate(server, "compat", PROMPT, max_tokens=12, stop_words=["never comes", stop])
    assert as_list["text_output"] == shown
    refused = generate(server, "lean", PROMPT, stop=["a"])
    assert "invalid type" in refused["error"], "Triton itself takes no lists as parameters"


def test_a_tensor_wins_over_json_over_a_parameter_over_the_models_default(
    server: TritonServer, expected: dict[int, str]
) -> None:
    sampling = json.dumps({"max_tokens": 4})
    for tensors, parameters, count in [
        ({"max_tokens": 3, "sampling_parameters": sampling}, {"max_new_tokens": 5}, 3),
        ({"sampling_parameters": sampling}, {"max_new_tokens": 5}, 4),
        ({}, {"max_new_tokens": 5}, 5),
        ({}, {}, 9),
    ]:
        responses = stream(server, "compat", {"text_input": PROMPT, **tensors}, parameters)
        assert joined(responses) == expected[count]


@pytest.mark.parametrize("ends", [{"max_tokens": 6}, {"max_tokens": 24, "stop": "e"}])
def test_n_answers_are_the_same_streamed_in_one_response_and_in_one_each(
    server: TritonServer, ends: dict[str, Any]
) -> None:
    """They end in the same step, and in different ones."""
    asked = {"temperature": "1.0", "seed": 11, "return_finish_reason": True, **ends}
    asked["return_num_output_tokens"] = True
    together = generate(server, "lean", PROMPT, n=4, **asked)
    assert len(together["text_output"]) == len(together["finish_reason"]) == 4
    assert len(set(together["text_output"])) == 4

    texts, counts, reasons = [""] * 4, [0] * 4, [""] * 4
    for event in generate_stream(server, "lean", PROMPT, n=4, **asked):
        index = event["sequence_index"]
        assert not reasons[index], "nothing comes after the end of a choice"
        texts[index] += event["text_output"]
        counts[index] += event["num_output_tokens"]
        reasons[index] = event.get("finish_reason", "")
    assert texts == together["text_output"]
    assert counts == together["num_output_tokens"]
    assert reasons == together["finish_reason"]

    each = stream(server, "lean", {"text_input": PROMPT}, {"num_return_sequences": 4, **asked})
    by_index = {result.as_numpy("sequence_index").item(): result for result in each}
    assert [by_index[i].as_numpy("text_output").item().decode() for i in range(4)] == texts


@pytest.mark.parametrize("asking", ["n", "num_return_sequences"])
def test_best_of_sends_the_answers_that_are_the_most_likely_per_token(
    server: TritonServer, asking: str
) -> None:
    asked = {
        "temperature": "1.0",
        "seed": 3,
        "max_tokens": 16,
        "stop": "e",
        "return_cumulative_logprob": True,
    }
    every = generate(server, "lean", PROMPT, n=6, return_num_output_tokens=True, **asked)
    columns = (every["text_output"], every["cumulative_logprob"], every["num_output_tokens"])
    assert len(set(every["num_output_tokens"])) > 1, "of different lengths, else any sum would do"
    ranked = sorted(zip(*columns, strict=True), key=lambda row: -row[1] / row[2])
    best = stream(server, "lean", {"text_input": PROMPT}, {asking: 2, "best_of": 6, **asked})
    texts = [text.decode() for result in best for text in result.as_numpy("text_output")]
    assert texts == [text for text, _, _ in ranked[:2]]
    if asking == "num_return_sequences":
        assert [result.as_numpy("sequence_index").item() for result in best] == [0, 1]


def test_log_probabilities_are_those_of_the_stock_model(server: TritonServer, model: PreTrainedModel) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 1, "return_log_probs": True, "return_cumulative_logprob": True}
    responses = stream(server, "lean", {"text_input": PROMPT}, {"max_tokens": 8, "stream": True, **asked})
    prompt = byte_tokenizer().encode(PROMPT)
    tokens = prompt + solo(model, prompt, 8)
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [rows[i, tokens[i + 1]].item() for i in range(len(tokens) - 1)]

    of_prompt = json.loads(responses[0].as_numpy("prompt_logprobs").item())
    assert of_prompt[0] is None
    for entry, token, value in zip(of_prompt[1:], prompt[1:], expected, strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
    assert len(of_prompt) == len(prompt)
    assert all(result.as_numpy("prompt_logprobs") is None for result in responses[1:])

    of_output = expected[len(prompt) - 1 :]
    for index, (result, value) in enumerate(zip(responses, of_output, strict=True)):
        (entry,) = json.loads(result.as_numpy("logprobs").item())
        token = tokens[len(prompt) + index]
        assert entry[str(token)]["rank"] == 1
        assert entry[str(token)]["decoded_token"] == byte_tokenizer().decode([token])
        assert len(entry) == 2, "the chosen token is one of the two most likely"
        assert result.as_numpy("output_log_probs").item() == pytest.approx(value, abs=1e-4)
        so_far = sum(of_output[: index + 1])
        assert result.as_numpy("cumulative_logprob").item() == pytest.approx(so_far, abs=1e-3)
        assert result.as_numpy("cum_log_probs").item() == pytest.approx(so_far, abs=1e-3)


def test_nothing_is_sent_that_nobody_asked_for(server: TritonServer) -> None:
    for result in stream(server, "compat", {"text_input": PROMPT, "stream": True}):
        assert [output.name for output in result.get_response().outputs] == ["text_output"]


def test_messages_go_through_the_models_template(server: TritonServer, model: PreTrainedModel) -> None:
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}]
    prompt = byte_tokenizer().encode("<system>Brief.\n<user>Hi\n<assistant>")
    text = byte_tokenizer().decode(solo(model, prompt, 8))
    reply = generate(
        server, "lean", "", messages=json.dumps(messages), max_tokens=8, return_num_input_tokens=True
    )
    assert (reply["text_output"], reply["num_input_tokens"]) == (text, len(prompt))
    tensors = {"messages": json.dumps(messages), "max_tokens": 8}
    assert joined(stream(server, "compat", tensors)) == text


def test_a_seed_is_the_same_as_a_tensor_as_text_and_as_a_number(server: TritonServer) -> None:
    texts = set()
    for tensors, parameters in [
        ({"seed": np.array([[2**62 + 1]], np.uint64)}, {}),
        ({}, {"seed": str(2**62 + 1)}),
        ({}, {"seed": 2**62 + 1}),
    ]:
        asked = {"text_input": PROMPT, "temperature": 1.0, **tensors}
        (result,) = stream(server, "compat", asked, {"max_tokens": 20, **parameters})
        texts.add(result.as_numpy("text_output").item())
    assert len(texts) == 1


@pytest.mark.parametrize("kind", [httpclient, grpcclient], ids=["http", "grpc"])
def test_plain_infer_with_tensors(server: TritonServer, expected: dict[int, str], kind: Any) -> None:
    """A model with one response a request takes the same tensors."""
    url = server.grpc_url if kind is grpcclient else server.http_url.removeprefix("http://")
    tensors = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0.0, "return_finish_reason": True}
    with kind.InferenceServerClient(url) as client:
        result = client.infer("unary", _inputs(kind, tensors))
    assert result.as_numpy("text_output").tolist() == [expected[12].encode()]
    assert result.as_numpy("finish_reason").tolist() == [b"length"]
