"""A small /dev/shm, as containers have it: what it takes, and what the lack of it breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import tiny_model
from serving import add_model, save_model

pytestmark = [pytest.mark.server, pytest.mark.namespaces]

PROMPTS = 32
# Serves in a mount namespace of its own, where /dev/shm has two megabytes at first, then room for all prompts at once.
SERVE = f"""
import collections, json, subprocess, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from triton_inflight.launcher import TritonServer
from triton_inflight.triton_home import LaunchError

def ask(prompt):
    body = json.dumps({{"text_input": prompt, "max_tokens": 8}}).encode()
    try:
        with urllib.request.urlopen(server.http_url + "/v2/models/tiny/generate", body, timeout=60) as response:
            return json.load(response)["text_output"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]

def ask_for_much():
    with ThreadPoolExecutor({PROMPTS}) as pool:
        return collections.Counter(pool.map(ask, ["y" * 2**20] * {PROMPTS}))

try:
    with TritonServer(sys.argv[1]) as server:
        answers = [ask("good")]
        too_small = ask_for_much()
        answers += [ask("good")]
        subprocess.run(["mount", "-o", "remount,size={PROMPTS + 16}m", "/dev/shm"], check=True)
        enough = ask_for_much()
        answers += [ask("good")]
    print(json.dumps({{"too small": too_small, "enough": enough, "answers": answers}}))
except LaunchError as error:
    print(json.dumps({{"refused": str(error)}}))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("weights"), tiny_model("llama"))
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tiny", folder, slots=4, dtype="float32", max_tokens_in_paged_kv_cache=2048)
    return repository


def _serve_with(size: str, repository: Path) -> dict[str, Any]:
    """Run SERVE where /dev/shm is this small; nobody else's /dev/shm changes."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    inside = ["sh", "-c", script, "sh", sys.executable, "-c", SERVE, str(repository)]
    # The shell runs only where the namespace could be made, and no mount spreads from there.
    command = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", *inside]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_below_a_megabyte_the_server_says_what_is_missing(repository: Path) -> None:
    """A megabyte for each instance of a model is what Triton begins with."""
    refused = _serve_with("512k", repository)["refused"]
    assert "shared memory" in refused
    assert "'--shm-size'" in refused


def test_prompts_for_which_it_is_too_small_are_refused_and_harm_nobody(repository: Path) -> None:
    """32 prompts of 1 MB at once. Where they fit, the model itself refuses them, since its context is shorter."""
    result = _serve_with("2m", repository)
    assert sum(result["too small"].values()) == PROMPTS
    assert any("shared memory" in error for error in result["too small"])
    ((error, count),) = result["enough"].items()
    assert (count, "text_input is 1048576 characters long" in error) == (PROMPTS, True)
    assert len(result["answers"]) == 3
    assert len(set(result["answers"])) == 1
