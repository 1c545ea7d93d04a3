"""The parameters of a client's method become options: their kinds, defaults and descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from dagster_ckpt.client import Client
from dagster_ckpt.orchestration.jobs.ops import REQUIRED, Parameter, StreamOps, arguments, parameters, summary
from dagster_ckpt.stream.start_from import StartFrom, start_options
from dagster_ckpt.values.modes import TerminalState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_ckpt.recovery.rewind_preview import RewindPreview


def repaint(
    self: object,
    stream: str,
    *,
    into: str,
    color: str | None = None,
    coats: int = 2,
    rooms: Sequence[str] = (),
    mixed: Mapping[str, str] | None = None,
    state: TerminalState | str | None = None,
    timeout_s: float = 600.0,
    spark: SparkSession | None = None,
    ahead: RewindPreview | None = None,
    report: Callable[[str], None] = print,
) -> str:
    """Paint a `stream` in
    another color.

    It dries.

    Args:
        stream: The stream; it must be dry.
        into: Where it goes.
        color: A color,
            such as red.
        report: Called at each step.

    Raises:
        ValueError: No paint.
    """
    return f"{stream} in {color}"


class TestParameters:
    def test_kinds_defaults_and_descriptions_come_from_the_method(self) -> None:
        found = {each.name: each for each in parameters(repaint)}

        assert found["stream"] == Parameter("stream", str, REQUIRED, "Stream id of the stream; it must be dry.")
        assert found["color"] == Parameter("color", str, None, "A color, such as red.")
        kinds = {name: each.kind for name, each in found.items()}
        assert (kinds["coats"], kinds["rooms"], kinds["mixed"], kinds["state"]) == (int, list, dict, TerminalState)

    def test_what_a_face_gives_by_itself_is_no_option(self) -> None:
        assert {each.name for each in parameters(repaint)} & {"self", "spark", "ahead", "report"} == set()

    def test_a_start_stands_for_its_options(self) -> None:
        names = [each.name for each in parameters(Client.restart)]
        assert [name for name in names if name in {option.name for option in start_options()}] == [
            option.name for option in start_options()
        ]
        given = arguments(Client.restart, {"stream": "orders", "start_from": "chk-7", "accept_loss": True, "other": 1})
        assert given == {"stream": "orders", "start_from": StartFrom("chk-7", accept_loss=True)}

    def test_the_summary_is_the_first_paragraph(self) -> None:
        assert summary(repaint) == "Paint a stream in another color."


def test_a_parameter_of_a_method_is_a_field_of_its_job() -> None:
    def reported(context: dg.OpExecutionContext, result: str) -> str:
        return result

    made = StreamOps([]).verb("repaint_stream", repaint, reported, without={"coats"})

    [op] = made.all_node_defs
    fields = op.config_schema.as_field().config_type.fields  # type: ignore[union-attr]
    assert (made.name, made.description) == ("repaint_stream_job", "Paint a stream in another color.")
    assert set(fields) == {"stream_id", "into_stream_id", "color", "rooms", "mixed", "state", "timeout_seconds"}
    assert {name for name, field in fields.items() if field.is_required} == {"stream_id", "into_stream_id"}
    assert fields["color"].description == "A color, such as red."
