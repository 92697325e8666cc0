"""Where the time of the engine's steps goes: planning, building the batch, the model, sampling, text."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from triton_inflight import engine as engine_module
from triton_inflight.engine import Engine


@contextmanager
def timed_parts(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds that the parts of all steps within the block took, by the name of the figure; filled at its end.

    ``rest_seconds`` is the step's own work, and ``steps`` how many there were. Each call of a part costs two
    readings of the clock more: some 10 us for a step of 32 sequences.
    """
    figures: dict[str, float] = {}
    calls: defaultdict[str, list[float]] = defaultdict(list)
    parts: list[tuple[str, Any, str]] = [
        ("plan", engine._planner, "plan"),
        ("batch", engine_module, "build_batch"),
        ("forward", engine._runner, "run"),
        ("sampling", engine_module, "sample"),
        ("text", engine, "_commit"),
    ]
    with ExitStack() as stack:
        stack.enter_context(timed(calls["step"], engine, "step"))
        for part, holder, name in parts:
            stack.enter_context(timed(calls[part], holder, name))
        yield figures
    for part, _, _ in parts:
        figures[f"{part}_seconds"] = sum(calls[part])
    figures["rest_seconds"] = sum(calls["step"]) - sum(figures.values())
    figures["steps"] = len(calls["step"])


@contextmanager
def timed(durations: list[float], holder: Any, name: str) -> Iterator[None]:
    """Note how long each call takes while the block lasts.

    Args:
        durations: takes the seconds of each.
        holder, name: a module's function, an object's method, or that of a class and so of all its objects.
    """
    original: Callable[..., Any] = getattr(holder, name)
    own = name in vars(holder)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            durations.append(time.perf_counter() - started)

    setattr(holder, name, call)
    try:
        yield
    finally:
        if own:
            setattr(holder, name, original)
        else:
            delattr(holder, name)
