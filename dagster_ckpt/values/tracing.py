"""Spans of OpenTelemetry. Without its SDK they are dropped, at a cost of microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from dagster_ckpt.values.metrics import PREFIX
from dagster_ckpt.values.redaction import without_secrets


def _start(name: str, parent: Span | None = None) -> Span:
    context = trace.set_span_in_context(parent) if parent is not None else None
    return trace.get_tracer(PREFIX).start_span(f"{PREFIX}.{name}", context)


def _note(span: Span, **facts: AttributeValue | None) -> None:
    span.set_attributes({f"{PREFIX}.{name}": value for name, value in facts.items() if value is not None})


def _fail(span: Span, error: str) -> None:
    # The SDK itself would record the exception with the secrets in its message.
    span.set_status(Status(StatusCode.ERROR, without_secrets(error)))


@contextmanager
def span(name: str, **facts: AttributeValue | None) -> Iterator[None]:
    """Trace a step in one thread; also a decorator. Spans that start meanwhile become its children."""
    started = _start(name)
    _note(started, **facts)
    with trace.use_span(started, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            _fail(started, f"{type(error).__name__}: {error}")
            raise


class PhasedSpan:
    """A span of consecutive phases, perhaps in different threads."""

    def __init__(self, name: str, **facts: AttributeValue | None) -> None:
        self._span = _start(name)
        self._phase: Span | None = None
        self._is_over = False
        _note(self._span, **facts)

    def phase(self, name: str) -> None:
        if self._is_over:
            return
        if self._phase is not None:
            self._phase.end()
        self._phase = _start(name, self._span)

    def end(self, error: str | None = None, **facts: AttributeValue | None) -> None:
        self._is_over = True
        _note(self._span, **facts)
        for each in (self._phase, self._span):
            if each is not None:
                if error is not None:
                    _fail(each, error)
                each.end()
