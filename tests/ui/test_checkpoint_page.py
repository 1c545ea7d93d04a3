"""The checkpoint page over HTTP: what it shows, what it refuses, and who may act."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from click.testing import CliRunner
from sqlalchemy import update

from dagster_ckpt.catalog.desired_states import PreflightRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.history import SnapshotFigures
from dagster_ckpt.catalog.records import EventType, ExecutionStatus, RequestStatus, SnapshotStatus
from dagster_ckpt.catalog.tables import executions, timelines
from dagster_ckpt.cli.command import FAILED
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.ui.charts import line_chart, points, ticks
from dagster_ckpt.ui.page_data import snapshot
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import STREAM, GoldenStream
from tests.ui.conftest import TOKEN, served
from tests.ui.history import BEGIN_MS, LONG_ERROR, lengthen, live_through

TABS = ("", "/-/history", "/-/timeline", "/-/summary", "/-/failures", "/-/configuration")


def text(address: str, path: str, status: int = 200) -> str:
    answer = requests.get(address + path, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.text


def awaited(condition: Callable[[], bool]) -> None:
    """Wait for an action in the background, which tells nobody when it is done."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "The action did not end."
        time.sleep(0.05)


class TestReading:
    def test_the_list_names_each_stream_with_its_status_and_newest_snapshot(self, page: str) -> None:
        shown = text(page, "/")
        assert f'href="/streams/{STREAM}"' in shown
        assert "SUSPENDED" in shown
        assert re.search(r"chk-\d+ at batch 4", shown)

    @pytest.mark.parametrize("tab", TABS)
    def test_each_page_of_a_stream_names_it_and_marks_its_tab(self, page: str, tab: str) -> None:
        shown = text(page, f"/streams/{STREAM}{tab}")
        assert f"<title>{STREAM}" in shown
        assert shown.count('aria-current="page"') == 1

    def test_the_restarts_show_the_steps_of_an_upgrade_and_what_the_new_code_did(
        self, page: str, client: Client
    ) -> None:
        desired = client.catalog.desired_states
        row = desired.ensure(STREAM, origin="definition")
        tried = PreflightRecord("43", True, "batch 3: the same 10 rows of output", 3, client.catalog.now_ms())
        desired.note_preflight(STREAM, tried)
        with client.catalog.database.writing() as connection:
            gap = {"to_version": "43", "batch_id": 5, "gap_ms": 1_234, "stopped_ms": 900}
            client.catalog.database.record_event(connection, STREAM, EventType.HANDED_OVER, payload=gap)
        upgrade = UpgradeRecord(UpgradePhase.STABLE, "42", "43", UpgradeMode.HAND_OVER, 0, "it <works>")
        assert desired.advance(row, upgrade=upgrade, alert=None, request_id=None)

        shown = text(page, f"/streams/{STREAM}/-/timeline")

        steps = re.findall(r'<td data-label="Code">(\d+)</td><td><span class="status \w+">(\w+)<', shown)
        assert steps == [("43", "STABLE"), ("43", "HANDED_OVER"), ("43", "PASSED")]
        assert "batch 5 is the first of the new code, 1234 ms after the last of the old code" in shown
        assert "batch 3: the same 10 rows of output" in shown
        assert "it &lt;works&gt;" in shown

    def test_a_rewind_says_why_its_readers_keep_undone_rows(self, page: str, client: Client) -> None:
        with client.catalog.database.writing() as connection:
            begun = {"timeline": 2, "parent": 1, "to_batch": 3, "accepted": "they <only> count"}
            connection.execute(timelines.insert().values(stream_id=STREAM, **begun))

        shown = text(page, f"/streams/{STREAM}/-/timeline")

        assert "timeline 1, after batch 3; readers keep the undone rows: they &lt;only&gt; count" in shown

    def test_executions_in_one_live_directory_share_a_row_and_only_their_ends_are_red(
        self, page: str, golden: GoldenStream
    ) -> None:
        live_through(golden.stream.catalog, STREAM, failures=22, begin_ms=BEGIN_MS)
        chart = text(page, f"/streams/{STREAM}/-/timeline").split("<table")[0]
        assert "from empty state, 23 executions, 22 failed" in chart
        heights = set(re.findall(r'class="bar (?:bad|ended)" x="[^"]*" y="(\d+)"', chart))
        assert len(heights) == 2, "one row for them, one for the execution that took the checkpoint"
        widths = [float(each) for each in re.findall(r'class="bar bad"[^>]* width="([^"]*)"', chart)]
        assert len(widths) == 22
        assert max(widths) <= 6

    def test_a_snapshot_shows_what_its_metadata_says(self, page: str, client: Client) -> None:
        [snapshot] = client.list_snapshots(STREAM)
        shown = text(page, f"/streams/{STREAM}/-/snapshots/{snapshot.snapshot_id}")
        assert str(snapshot.location) in shown
        assert re.search(r"0 stateStoreSave</th><td[^>]*>default</td><td[^>]*>2<", shown)

    def test_a_snapshot_names_the_sinks_that_it_has_not_captured_too(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [record] = client.list_snapshots(STREAM)
        properties = {"sinks": [{"path": "file:///data/orders"}], "other_sinks": ["DeltaSink[/data/totals]"]}
        changed = replace(record, status=SnapshotStatus.DELETED, properties=properties)
        monkeypatch.setattr(type(client.catalog.snapshots), "get", lambda *_: changed)
        page = snapshot(client, STREAM, record.snapshot_id)
        assert page.sinks == ("file:///data/orders", "DeltaSink[/data/totals]")
        assert "other_sinks" not in page.properties

    def test_a_snapshot_of_another_stream_is_not_shown(self, page: str, client: Client) -> None:
        [snapshot] = client.list_snapshots(STREAM)
        text(page, f"/streams/unknown/-/snapshots/{snapshot.snapshot_id}", 404)
        text(page, f"/streams/{STREAM}/-/snapshots/unknown", 404)

    def test_a_snapshot_whose_metadata_is_gone_says_so_and_still_shows_the_catalog(
        self, page: str, client: Client
    ) -> None:
        [snapshot] = client.list_snapshots(STREAM)
        for file in Path(str(snapshot.location).removeprefix("file://")).rglob("_metadata"):
            file.unlink()
        shown = text(page, f"/streams/{STREAM}/-/snapshots/{snapshot.snapshot_id}")
        assert 'class="problem"' in shown
        assert snapshot.snapshot_id in shown

    def test_an_unknown_stream_is_an_error_page(self, page: str) -> None:
        assert "unknown" in text(page, "/streams/unknown", 404)

    def test_a_catalog_without_streams_says_when_one_appears(self, tmp_path: Path) -> None:
        with Client(f"sqlite:///{tmp_path / 'empty.db'}") as client, served(client, None) as address:
            assert "has no stream" in text(address, "/")


class TestHistory:
    def test_all_attempts_are_reached_page_by_page_each_once(self, page: str, golden: GoldenStream) -> None:
        lengthen(golden.stream.catalog, STREAM, 230)
        seen: list[str] = []
        path = f"/streams/{STREAM}/-/history"
        for _ in range(10):
            shown = text(page, path)
            seen += re.findall(r'/-/snapshots/([^"]+)"', shown)
            older = re.search(r'rel="next" href="([^"]+)"', shown)
            if older is None:
                break
            path = f"/streams/{STREAM}/-/history" + older[1].replace("&amp;", "&")
        assert len(seen) == len(set(seen)) == 231

    def test_failed_ones_alone_with_their_reason(self, page: str, golden: GoldenStream) -> None:
        lengthen(golden.stream.catalog, STREAM, 230)
        shown = text(page, f"/streams/{STREAM}/-/history?status=FAILED")
        assert shown.count("the disk is full") == 2
        assert text(page, f"/streams/{STREAM}/-/failures").count("the disk is full") == 2

    @pytest.mark.parametrize("query", ["before=x", "before=1-", "status=NONE", "kind='", "before=" + "9" * 40 + "-a"])
    def test_a_wrong_query_shows_a_page_all_the_same(self, page: str, query: str) -> None:
        text(page, f"/streams/{STREAM}/-/history?{query}")

    def test_percentiles_are_values_that_occurred(self, page: str, golden: GoldenStream) -> None:
        lengthen(golden.stream.catalog, STREAM, 99)
        assert re.search(r"Duration</th><td[^>]*>100 ms<", text(page, f"/streams/{STREAM}/-/summary"))

    def test_the_lag_of_the_sources_is_drawn_where_they_report_it(self, page: str, golden: GoldenStream) -> None:
        assert "Records behind:" not in requests.get(f"{page}/streams/{STREAM}", timeout=30).text
        lengthen(golden.stream.catalog, STREAM, 3, behind=1234)
        shown = requests.get(f"{page}/streams/{STREAM}", timeout=30).text
        assert "Records behind: newest 1,234, highest 1,234, 3 snapshots" in shown
        assert "Watermark delay (event time): newest" in shown
        assert "1,234" in requests.get(f"{page}/streams/{STREAM}/-/history", timeout=30).text
        summary = requests.get(f"{page}/streams/{STREAM}/-/summary", timeout=30).text
        assert re.search(r"Records behind</th>(<td[^>]*>1,234</td>){7}", summary)

    def test_the_delay_of_replayed_events_is_not_drawn(self, page: str, golden: GoldenStream) -> None:
        lengthen(golden.stream.catalog, STREAM, 3, behind=1)
        with golden.stream.catalog.database.writing() as connection:
            connection.exec_driver_sql("UPDATE snapshots SET watermark = '2022-11-14T22:13:00.000Z'")
        shown = text(page, f"/streams/{STREAM}")
        assert "Watermark delay (event time): newest" not in shown
        assert "The events are at least 365 d" in shown

    def test_failures_with_one_reason_are_one_group_with_the_whole_reason_folded(
        self, page: str, golden: GoldenStream
    ) -> None:
        live_through(golden.stream.catalog, STREAM, failures=3)
        desired = golden.stream.catalog.desired_states
        row = desired.ensure(STREAM, origin="definition")
        assert desired.advance(row, upgrade=None, alert="no process answers", request_id=None)
        shown = text(page, f"/streams/{STREAM}/-/failures")
        assert re.search(r"Execution failed</th><td[^>]*>3<", shown)
        assert re.search(r"Alert of the supervisor</th>.*\n.*no process answers", shown)
        assert shown.count("<summary>STREAM_FAILED: the query ended") == shown.count("writeBytes(Native") == 1

    def test_a_long_error_is_told_once_on_the_overview(self, page: str, golden: GoldenStream) -> None:
        golden.run_again(ExecutionStatus.FAILED)
        with golden.stream.catalog.database.writing() as connection:
            connection.execute(update(executions).values(reason=LONG_ERROR))
        shown = text(page, f"/streams/{STREAM}")
        assert shown.count("No space left") == 2  # the headline, and unfolded
        assert "its last run failed: see Query above" in shown

    def test_the_list_has_the_pace_of_a_running_stream(self, page: str, golden: GoldenStream) -> None:
        golden.begin_again({"batch_id": 2, "rows_per_second": 1234.4, "sources": [{"behind": 56_789}]})
        shown = text(page, "/")
        assert re.search(r'"Rows/s"[^>]*>1,234<', shown)
        assert re.search(r'"Behind"[^>]*>56,789<', shown)
        # Its report is older than its newest snapshot.
        assert re.search(r'"Batch"[^>]*>4<', shown)

    def test_each_option_has_its_effect(self, page: str) -> None:
        shown = requests.get(f"{page}/streams/{STREAM}/-/configuration", timeout=30).text
        assert re.search(r"timeout</th><td[^>]*>10 min</td><td[^>]*><span[^>]*>real<", shown)
        assert "which are off" in shown


class TestSafety:
    def test_a_label_is_text_and_never_markup(self, page: str, golden: GoldenStream) -> None:
        lengthen(golden.stream.catalog, STREAM, 3, label='<script>alert(1)</script>" onload=x')
        with golden.stream.catalog.database.writing() as connection:
            connection.exec_driver_sql("UPDATE snapshots SET kind = 'SAVEPOINT', status = 'DELETED'")
        for tab in TABS:
            shown = text(page, f"/streams/{STREAM}{tab}")
            assert "<script>alert" not in shown
            assert '" onload' not in shown

    def test_secrets_of_addresses_are_redacted(self, page: str, golden: GoldenStream) -> None:
        with golden.stream.catalog.database.writing() as connection:
            connection.exec_driver_sql(
                "UPDATE streams SET live_directory = 's3://key:hunter2@bucket/live', "
                "asset_key = 'postgresql://u:hunter2@h/db'"
            )
            connection.exec_driver_sql("UPDATE executions SET reason = 'failed: jdbc:x://h?password=hunter2'")
        for path in ("/", *(f"/streams/{STREAM}{tab}" for tab in TABS)):
            assert "hunter2" not in requests.get(page + path, timeout=30).text

    def test_nothing_is_loaded_from_elsewhere_and_no_script_is_inline(self, page: str) -> None:
        answer = requests.get(f"{page}/streams/{STREAM}", timeout=30)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', answer.text)

    def test_a_scraper_that_uses_another_host_name_is_refused(self, page: str) -> None:
        refused = requests.get(f"{page}/metrics", headers={"Host": "evil.example.com"}, timeout=30)
        assert (refused.status_code, "dagster_ckpt_" in refused.text) == (400, False)

    def test_another_host_name_is_refused(self, page: str) -> None:
        answer = requests.get(page, headers={"Host": "attacker.example"}, timeout=30)
        assert answer.status_code == 400

    @pytest.mark.parametrize("verb", ["savepoint", "stop", "restart", "checkpoint"])
    def test_a_read_only_page_does_nothing(self, page: str, client: Client, verb: str) -> None:
        answer = requests.post(
            f"{page}/streams/{STREAM}/-/actions/{verb}", cookies={"dagster_ckpt_actions": ""}, timeout=30
        )
        assert answer.status_code == 403
        assert len(client.list_snapshots(STREAM, status=None)) == 1


class TestActions:
    def test_without_the_token_nothing_is_offered_or_done(self, acting: str, client: Client) -> None:
        assert '<form class="act"' not in text(acting, f"/streams/{STREAM}")
        assert requests.post(f"{acting}/streams/{STREAM}/-/actions/savepoint", timeout=30).status_code == 403
        assert requests.get(f"{acting}/sign-in?token=wrong", timeout=30).status_code == 403
        assert len(client.list_snapshots(STREAM)) == 1

    def test_the_cookie_is_not_the_token_and_scripts_cannot_read_it(self, acting: str) -> None:
        answer = requests.get(f"{acting}/sign-in?token={TOKEN}", allow_redirects=False, timeout=30)
        cookie = answer.headers["Set-Cookie"].lower()
        assert TOKEN not in cookie
        assert "httponly" in cookie
        assert "samesite=strict" in cookie

    def test_another_site_cannot_use_the_cookie(self, acting: str, signed_in: requests.Session, client: Client) -> None:
        answer = signed_in.post(
            f"{acting}/streams/{STREAM}/-/actions/savepoint", headers={"Origin": "http://attacker.example"}
        )
        assert answer.status_code == 403
        assert len(client.list_snapshots(STREAM)) == 1

    def test_a_savepoint_is_taken_and_reported(self, acting: str, signed_in: requests.Session, client: Client) -> None:
        answer = signed_in.post(f"{acting}/streams/{STREAM}/-/actions/savepoint", data={"label": "from-the-page"})
        assert answer.ok
        awaited(lambda: "DONE" in signed_in.get(f"{acting}/streams/{STREAM}").text)
        [savepoint] = client.list_snapshots(STREAM, kind=SnapshotKind.SAVEPOINT)
        assert savepoint.label == "from-the-page"

    def test_what_is_refused_says_why(self, acting: str, signed_in: requests.Session) -> None:
        signed_in.post(f"{acting}/streams/{STREAM}/-/actions/stop")
        awaited(lambda: ">FAILED<" in signed_in.get(f"{acting}/streams/{STREAM}").text)
        assert "cannot be stopped" in signed_in.get(f"{acting}/streams/{STREAM}").text

    def test_a_restart_shows_its_preview_first(self, acting: str, signed_in: requests.Session, client: Client) -> None:
        [snapshot] = client.list_snapshots(STREAM)
        shown = signed_in.get(f"{acting}/streams/{STREAM}/-/restart", params={"start_from": snapshot.snapshot_id}).text
        assert "What this start would do" in shown
        assert "data-confirm" in shown
        wrong = signed_in.get(f"{acting}/streams/{STREAM}/-/restart", params={"start_from": "no-such-label"}).text
        assert 'class="problem"' in wrong
        assert "Restart from no-such-label" not in wrong

    @pytest.mark.parametrize(
        ("form", "status"),
        [
            ({"start_from": "latest", "accept_loss": "true", "padding": "x" * 20_000}, 413),
            ({"accept_loss": "true"}, 400),
            ({"start_from": "latest", "accept_loss": "perhaps"}, 400),
        ],
    )
    def test_a_form_that_is_too_large_or_names_no_point_starts_nothing(
        self, acting: str, signed_in: requests.Session, client: Client, form: dict[str, str], status: int
    ) -> None:
        answer = signed_in.post(f"{acting}/streams/{STREAM}/-/actions/restart", data=form)
        assert answer.status_code == status
        assert client.list_requests() == []
        assert "Restart from" not in signed_in.get(f"{acting}/streams/{STREAM}").text

    def test_the_preview_is_of_the_query_id_that_the_restart_uses(
        self, acting: str, signed_in: requests.Session, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []
        real = Client.preview_rewind

        def seen(self: Client, stream: str, **named: Any) -> Any:
            asked.append(named["start_from"].new_query_id)
            return real(self, stream, **named)

        monkeypatch.setattr(Client, "preview_rewind", seen)
        [snapshot] = client.list_snapshots(STREAM)
        query = {"start_from": snapshot.snapshot_id, "new_query_id": "true"}
        shown = signed_in.get(f"{acting}/streams/{STREAM}/-/restart", params=query).text
        assert asked == [True]
        assert '<input type="hidden" name="new_query_id" value="true">' in shown

    def test_a_label_that_two_snapshots_have_is_not_offered(
        self, acting: str, signed_in: requests.Session, client: Client
    ) -> None:
        twice = [client.trigger_savepoint(STREAM).snapshot_id for _ in range(2)]
        for each in twice:
            client.catalog.holds.tag(each, label="twice", holder="a test")
        client.trigger_savepoint(STREAM, label="once")
        shown = signed_in.get(f"{acting}/streams/{STREAM}/-/restart").text
        offered = set(re.findall(r'<option value="([^"]+)"', shown))
        assert {"once", *twice} <= offered
        assert "twice" not in offered

    def test_an_unknown_action_is_an_error(self, acting: str, signed_in: requests.Session) -> None:
        assert signed_in.post(f"{acting}/streams/{STREAM}/-/actions/drop").status_code == 404
        assert signed_in.post(f"{acting}/streams/unknown/-/actions/savepoint").status_code == 404


@contextmanager
def command(golden: GoldenStream, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`dagster-ckpt ui` with actions in a process of its own, and the addresses that it prints."""
    program = [sys.executable, "-c", "from dagster_ckpt.cli.main import main; main()"]
    catalog = f"sqlite:///{golden.root / 'catalog.db'}"
    with subprocess.Popen(
        [*program, "--catalog", catalog, "ui", "--port", "0", "--actions", "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            # The socket is bound already; the server answers once it has started.
            yield process, json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        finally:
            process.kill()


def test_the_printed_address_signs_in_with_any_token(golden: GoldenStream) -> None:
    with command(golden, "--token", "q+Zr8/1d9X0=&x#y 100%é") as (_, addresses):
        answer = requests.get(addresses["sign_in"], allow_redirects=False, timeout=30)
    assert answer.status_code == 303


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_command_serves_the_page_until_ctrl_c_and_withdraws_what_its_actions_wait_for(
    golden: GoldenStream, number: signal.Signals
) -> None:
    records = golden.stream.catalog.requests
    with command(golden) as (process, addresses), requests.Session() as session:
        assert session.get(addresses["sign_in"], timeout=30).ok
        stream = f"{addresses['address']}streams/{STREAM}"
        assert "form class" in session.get(stream, timeout=30).text
        # Nothing launches it: the page waits.
        assert session.post(f"{stream}/-/actions/restart", data={"start_from": "latest"}, timeout=30).ok
        awaited(lambda: bool(records.unanswered(STREAM)))
        [asked] = records.unanswered(STREAM)
        process.send_signal(number)
        assert process.wait(60) == 0
    assert records.get(asked.request_id).status is RequestStatus.WITHDRAWN


def test_a_page_for_all_addresses_prints_one_that_answers(golden: GoldenStream) -> None:
    with command(golden, "--host", "0.0.0.0") as (_, addresses):
        address = urlsplit(addresses["address"])
        assert address.hostname == socket.gethostname()
        here = f"http://127.0.0.1:{address.port}"
        assert requests.get(here, headers={"Host": address.netloc}, timeout=30).ok
        refused = requests.get(here, headers={"Host": "attacker.example"}, timeout=30)
        assert refused.status_code == 400
        assert "--allowed-host" in refused.text


def test_a_port_that_is_taken_is_named_with_what_to_do(golden: GoldenStream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ["--catalog", f"sqlite:///{golden.root / 'catalog.db'}", "ui", "--port", str(port)]
        result = CliRunner().invoke(commands(), arguments)
    assert result.exit_code == FAILED
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in result.stderr
    assert "--port" in result.stderr


def test_a_chart_names_the_newest_of_many_values_and_not_the_largest_near_it() -> None:
    figures = [
        SnapshotFigures(str(n), SnapshotKind.CHECKPOINT, n, n, n * 1000, n % 7, *[None] * 6) for n in range(1, 1001)
    ]
    chart = line_chart("Duration", points(figures, "duration_ms"), str)
    assert f"newest {1000 % 7}, highest 6, 1000 snapshots" in chart
    assert "chk-1000, batch 1000" in chart


def figures_at(*points_at: tuple[int, int]) -> list[SnapshotFigures]:
    return [
        SnapshotFigures(str(n), SnapshotKind.CHECKPOINT, n, n, at_ms, value, *[None] * 6)
        for n, (at_ms, value) in enumerate(points_at)
    ]


def test_no_line_leads_across_a_start_and_the_start_is_marked() -> None:
    figures = figures_at((0, 5), (1_000, 6), (60_000, 7), (61_000, 8), (90_000, 9))
    values = points(figures, "duration_ms")
    whole = line_chart("Duration", values, str)
    cut = line_chart("Duration", values, str, starts=[80_000, 50_000, 999_999])
    path = re.findall(r'd="(M[^"]*)"', cut)[0]
    assert [len(part.split()) for part in path.split("M")[1:]] == [2, 2, 2], "two lines and a dot"
    assert path.endswith("h0")
    assert len(re.findall(r'class="start"', cut)) == 2
    assert 'class="start"' not in whole


def test_one_slow_start_does_not_flatten_the_chart_and_is_still_named() -> None:
    values = points(figures_at(*((n * 1000, 9_000 if n == 7 else 100) for n in range(40))), "duration_ms")
    chart = line_chart("Duration", values, str)
    assert "200, cut off; the highest is 9000" in chart
    assert "highest 9000" in re.findall(r'aria-label="([^"]*)"', chart)[0]
    assert "cut off" not in line_chart("Duration", values[10:], str)


@pytest.mark.parametrize(
    ("span_s", "names"),
    [
        (12, ["22:13:20", "22:13:25", "22:13:30"]),
        (3_600, ["22:15", "22:30", "22:45", "23:00"]),
        (5 * 86_400, ["11-15", "11-16", "11-17", "11-18", "11-19"]),
        (900 * 86_400, ["2024-03", "2024-08", "2025-01", "2025-06", "2025-11", "2026-04"]),
    ],
)
def test_ticks_are_round_moments_of_the_time_that_is_shown(span_s: int, names: list[str]) -> None:
    assert [name for _, name in ticks(BEGIN_MS, BEGIN_MS + span_s * 1000, most=6)] == names
