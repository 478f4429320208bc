"""Calls to workers: a few in flight for each, results in the order of the questions, errors as ours.

A window keeps memory bounded (questions and answers in flight lie in the object store) and still never lets a worker wait
for the run: while one question is worked on, the next already lies with the worker. Who answers which question is decided
when somebody is free; the answers do not depend on it.

A worker that dies is started again by Ray and asked again, a few times; a question that kills workers each time ends the
run with an error that says so, and the same command resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from moepress.errors import ConvertError, MoepressError

Question = TypeVar("Question")

IN_FLIGHT = 2
"""Questions with a worker: the one in work and the next."""


def in_order(
    workers: list[Any],
    ask: Callable[[Any, Question], Any],
    questions: Iterable[Question],
    label: Callable[[Question], str],
) -> Iterator[tuple[Question, Any]]:
    """Each question with its answer, in the questions' order.

    Args:
        workers: Ray actor handles.
        ask: (worker, question) → object reference; does not wait.
        questions: drawn as they are needed, so they may be made, or read, on the way.
        label: of a question, for errors.

    Raises:
        MoepressError: what the work raised.
        ConvertError: a question ended its worker again and again.
    """
    for question, reference in _references(workers, ask, questions):
        yield question, answer(reference, label(question))


def as_they_come(
    workers: list[Any],
    ask: Callable[[Any, Question], Any],
    questions: Iterable[Question],
    label: Callable[[Question], str],
) -> Iterator[tuple[Question, Any]]:
    """Each question with its answer, whichever is ready first.

    Raises: as `in_order`.
    """
    load = dict.fromkeys(range(len(workers)), 0)
    flying: dict[Any, tuple[int, Question]] = {}
    waiting = iter(questions)
    more = True
    while more or flying:
        while more and min(load.values()) < IN_FLIGHT:
            try:
                question = next(waiting)
            except StopIteration:
                more = False
                break
            index = min(load, key=lambda each: (load[each], each))
            flying[ask(workers[index], question)] = (index, question)
            load[index] += 1
        if flying:
            ready, _ = ray.wait(list(flying), num_returns=1)
            index, question = flying.pop(ready[0])
            load[index] -= 1
            yield question, answer(ready[0], label(question))


def answer(reference: Any, label: str) -> Any:
    """What an object reference stands for.

    Raises: as `in_order`.
    """
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MoepressError):
            raise cause from None
        raise ConvertError(
            f"a worker failed: {cause!r}", where=label, hint="its log is in OUT/.moepress/logs"
        ) from error
    except (RayActorError, ObjectLostError) as error:
        raise ConvertError(
            f"its worker died again and again: {' '.join(str(error).split())[:300]}",
            where=label,
            hint="often that is memory: try fewer --workers or --set calibration.memory=2GiB; the same command resumes",
        ) from error
    except RayError as error:
        raise ConvertError(f"Ray gave up: {error}", where=label, hint="the same command resumes") from error


def _references(
    workers: list[Any], ask: Callable[[Any, Question], Any], questions: Iterable[Question]
) -> Iterator[tuple[Question, Any]]:
    """References in order, at most `IN_FLIGHT` unfinished ones for each worker; finished ones may wait for their turn."""
    order: deque[tuple[Question, Any]] = deque()
    load = dict.fromkeys(range(len(workers)), 0)
    flying: dict[Any, int] = {}
    for question in questions:
        while min(load.values()) >= IN_FLIGHT or len(order) >= 2 * IN_FLIGHT * len(workers):
            if order[0][1] not in flying:
                yield order.popleft()
                continue
            ready, _ = ray.wait(list(flying), num_returns=1)
            load[flying.pop(ready[0])] -= 1
        index = min(load, key=lambda each: (load[each], each))
        reference = ask(workers[index], question)
        flying[reference] = index
        load[index] += 1
        order.append((question, reference))
    yield from order
