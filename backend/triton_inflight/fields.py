"""The table of everything a client may say about its request: FIELDS, and names that are known but not served.

The parsing of requests, the checks of config.pbtxt and docs/reference.md all come from it. Triton loads this file
in a process that only completes configurations, so it imports nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["string", "strings", "int", "ints", "float", "bool", "object", "bias", "messages"]

Group = Literal["prompt", "length", "sampling", "stops", "text", "choices", "responses", "serving"]
GROUPS: dict[Group, str] = {
    "prompt": "The prompt: exactly one of these",
    "length": "Length and time",
    "sampling": "How tokens are chosen",
    "stops": "Where the text stops",
    "text": "What the text looks like",
    "choices": "Several answers",
    "responses": "What is sent back",
    "serving": "Order, and all of it in one",
}

# Triton's data types that can carry a field of each kind as a tensor; the first is the one we recommend.
TENSOR_TYPES: dict[Kind, tuple[str, ...]] = {
    "string": ("TYPE_STRING",),
    "strings": ("TYPE_STRING",),
    "int": ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64"),
    "ints": ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64"),
    "float": ("TYPE_FP32", "TYPE_FP64"),
    "bool": ("TYPE_BOOL",),
    "object": ("TYPE_STRING",),
    "bias": ("TYPE_STRING",),
    "messages": ("TYPE_STRING",),
}
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Field:
    """One thing a client may say about its request.

    Attributes:
        name: as the client writes it, and the attribute of GenerationRequest or of its SamplingParams.
        kind: type of the value.
        group: its section of the reference page.
        doc: one line for the reference page.
        default: value where nobody says anything; None: see ``default_setting``, or nothing.
        default_setting: attribute of Settings that holds the default.
        minimum, maximum: range of a number, or of each number of a list or an object; both ends included.
        above_minimum: the minimum itself is not allowed.
        max_items: most entries of a list or an object.
        max_length: most characters of each string of a list.
        aliases: other names for the same field.
        configurable: ``default_NAME`` in config.pbtxt sets the model's default.
        tensor: the data type to declare, where it is not the first of TENSOR_TYPES.
    """

    name: str
    kind: Kind
    group: Group
    doc: str
    default: Any = None
    default_setting: str | None = None
    minimum: float = 0
    maximum: int = _LARGEST
    above_minimum: bool = False
    max_items: int = 0
    max_length: int = 0
    aliases: tuple[str, ...] = ()
    configurable: bool = False
    tensor: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_list(self) -> bool:
        """Whether a tensor of it may hold any number of values."""
        return self.kind in ("strings", "ints")

    @property
    def data_type(self) -> str:
        """The Triton data type to declare it with."""
        return self.tensor or TENSOR_TYPES[self.kind][0]

    @property
    def allowed(self) -> str:
        """What a value may be, for messages and the reference page."""
        bounds = f"above {self.minimum}, up to" if self.above_minimum else f"from {self.minimum} to"
        bounds = f"{bounds} {self.maximum}"
        return {
            "string": "a string, not empty",
            "strings": f"a string, or a list of up to {self.max_items} strings, each of up to "
            f"{self.max_length} characters",
            "int": f"an integer {bounds}",
            "ints": f"an integer {bounds}, or a list of up to {self.max_items} of them",
            "float": f"a number {bounds}",
            "bool": "true or false",
            "object": "a JSON object of other names of this table",
            "bias": f"a JSON object of up to {self.max_items} entries, token id to a number {bounds}",
            "messages": f"a JSON list of 1 to {self.max_items} objects, each with a role and a content",
        }[self.kind]


FIELDS: tuple[Field, ...] = (
    Field("text_input", "string", "prompt", "The prompt, used as it is: no chat template is applied to it."),
    Field(
        "messages",
        "messages",
        "prompt",
        'A conversation such as `[{"role": "user", "content": "Hi"}]`, put into the model\'s chat template. Where '
        'text_input has to be sent, send it as "".',
        max_items=4096,
    ),
    Field(
        "input_ids",
        "ints",
        "prompt",
        'The prompt as token ids, used as they are. Where text_input has to be sent, send it as "".',
        max_items=2**20,
    ),
    Field(
        "max_tokens",
        "int",
        "length",
        "Most tokens to generate; the context may end the text earlier.",
        default_setting="default_max_tokens",
        minimum=1,
        aliases=(
            "max_new_tokens",
            "max_completion_tokens",
            "request_output_len",
            "sampling_param_max_tokens",
        ),
    ),
    Field(
        "min_tokens",
        "int",
        "length",
        "Neither an EOS token nor one of stop_token_ids comes before this many tokens.",
        default=0,
        aliases=("min_length", "min_new_tokens"),
        configurable=True,
    ),
    Field(
        "max_time",
        "float",
        "length",
        "Seconds after which the generation is ended.",
        default_setting="max_time",
        maximum=7 * 24 * 3600,
        above_minimum=True,
    ),
    Field(
        "temperature",
        "float",
        "sampling",
        "Scores are divided by it; 0 always takes the most likely token.",
        default=0.0,
        maximum=100,
        aliases=("sampling_param_temperature",),
        configurable=True,
    ),
    Field(
        "do_sample",
        "bool",
        "sampling",
        "false: temperature 0, whatever else is said. true: temperature 1 where no other is said.",
    ),
    Field(
        "top_k",
        "int",
        "sampling",
        "Only the k most likely tokens; 0 and -1: all.",
        default=0,
        minimum=-1,
        aliases=("runtime_top_k", "sampling_param_top_k"),
        configurable=True,
    ),
    Field(
        "top_p",
        "float",
        "sampling",
        "Only the fewest tokens whose probabilities sum up to this.",
        default=1.0,
        maximum=1,
        above_minimum=True,
        aliases=("runtime_top_p", "sampling_param_top_p"),
        configurable=True,
    ),
    Field(
        "min_p",
        "float",
        "sampling",
        "Only tokens at least this share of the most likely one's probability.",
        default=0.0,
        maximum=1,
        configurable=True,
    ),
    Field(
        "typical_p",
        "float",
        "sampling",
        "Only the tokens closest to the expected information, up to this sum of probabilities.",
        default=1.0,
        maximum=1,
        above_minimum=True,
        configurable=True,
    ),
    Field(
        "repetition_penalty",
        "float",
        "sampling",
        "Tokens of prompt and output: a positive score is divided by it, a negative one multiplied.",
        default=1.0,
        minimum=0.01,
        maximum=100,
        configurable=True,
    ),
    Field(
        "presence_penalty",
        "float",
        "sampling",
        "Taken off the score of every token of the output, once.",
        default=0.0,
        minimum=-2,
        maximum=2,
        aliases=("sampling_param_presence_penalty",),
        configurable=True,
    ),
    Field(
        "frequency_penalty",
        "float",
        "sampling",
        "Taken off the score of a token for each time it is in the output.",
        default=0.0,
        minimum=-2,
        maximum=2,
        aliases=("sampling_param_frequency_penalty",),
        configurable=True,
    ),
    Field(
        "logit_bias",
        "bias",
        "sampling",
        'Added to the scores of single tokens, such as `{"50": -100}`.',
        minimum=-100,
        maximum=100,
        max_items=1024,
        configurable=True,
    ),
    Field(
        "bad_words",
        "strings",
        "sampling",
        "Texts that must not appear, as their tokens; empty ones are left out.",
        default=(),
        max_items=256,
        max_length=1000,
        configurable=True,
    ),
    Field(
        "seed",
        "int",
        "sampling",
        "Of this request's random numbers: the same seed gives the same text. Without one, and with -1, every "
        "request gets its own.",
        minimum=-(2**63),
        maximum=2**64 - 1,
        aliases=("random_seed", "sampling_param_seed"),
        tensor="TYPE_UINT64",
    ),
    Field(
        "stop",
        "strings",
        "stops",
        "Texts that end the output where they appear; empty ones are left out.",
        default=(),
        max_items=64,
        max_length=1000,
        aliases=("stop_words", "stop_strings", "sampling_param_stop"),
        configurable=True,
    ),
    Field(
        "stop_token_ids",
        "ints",
        "stops",
        "Token ids that end the output as the model's EOS tokens do.",
        default=(),
        max_items=1024,
        aliases=("end_id",),
        configurable=True,
    ),
    Field(
        "ignore_eos",
        "bool",
        "stops",
        "The model's EOS tokens do not end the output.",
        default=False,
        configurable=True,
    ),
    Field(
        "include_stop_str_in_output",
        "bool",
        "stops",
        "The stop that ended the output stays at its end.",
        default=False,
        configurable=True,
    ),
    Field(
        "skip_special_tokens",
        "bool",
        "text",
        "Special tokens give no text.",
        default=True,
        configurable=True,
    ),
    Field(
        "exclude_input_in_output",
        "bool",
        "text",
        "false: the first text begins with the prompt's.",
        default=True,
        aliases=("sampling_param_exclude_input_from_output",),
        configurable=True,
    ),
    Field(
        "n",
        "int",
        "choices",
        "Answers to the same prompt; without stream, all in one response.",
        default=1,
        minimum=1,
        maximum=128,
    ),
    Field(
        "num_return_sequences",
        "int",
        "choices",
        "As n, with a response for each answer also without stream; sequence_index tells them apart. "
        "Not over HTTP generate without streaming, which takes a single response.",
        minimum=1,
        maximum=128,
    ),
    Field(
        "best_of",
        "int",
        "choices",
        "Answers generated, of which the n with the highest log probability per token are sent. Default: n.",
        minimum=1,
        maximum=128,
        aliases=("sampling_param_best_of",),
    ),
    Field(
        "stream",
        "bool",
        "responses",
        "Send each piece of text as it appears, rather than one response.",
        default=False,
        aliases=("streaming",),
    ),
    Field(
        "stream_interval",
        "int",
        "responses",
        "With stream: at least this many tokens a response, but for the first and the last.",
        default_setting="stream_interval",
        minimum=1,
        maximum=1024,
    ),
    Field("return_finish_reason", "bool", "responses", "Send finish_reason.", default=False),
    Field("return_stop_reason", "bool", "responses", "Send stop_reason.", default=False),
    Field("return_num_input_tokens", "bool", "responses", "Send num_input_tokens.", default=False),
    Field("return_num_output_tokens", "bool", "responses", "Send num_output_tokens.", default=False),
    Field(
        "return_output_ids",
        "bool",
        "responses",
        "Send output_ids. Where the prompt is input_ids they are sent unless this is false.",
        default=False,
    ),
    Field(
        "return_sequence_length",
        "bool",
        "responses",
        "Send sequence_length. Where the prompt is input_ids it is sent unless this is false.",
        default=False,
    ),
    Field("return_cumulative_logprob", "bool", "responses", "Send cumulative_logprob.", default=False),
    Field("return_logprobs", "bool", "responses", "Send logprobs.", default=False),
    Field("return_log_probs", "bool", "responses", "Send cum_log_probs and output_log_probs.", default=False),
    Field(
        "logprobs",
        "int",
        "responses",
        "Send logprobs, each with this many most likely tokens beside the chosen one.",
        maximum=20,
    ),
    Field(
        "prompt_logprobs",
        "int",
        "responses",
        "Send prompt_logprobs, each with this many most likely tokens beside the prompt's.",
        maximum=20,
    ),
    Field(
        "request_priority",
        "int",
        "serving",
        "Of the sequences that wait to run, those with the largest go first.",
        default=0,
        minimum=-1000,
        maximum=1000,
    ),
    Field(
        "sampling_parameters",
        "object",
        "serving",
        "Any of the other names of this page, as one JSON object.",
    ),
)


@dataclass(frozen=True)
class Foreign:
    """A name that clients of other backends send, for something that this backend does not have.

    Attributes:
        name: as the clients write it.
        neutral: values that ask for nothing; others are refused. None: no value has an effect here.
        why: what to say to the others, and in the reference page.
        data_type, dims: of the tensor.
        aliases: other names for the same.
    """

    name: str
    neutral: tuple[object, ...] | None
    why: str
    data_type: str = "TYPE_STRING"
    dims: tuple[int, ...] = (1,)
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


_NO_BEAMS = "this backend has no beam search; for several answers send n and a temperature"
_NO_GUIDE = "this backend has no guided decoding"
_NO_ADAPTERS = "this backend has no LoRA adapters"
_NO_IMAGES = "this backend reads text only"
_NO_DRAFTS = "this backend takes no draft tokens"
_NO_SOFT_PROMPTS = "this backend has no prompt tuning"
_NO_SUBSETS = (
    "this backend does not choose from given tokens only; ban the others with bad_words or logit_bias"
)

FOREIGN: tuple[Foreign, ...] = (
    Foreign("beam_width", (1,), _NO_BEAMS, "TYPE_INT32", aliases=("num_beams",)),
    Foreign("use_beam_search", (False,), _NO_BEAMS, "TYPE_BOOL"),
    Foreign("length_penalty", (1,), _NO_BEAMS, "TYPE_FP32", aliases=("len_penalty",)),
    Foreign("early_stopping", (False,), _NO_BEAMS, "TYPE_BOOL"),
    Foreign("beam_search_diversity_rate", (0,), _NO_BEAMS, "TYPE_FP32"),
    Foreign("pad_id", None, "it has no effect: nothing is ever padded", "TYPE_INT32"),
    Foreign("guided_decoding_guide_type", (), _NO_GUIDE),
    Foreign("guided_decoding_guide", (), _NO_GUIDE),
    Foreign("guided_json", (), _NO_GUIDE),
    Foreign("guided_regex", (), _NO_GUIDE),
    Foreign("guided_choice", (), _NO_GUIDE),
    Foreign("guided_grammar", (), _NO_GUIDE),
    Foreign("guided_decoding", (), _NO_GUIDE),
    Foreign("structured_outputs", (), _NO_GUIDE),
    Foreign("response_format", (), _NO_GUIDE),
    Foreign("lora_task_id", (0,), _NO_ADAPTERS, "TYPE_UINT64"),
    Foreign("lora_weights", (), _NO_ADAPTERS, "TYPE_FP16", (-1, -1)),
    Foreign("lora_config", (), _NO_ADAPTERS, "TYPE_INT32", (-1, 3)),
    Foreign("lora_name", (), _NO_ADAPTERS),
    Foreign("return_context_logits", (False,), "this backend does not send logits", "TYPE_BOOL"),
    Foreign("return_generation_logits", (False,), "this backend does not send logits", "TYPE_BOOL"),
    Foreign("return_perf_metrics", (False,), "the figures are at Triton's /metrics", "TYPE_BOOL"),
    Foreign("embedding_bias_words", (), "send logit_bias, by token id", dims=(-1,)),
    Foreign("embedding_bias_weights", (), "send logit_bias, by token id", "TYPE_FP32", (-1,)),
    Foreign("num_draft_tokens", (0,), _NO_DRAFTS, "TYPE_INT32"),
    Foreign("use_draft_logits", (False,), _NO_DRAFTS, "TYPE_BOOL"),
    Foreign("prompt_embedding_table", (), _NO_SOFT_PROMPTS, "TYPE_FP16", (-1, -1)),
    Foreign("prompt_vocab_size", (0,), _NO_SOFT_PROMPTS, "TYPE_INT32"),
    Foreign("prompt_table_extra_id", (0,), _NO_SOFT_PROMPTS, "TYPE_UINT64"),
    Foreign("image", (), _NO_IMAGES, dims=(-1,)),
    Foreign("image_url_input", (), _NO_IMAGES),
    Foreign("decoder_text_input", (), "this backend serves decoder-only models"),
    Foreign("input_lengths", None, "it has no effect: input_ids are as long as they are", "TYPE_INT32"),
    Foreign("allowed_token_ids", (), _NO_SUBSETS),
    Foreign("truncate_prompt_tokens", (), "this backend does not cut prompts; cut them before they are sent"),
    Foreign("detokenize", (True,), "the text is always sent; output_ids come with it", "TYPE_BOOL"),
    Foreign(
        "spaces_between_special_tokens",
        (True,),
        "special tokens are joined as the tokenizer does",
        "TYPE_BOOL",
    ),
    Foreign("no_repeat_ngram_size", (0,), "this backend does not ban n-grams", "TYPE_INT32"),
    Foreign("watermark", (False,), "this backend adds no watermarks", "TYPE_BOOL"),
)

# Parameters that Triton or its clients put beside ours, as fnmatch patterns; `ignored_parameters` adds more.
IGNORED_PARAMETERS: tuple[str, ...] = (
    "id",
    "sequence_*",
    "priority",
    "timeout",
    "binary_data",
    "binary_data_output",
    "binary_data_size",
    "triton_*",
)

# The input tensors of clients written for Triton's vLLM and TensorRT-LLM backends; `init --compat` declares them.
COMPATIBLE_INPUTS: tuple[str, ...] = (
    "stream",
    "streaming",
    "max_tokens",
    "request_output_len",
    "min_tokens",
    "min_length",
    "temperature",
    "top_k",
    "runtime_top_k",
    "top_p",
    "runtime_top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "random_seed",
    "stop_words",
    "bad_words",
    "end_id",
    "num_return_sequences",
    "exclude_input_in_output",
    "sampling_parameters",
    "input_ids",
    "input_lengths",
    "messages",
    "return_finish_reason",
    "return_stop_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_log_probs",
    "beam_width",
    "length_penalty",
    "len_penalty",
    "pad_id",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "embedding_bias_words",
    "embedding_bias_weights",
    "num_draft_tokens",
    "use_draft_logits",
    "image",
)

# The optional inputs that Triton's vLLM backend declares, but for images.
VLLM_INPUTS: tuple[str, ...] = (
    "stream",
    "sampling_parameters",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)

_BY_NAME = {name: field for field in FIELDS for name in field.names}
_FOREIGN_BY_NAME = {name: foreign for foreign in FOREIGN for name in foreign.names}


def find_field(name: str) -> Field | None:
    """The field of that name or alias."""
    return _BY_NAME.get(name)


def find_foreign(name: str) -> Foreign | None:
    """The foreign name or alias."""
    return _FOREIGN_BY_NAME.get(name)


def field_names() -> list[str]:
    """Every name of every field, aliases included."""
    return list(_BY_NAME)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` with the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""
