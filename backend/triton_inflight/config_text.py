"""The text of a commented config.pbtxt, as `init` writes it: what each scheduler needs, and when to use it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from triton_inflight.errors import SettingsError
from triton_inflight.fields import COMPATIBLE_INPUTS, VLLM_INPUTS
from triton_inflight.parameter_kinds import Kind
from triton_inflight.settings import PARAMETERS, parameter_text
from triton_inflight.triton_config import SUGGESTED_IDLE, Scheduler, optional_inputs

BACKEND = "inflight"
SCHEDULERS: tuple[Scheduler, ...] = ("iterative", "dynamic", "sequence", "decoupled")

_CACHE_TOKENS_PER_SEQUENCE = 1024
# A client that drives its sequence may fall silent; its slot and its blocks are held for so long.
_CLIENT_DRIVEN_IDLE = 600_000_000
_FILL_DELAY = 10_000  # microseconds
# Measured against none with steps of 15 to 25 ms: 5 to 18 % more tokens a second, with 6 clients and with 32.
_GATHER_DELAY = 3_000
_QUEUE_SIZE = 65_536  # more than anybody waits for


def config_text(
    model: str,
    dtype: str = "bfloat16",
    max_batch_size: int = 32,
    compat: bool = False,
    scheduler: str = "iterative",
) -> str:
    """A commented config.pbtxt.

    Args:
        max_batch_size: most sequences that generate at the same time, under any scheduler.
        compat: declare the input tensors of clients of Triton's vLLM and TensorRT-LLM backends.
        scheduler: one of SCHEDULERS.

    Raises:
        SettingsError: there is no such scheduler. Other values are not checked here.
    """
    if scheduler not in SCHEDULERS:
        raise SettingsError(f"--scheduler {scheduler!r} is not allowed; allowed: {', '.join(SCHEDULERS)}")
    batched = scheduler != "decoupled"
    values = {
        "model": model,
        "dtype": dtype,
        **({} if batched else {"max_running_sequences": str(max_batch_size)}),
        "max_tokens_in_paged_kv_cache": str(_CACHE_TOKENS_PER_SEQUENCE * max_batch_size),
        "tokens_per_block": "32",
        "max_num_tokens": str(max(512, max_batch_size)),
    }
    return _TEMPLATE.format(
        when=_WHEN[scheduler],
        backend=BACKEND,
        batching=_BATCHING[scheduler].format(
            max_batch_size=max_batch_size,
            idle=SUGGESTED_IDLE,
            hours=SUGGESTED_IDLE // 3_600_000_000,
            short_idle=_CLIENT_DRIVEN_IDLE,
            minutes=_CLIENT_DRIVEN_IDLE // 60_000_000,
            delay=_FILL_DELAY,
            gather=_GATHER_DELAY,
            gather_ms=_GATHER_DELAY // 1000,
            queue_size=_QUEUE_SIZE,
            milliseconds=_FILL_DELAY // 1000,
            controls=_CONTROLS,
        ),
        inputs=_inputs_text(batched, compat),
        parameters="\n".join(_commented_parameter(name, value) for name, value in values.items()),
    )


def _commented_parameter(name: str, value: str) -> str:
    parameter = next(parameter for parameter in PARAMETERS if parameter.name == name)
    return f"{_comment(parameter.doc, parameter.kind)}\n{parameter_text(name, value)}"


def _comment(doc: str, kind: Kind) -> str:
    return textwrap.fill(
        f"{doc} Allowed: {kind.allowed}.",
        width=110,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _inputs_text(batched: bool, compat: bool) -> str:
    if batched and not compat:
        return _PROMPT_ONLY
    inputs = optional_inputs(COMPATIBLE_INPUTS if compat else VLLM_INPUTS)
    lines = [_TEXT_INPUT, *(_input_text(tensor, batched) for tensor in inputs)]
    comment = _SPLITTING if batched else _COMPATIBLE if compat else _AS_VLLM
    return "\n".join([comment, "input [", ",\n".join(f"  {line}" for line in lines), "]"])


def _input_text(tensor: Mapping[str, Any], batched: bool) -> str:
    dims = ", ".join(map(str, tensor["dims"]))
    ragged = " allow_ragged_batch: true" if batched and tensor.get("allow_ragged_batch") else ""
    return f'{{ name: "{tensor["name"]}" data_type: {tensor["data_type"]} dims: [ {dims} ] optional: true{ragged} }}'


_WHEN: dict[str, str] = {
    "iterative": """\
# Scheduler: iterative sequences. Use it where many clients share a model that generates text: new sequences join
# those in flight at every step, and whoever has finished makes room at once.""",
    "dynamic": """\
# Scheduler: dynamic batching. The batch that Triton forms runs to the end of its longest member; nobody joins it.
# Use it where requests come in batches and their outputs are about equally long, or as what to compare with.
# Elsewhere slots stand empty while newcomers wait: take iterative sequences.""",
    "sequence": """\
# Scheduler: sequences that their client drives. A request with START carries the prompt and gets the first token,
# every further request of the same sequence ID gets one more, and END frees what the sequence holds. Use it where
# the client decides after every token whether to go on. Each token costs a round trip: where nobody decides, take
# iterative sequences.""",
    "decoupled": """\
# Scheduler: none of Triton's. Triton hands over every request as it comes, and the engine forms its batches in a
# thread of its own. Use it for clients that send tensors without a batch dimension, such as those of Triton's vLLM
# backend, which work unchanged. Triton then knows nothing of slots and queues; where its sequence batcher is to
# hold newcomers back, take iterative sequences.""",
}

_SLOTS = """\
# Most sequences that generate at the same time.
max_batch_size: {max_batch_size}
"""

_CONTROLS = """\
  # How Triton says where a sequence starts and ends, whether a slot is in use, and the sequence ID.
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]"""

_BATCHING: dict[str, str] = {
    "iterative": _SLOTS
    + """
sequence_batching {{
  # Every step, Triton hands over the new sequences together with those in flight.
  iterative_sequence: true
  # Triton drops a sequence that waits longer than this, {hours} h, for its slot or its next step.
  max_sequence_idle_microseconds: {idle}
  # One slot for each sequence of a batch. No queue delay: each step would pay it.
  oldest {{ max_candidate_sequences: {max_batch_size} }}
{controls}
}}""",
    "dynamic": _SLOTS
    + """
dynamic_batching {{
  # The first request of a batch waits {milliseconds} ms for others: little beside the seconds that a batch runs.
  max_queue_delay_microseconds: {delay}
  # Only with a bounded queue does Triton form the next batch when the model is free, of all that wait by then. Else
  # it forms it while the model runs, of the few that have come.
  default_queue_policy {{ max_queue_size: {queue_size} }}
}}""",
    "sequence": _SLOTS
    + """
sequence_batching {{
  # A sequence whose client is silent for longer than this, {minutes} min, is dropped, and its slot and blocks are free.
  # The wait for a slot counts too.
  max_sequence_idle_microseconds: {short_idle}
  # One slot for each sequence of a batch. The first request of a batch waits {gather_ms} ms for those of other clients,
  # which come back one by one: without, steps run with a part of the sequences, and all wait longer. Where a step
  # takes no longer than that itself, wait less.
  oldest {{
    max_candidate_sequences: {max_batch_size}
    preferred_batch_size: [ {max_batch_size} ]
    max_queue_delay_microseconds: {gather}
  }}
{controls}
}}""",
    "decoupled": """\
# No batcher, and no batch dimension: an input of dims [ 1 ] has shape [1].
max_batch_size: 0""",
}

_TEXT_INPUT = '{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }'

_PROMPT_ONLY = f"""\
# The prompt. Clients send everything else, such as max_tokens, as request parameters: requests with different
# sets of input tensors would not share a batch of Triton's.
input [ {_TEXT_INPUT} ]"""

_SPLITTING = """\
# The prompt, and the tensors that clients of Triton's vLLM and TensorRT-LLM backends send. Requests with different
# sets of them never share a batch of Triton's: delete those that your clients do not send, or let clients send
# request parameters of the same names, which cost nothing."""

_COMPATIBLE = """\
# The prompt, and the tensors that clients of Triton's vLLM and TensorRT-LLM backends send. Without a batcher of
# Triton's, they cost nothing."""

_AS_VLLM = """\
# The prompt, and the tensors that Triton's vLLM backend takes. Without a batcher of Triton's, they cost nothing;
# everything else, such as max_tokens, is a request parameter, or stands in the JSON of sampling_parameters."""

_TEMPLATE = """\
# A model for triton-inflight. To serve another one, copy this folder and change `model`; the folder's name is
# the model's. Outputs and the transaction policy are filled in by the backend.
#
{when}

# The backend; with it, the folder needs no model.py.
backend: "{backend}"
{batching}

# One instance on the CPU; KIND_GPU for a GPU.
instance_group [ {{ kind: KIND_CPU count: 1 }} ]

{inputs}

{parameters}
"""
