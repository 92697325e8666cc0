"""Which slots are reclaimed, without a server: Triton's part is a function that notes what it was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from triton_inflight import slots
from triton_inflight.slots import Slots


class Sent:
    """What was sent to start sequences: correlation IDs, 0 for one that Triton is to give."""

    def __init__(self) -> None:
        self.ids: list[int | str] = []
        self.comes = lambda: True  # whether a request without an ID gets to the model
        self._news = threading.Condition()

    def __call__(self, correlation_id: int | str, microseconds: int) -> bool:
        assert microseconds > 0
        came = correlation_id != 0 or self.comes()
        with self._news:
            self.ids.append(correlation_id)
            self._news.notify_all()
        return came

    def wait_for(self, correlation_id: int | str, times: int = 1) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.ids.count(correlation_id) >= times, timeout=30), self.ids


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    monkeypatch.setattr(slots, "_SECONDS_TO_RECLAIM", 0.05)
    return Sent()


@pytest.fixture
def make(sent: Sent) -> Iterator[Callable[[bool], Slots]]:
    made = []

    def _make(sees_all: bool = True) -> Slots:
        made.append(Slots(sent, sees_all))
        return made[-1]

    yield _make
    for each in made:
        each.close()


def test_a_dropped_sequences_slot_is_reclaimed_once(sent: Sent, make) -> None:
    reclaiming = make()
    reclaiming.reclaim(2**40)
    reclaiming.reclaim("an ID that is text")
    sent.wait_for(2**40)
    sent.wait_for("an ID that is text")
    reclaiming.reclaim(2**41)
    sent.wait_for(2**41)
    assert sorted(map(str, sent.ids)) == sorted(map(str, [2**40, "an ID that is text", 2**41]))


def test_an_id_that_is_on_a_trip_again_is_left_alone(sent: Sent, make) -> None:
    reclaiming = make()
    reclaiming.reclaim(2**40)
    reclaiming.trip_begins([2**40])
    reclaiming.reclaim(2**41)  # due later
    sent.wait_for(2**41)
    assert sent.ids == [2**41]


def test_a_number_that_triton_skipped_is_reclaimed_once_a_later_request_came(sent: Sent, make) -> None:
    reclaiming = make()
    for correlation_id in (1, 2, 4):
        reclaiming.trip_begins([correlation_id])
    sent.wait_for(3)
    assert sent.ids == [0, 3]


def test_a_number_that_was_overtaken_is_not_missing(sent: Sent, make) -> None:
    reclaiming = make()

    def overtaken() -> bool:
        reclaiming.trip_begins([3])  # it comes while our own request queues up behind it
        return True

    sent.comes = overtaken
    for correlation_id in (1, 2, 4):
        reclaiming.trip_begins([correlation_id])
    sent.wait_for(0)
    reclaiming.reclaim(2**41)
    sent.wait_for(2**41)
    assert 3 not in sent.ids


def test_while_others_have_all_slots_it_is_asked_again(sent: Sent, make) -> None:
    reclaiming = make()
    answers = iter([False, False, True])

    def behind_others() -> bool:
        reclaiming.trip_begins([1])  # somebody else is served meanwhile
        return next(answers)

    sent.comes = behind_others
    for correlation_id in (1, 3):
        reclaiming.trip_begins([correlation_id])
    sent.wait_for(2)
    assert sent.ids == [0, 0, 0, 2]


def test_if_nobody_has_a_slot_it_is_reclaimed_at_once(sent: Sent, make) -> None:
    """All slots are taken by sequences that Triton dropped: there are no trips, and ours does not come either."""
    reclaiming = make()
    sent.comes = lambda: False
    for correlation_id in (1, 3):
        reclaiming.trip_begins([correlation_id])
    sent.wait_for(2)


@pytest.mark.parametrize("sees_all", [True, False])
def test_ids_of_clients_and_other_instances_are_not_counted(sent: Sent, make, sees_all: bool) -> None:
    reclaiming = make(sees_all)
    reclaiming.trip_begins([1])
    reclaiming.trip_begins([2**40] if sees_all else [5])
    reclaiming.reclaim(2**41)
    sent.wait_for(2**41)
    time.sleep(0.1)  # what was missing would have been asked for by now
    assert sent.ids == [2**41]


def test_an_error_does_not_end_the_thread(make, sent: Sent) -> None:
    def broken() -> bool:
        sent.comes = lambda: True
        raise RuntimeError("the server is busy")

    sent.comes = broken
    reclaiming = make()
    for correlation_id in (1, 3):
        reclaiming.trip_begins([correlation_id])
    sent.wait_for(2)
