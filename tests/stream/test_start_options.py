"""An option of a start is declared once, in `StartFrom`: every interface has it from there, and old rows are read."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dagster_ckpt.errors import OptionError
from dagster_ckpt.stream.start_from import StartFrom, start_options
from dagster_ckpt.values.modes import RecoveryClaimMode
from tests.stream import made_up_option_program
from tests.stream.made_up_option_program import DESCRIPTION, NAME

# As they were written before rows left out defaults.
OLD_ROW = {
    "start_from": "chk-7",
    "new_query_id": True,
    "accept_loss": False,
    "claim_mode": "CLAIM",
    "accept_plan_change": False,
    "discard_state": False,
    "no_safety_savepoint": True,
    "source_offsets": '{"orders": {"0": 124}}',
    "state_partitions": 12,
    "cause": "MANUAL",
    "run_id": "a run",
}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What each interface knows, once `StartFrom` has an option more."""
    program = [sys.executable, made_up_option_program.__file__]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_new_option_is_an_option_of_the_command(known: dict[str, Any]) -> None:
    assert known["command line"]["restart"][NAME] == DESCRIPTION
    assert {option.name for option in start_options()} < set(known["command line"]["restart"])


@pytest.mark.parametrize("op", ["orders", "clicks", "restart_stream", "preview_rewind"])
def test_a_new_option_is_in_the_config_of_each_start(known: dict[str, Any], op: str) -> None:
    assert known["launchpad"][op][NAME] == DESCRIPTION
    assert {option.name for option in start_options()} < set(known["launchpad"][op])


def test_a_new_option_is_in_the_form_of_the_page(known: dict[str, Any]) -> None:
    for option in start_options():
        assert option.confirms is (f'name="{option.name}"' not in known["page"])
    assert f'title="{DESCRIPTION}"><input type="checkbox" name="{NAME}"' in known["page"]


def test_a_new_option_reaches_the_run_through_the_request(known: dict[str, Any]) -> None:
    assert known["row"] == known["run"] == {"start_from": "chk-7", NAME: True}
    assert known["read"] is True


def test_requests_of_earlier_releases_are_read() -> None:
    assert StartFrom.from_record(OLD_ROW) == StartFrom(
        "chk-7",
        new_query_id=True,
        claim_mode=RecoveryClaimMode.CLAIM,
        no_safety_savepoint=True,
        source_offsets='{"orders": {"0": 124}}',
        state_partitions=12,
    )


@pytest.mark.parametrize(
    "start",
    [
        StartFrom(),
        StartFrom(" BATCH-007 ", accept_loss=True),
        StartFrom("mine", claim_mode=RecoveryClaimMode.CLAIM),
        StartFrom("empty", discard_state=True),
        StartFrom("chk-1", state_partitions=4, source_offsets='{"orders": {"0": 1}}'),
    ],
)
def test_a_record_has_what_is_set_and_is_read_again(start: StartFrom) -> None:
    record = start.as_record()
    assert StartFrom.from_record(json.loads(json.dumps(record))) == start
    assert set(record) == {"start_from"} | {
        option.name for option in start_options() if getattr(start, option.name) != option.default
    }


def test_texts_of_a_form_are_read() -> None:
    read = StartFrom.from_record({"start_from": "chk-1", "accept_loss": "true", "state_partitions": "4"})
    assert read == StartFrom("chk-1", accept_loss=True, state_partitions=4)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"accept_loss": "perhaps"}, "accept_loss"),
        ({"state_partitions": 0}, "state_partitions is 0"),
        ({"start_from": ""}, "start_from is empty"),
        ({"claim_mode": "LEGACY"}, "LEGACY"),
    ],
)
def test_a_record_that_is_not_valid_is_refused(record: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StartFrom.from_record(record)
