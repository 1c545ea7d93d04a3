"""A preview says what a policy would keep and why, and is what the policy then does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.policies.retention import KeepRules, Latest, MaxBytes, RetentionPolicy
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from tests.support.retention_shelf import FILE_BYTES, STREAM, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


@pytest.fixture
def client(shelf: Shelf) -> Client:
    return Client.of_stream(shelf.stream, origin="a test")


def with_policy(shelf: Shelf, policy: RetentionPolicy) -> None:
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, retention=policy))


def test_it_names_the_rules_and_the_guard_and_is_what_happens(shelf: Shelf, client: Client) -> None:
    taken = [shelf.checkpoint() for _ in range(4)]
    policy = KeepRules(last=1) & Latest(3)

    preview = client.preview_retention(STREAM, policy)

    assert [each.snapshot_id for each in preview.deleted] == [each.snapshot_id for each in taken[:3]]
    [kept] = [each for each in preview.snapshots if each.reasons]
    assert kept.reasons == ("last", "Latest(count=3)", "a recovery may need it")
    assert preview.messages()[-1].endswith(f"keeps 1 of 4 checkpoints, {kept.full_bytes} B")
    with_policy(shelf, policy)
    assert {each.snapshot_id for each in subsume(shelf.stream)} == {each.snapshot_id for each in preview.deleted}


def test_a_budget_counts_the_objects_that_checkpoints_share_once(shelf: Shelf, client: Client) -> None:
    first = shelf.checkpoint()
    second = shelf.checkpoint(base=first)
    shelf.checkpoint(base=second)
    # Three files of an object each, one more in each checkpoint.
    assert client.preview_retention(STREAM, MaxBytes(10**6)).kept_bytes == 3 * FILE_BYTES
    assert client.preview_retention(STREAM, MaxBytes(3 * FILE_BYTES)).deleted == ()
    # The newest has all three files, so the others cost nothing.
    assert len(client.preview_retention(STREAM, MaxBytes(1)).deleted) == 2

    shelf.checkpoint()
    assert client.preview_retention(STREAM, MaxBytes(10**6)).kept_bytes == 4 * FILE_BYTES
    assert len(client.preview_retention(STREAM, MaxBytes(4 * FILE_BYTES - 1)).deleted) == 3


def test_over_the_history_deleted_checkpoints_take_part(shelf: Shelf, client: Client) -> None:
    for _ in range(5):
        shelf.checkpoint()
        discard(shelf.stream, subsume(shelf.stream), reason="subsumed", lease=None)
    assert len(client.preview_retention(STREAM, Latest(4)).snapshots) == 3

    preview = client.preview_retention(STREAM, Latest(4), history=True)

    assert [bool(each.reasons) for each in preview.snapshots] == [False, True, True, True, True]
    assert (preview.kept_bytes, preview.most_bytes) == (4 * FILE_BYTES, 4 * FILE_BYTES)


@pytest.mark.parametrize("history", [False, True])
def test_the_newest_one_without_known_damage_is_shown_as_kept(shelf: Shelf, client: Client, *, history: bool) -> None:
    _, intact, newest = shelf.checkpoint(), shelf.checkpoint(), shelf.checkpoint()
    shelf.stream.catalog.snapshots.verified(newest.snapshot_id, "an object is truncated")

    preview = client.preview_retention(STREAM, Latest(1), history=history)

    kept = {each.snapshot_id: each.reasons for each in preview.snapshots if each.reasons}
    assert kept.keys() == {intact.snapshot_id, newest.snapshot_id}
    assert kept[intact.snapshot_id] == ("a recovery may need it",)


def test_the_policy_of_the_stream_is_the_default_and_the_command_takes_one_as_yaml(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        shelf.checkpoint()
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", str(shelf.stream.catalog.database.url.render_as_string(False)))

    def deleted(*options: str) -> int:
        result = CliRunner().invoke(commands(), ["preview-retention", STREAM, "--json", *options])
        assert result.exit_code == 0, result.output
        return sum(not each["reasons"] for each in json.loads(result.stdout)["snapshots"])

    assert deleted() == 1
    assert deleted("--policy", "{keep_rules: {last: 2}}") == 2
    for wrong in ("{", "3", "{newest: 2}"):
        assert CliRunner().invoke(commands(), ["preview-retention", STREAM, "--policy", wrong]).exit_code in (1, 2)
