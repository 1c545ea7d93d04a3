import inspect
import pickle
from datetime import timedelta
from typing import Any

import pytest

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage, JobManagerCheckpointStorage
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.durations import Duration, iso_duration
from dagster_ckpt.values.modes import (
    CheckpointingMode,
    ExternalizedCheckpointCleanup,
    ExternalizedCheckpointRetention,
)
from dagster_ckpt.values.validation import Effect


def described(config: CheckpointConfig) -> dict[str, tuple[object, Effect]]:
    return {line.option: (line.value, line.effect) for line in config.describe()}


def test_both_spellings_are_views_of_one_value() -> None:
    plain = CheckpointConfig(
        mode="AT_LEAST_ONCE",
        interval=timedelta(minutes=1),
        timeout=5_000,
        min_pause=timedelta(seconds=30),
        max_concurrent=3,
        tolerable_failures=2,
        cleanup="RETAIN_ON_CANCELLATION",
        unaligned=True,
        alignment_timeout=timedelta(seconds=5),
        force_unaligned=True,
        num_retained=4,
        prefer_checkpoint_for_recovery=True,
        storage="file:///data/checkpoints",
    )
    pyflink = CheckpointConfig()
    pyflink.set_checkpointing_mode(CheckpointingMode.AT_LEAST_ONCE)
    pyflink.set_checkpoint_interval(60_000)
    pyflink.set_checkpoint_timeout(5_000)
    pyflink.set_min_pause_between_checkpoints(30_000)
    pyflink.set_max_concurrent_checkpoints(3)
    pyflink.set_tolerable_checkpoint_failure_number(2)
    pyflink.enable_externalized_checkpoints(ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION)
    pyflink.enable_unaligned_checkpoints()
    pyflink.set_alignment_timeout(Duration.of_seconds(5))
    pyflink.set_force_unaligned_checkpoints(True)
    pyflink.set_num_retained_checkpoints(4)
    pyflink.set_prefer_checkpoint_for_recovery(True)
    pyflink.set_checkpoint_storage_dir("file:///data/checkpoints")
    assert plain == pyflink
    assert plain != CheckpointConfig()
    assert repr(plain) == repr(pyflink)


def test_the_defaults_are_flinks() -> None:
    options = CheckpointConfig().options
    assert options == CheckpointOptions()
    assert options.num_retained == 1
    assert not options.is_checkpointing_enabled
    assert not CheckpointConfig().is_prefer_checkpoint_for_recovery()
    assert CheckpointConfig().get_alignment_timeout() == timedelta(0)


def test_an_interval_turns_checkpointing_on() -> None:
    config = CheckpointConfig().set_checkpoint_interval(10)
    assert config.is_checkpointing_enabled()
    assert config.options.interval == 10


def test_a_plain_absolute_path_is_a_local_directory() -> None:
    plain, url = CheckpointConfig(storage="/data/x"), CheckpointConfig(storage="file:///data/x")

    assert plain == url
    assert plain == CheckpointConfig().set_checkpoint_storage("/data/x")
    # PyFlink's own setter takes URLs only, as the recorded answers show.
    with pytest.raises(OptionError, match="has no scheme"):
        CheckpointConfig().set_checkpoint_storage_dir("/data/x")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"interval": 9}, "checkpoint interval is 9, but must be a whole number of milliseconds"),
        (
            {"interval": timedelta(milliseconds=9)},
            r"checkpoint interval is datetime.timedelta\(microseconds=9000\)",
        ),
        ({"num_retained": 0}, "num_retained is 0, but must be a whole number from 1 to 2147483647"),
        ({"recovery_depth": 0}, "recovery depth is 0"),
        ({"mode": "TWICE"}, "checkpointing mode is 'TWICE', but must be one of CheckpointingMode.EXACTLY"),
        ({"cleanup": "KEEP"}, "externalized checkpoint cleanup is 'KEEP'"),
        ({"alignment_timeout": -1}, "alignment timeout is -1"),
        ({"storage": "data/x"}, "storage is 'data/x', a relative path.* Give the absolute path, such as /"),
        ({"storage": "/"}, "checkpoint_path is 'file:///', the root directory"),
    ],
)
def test_a_value_out_of_range_is_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CheckpointConfig(**keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"interval": True}, r"checkpoint interval is True \(bool\)"),
        ({"timeout": None}, r"checkpoint timeout is None \(NoneType\)"),
        ({"max_concurrent": 1.0}, r"max concurrent checkpoints is 1.0 \(float\)"),
        ({"unaligned": 1}, r"unaligned checkpoints is 1 \(int\), but must be True or False"),
        ({"prefer_checkpoint_for_recovery": "yes"}, "prefer checkpoint for recovery is 'yes'"),
        ({"mode": 0}, r"checkpointing mode is 0 \(int\)"),
        ({"storage": 5}, r"checkpoint storage is 5 \(int\)"),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionTypeError, match=message):
        CheckpointConfig(**keywords)


@pytest.mark.parametrize("timeout", [1_000, "1s", None])
def test_the_alignment_timeout_of_pyflink_is_no_number(timeout: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"alignment timeout is .* must be a Duration or a timedelta"):
        CheckpointConfig().set_alignment_timeout(timeout)


def test_either_enum_of_flink_names_the_cleanup() -> None:
    config = CheckpointConfig().enable_externalized_checkpoints(ExternalizedCheckpointRetention.RETAIN_ON_CANCELLATION)
    assert config.get_externalized_checkpoint_cleanup() is ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION


def test_a_rejected_value_changes_nothing() -> None:
    config = CheckpointConfig(interval=1_000)
    with pytest.raises(OptionError):
        config.set_checkpoint_interval(1)
    assert config == CheckpointConfig(interval=1_000)


@pytest.mark.parametrize("storage", ["s3://bucket/c", FileSystemCheckpointStorage("s3://bucket/c")])
def test_a_storage_is_a_value_or_the_url_of_a_directory(storage: Any) -> None:
    config = CheckpointConfig().set_checkpoint_storage(storage)
    assert config.get_checkpoint_storage() == FileSystemCheckpointStorage("s3://bucket/c")


def test_no_storage_cannot_be_set_by_hand() -> None:
    with pytest.raises(OptionTypeError, match="checkpoint storage is None"):
        CheckpointConfig().set_checkpoint_storage(None)  # type: ignore[arg-type]


def test_options_reject_what_is_no_storage() -> None:
    with pytest.raises(OptionTypeError, match="checkpoint storage is 3"):
        CheckpointOptions(storage=3)  # type: ignore[arg-type]


def test_the_enum_of_flink_1_20_sets_the_same_policy() -> None:
    config = CheckpointConfig()
    config.set_externalized_checkpoint_retention(ExternalizedCheckpointRetention.DELETE_ON_CANCELLATION)
    assert config.options.cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


def test_failing_on_errors_is_the_older_spelling_of_tolerable_failures() -> None:
    assert CheckpointConfig().set_fail_on_checkpointing_errors(False).options.tolerable_failures == 2**31 - 1
    assert CheckpointConfig().set_fail_on_checkpointing_errors(True).options.tolerable_failures == 0


def test_failing_on_errors_never_replaces_a_number_that_was_set() -> None:
    """Flink 1.20, `CheckpointConfig.setFailOnCheckpointingErrors`: without effect if the number is present."""
    config = CheckpointConfig().set_tolerable_checkpoint_failure_number(3)
    assert config.set_fail_on_checkpointing_errors(True).options.tolerable_failures == 3
    assert CheckpointConfig(tolerable_failures=3).set_fail_on_checkpointing_errors(True).options.tolerable_failures == 3
    zero = CheckpointConfig().set_tolerable_checkpoint_failure_number(0)
    assert zero.set_fail_on_checkpointing_errors(False).options.tolerable_failures == 0
    # The older method sets the same option, so its own second call has no effect either.
    first = CheckpointConfig().set_fail_on_checkpointing_errors(False)
    assert first.set_fail_on_checkpointing_errors(True).options.tolerable_failures == 2**31 - 1
    assert first.set_tolerable_checkpoint_failure_number(5).options.tolerable_failures == 5


def test_a_refused_number_leaves_the_older_method_in_effect() -> None:
    config = CheckpointConfig()
    with pytest.raises(OptionError):
        config.set_tolerable_checkpoint_failure_number(-1)
    assert config.set_fail_on_checkpointing_errors(False).options.tolerable_failures == 2**31 - 1


def test_a_minimum_pause_goes_with_several_concurrent_checkpoints() -> None:
    options = CheckpointConfig(interval=1_000, min_pause=500, max_concurrent=2).options
    assert (options.min_pause, options.max_concurrent) == (500, 2)


def test_unaligned_checkpoints_exclude_several_at_once() -> None:
    config = CheckpointConfig().enable_unaligned_checkpoints().set_max_concurrent_checkpoints(2)
    with pytest.raises(OptionError, match="max concurrent checkpoints is 2, but must be 1"):
        config.validate()
    with pytest.raises(OptionError, match="max concurrent checkpoints is 2, but must be 1"):
        _ = config.options
    assert config.disable_unaligned_checkpoints().options.max_concurrent == 2


def test_unaligned_checkpoints_are_off_under_at_least_once() -> None:
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, unaligned=True, max_concurrent=2)
    assert config.is_unaligned_checkpoints_enabled()  # what was asked for, as PyFlink answers
    assert not config.options.unaligned


def test_unaligned_checkpoints_come_back_with_exactly_once() -> None:
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, unaligned=True)
    config.set_checkpointing_mode(CheckpointingMode.EXACTLY_ONCE)
    assert config.is_unaligned_checkpoints_enabled()
    assert config.options.unaligned


def test_options_in_effect_stay_in_effect() -> None:
    options = CheckpointOptions(mode=CheckpointingMode.AT_LEAST_ONCE, unaligned=True).in_effect()
    assert options.in_effect() is options


def test_every_option_is_described_once_with_its_effect() -> None:
    keywords = set(inspect.signature(CheckpointConfig).parameters)
    lines = CheckpointConfig().describe()
    assert {line.option for line in lines} == keywords
    assert len(lines) == len(keywords)
    assert all(line.explanation.endswith(".") for line in lines)


def test_an_option_without_effect_says_so() -> None:
    off = described(CheckpointConfig(min_pause=5, alignment_timeout=7, force_unaligned=True))
    assert off["min_pause"] == (5, Effect.NONE)
    assert off["alignment_timeout"] == (7, Effect.NONE)
    assert off["force_unaligned"] == (True, Effect.NONE)
    on = described(CheckpointConfig(interval=10, min_pause=5, alignment_timeout=7, unaligned=True))
    assert on["min_pause"] == (5, Effect.REAL)
    assert on["alignment_timeout"] == (7, Effect.REAL)
    assert on["force_unaligned"] == (False, Effect.REAL)


def test_what_at_least_once_turns_off_is_told_not_hidden() -> None:
    told = described(CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, unaligned=True))
    assert told["mode"] == (CheckpointingMode.AT_LEAST_ONCE, Effect.MAPPED)
    assert told["unaligned"] == (True, Effect.NONE)


def test_options_survive_pickling() -> None:
    options = CheckpointConfig(interval=10, storage=JobManagerCheckpointStorage("file:///data/c")).options
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("duration", "same"),
    [
        (Duration.of_days(1), timedelta(days=1)),
        (Duration.of_hours(2), timedelta(hours=2)),
        (Duration.of_minutes(3), timedelta(minutes=3)),
        (Duration.of_seconds(4), timedelta(seconds=4)),
        (Duration.of_millis(5), timedelta(milliseconds=5)),
        (Duration.of_nanos(6_000_999), timedelta(milliseconds=6)),
    ],
)
def test_a_duration_of_pyflink_is_a_timedelta(duration: Duration, same: timedelta) -> None:
    assert duration == same
    assert CheckpointConfig().set_alignment_timeout(duration).get_alignment_timeout() == same


def test_a_duration_that_cannot_be_kept_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"duration is .* but must be at most 999999999 days"):
        Duration.of_millis(2**62)
    with pytest.raises(OptionTypeError, match=r"duration is .* but must be a whole number"):
        Duration.of_seconds("1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "PT0S"),
        (1, "PT0.001S"),
        (90_000, "PT1M30S"),
        (3_600_000, "PT1H"),
        (90_061_500, "PT25H1M1.5S"),
        (-61_000, "PT-1M-1S"),
    ],
)
def test_durations_are_written_as_java_does(duration_ms: int, text: str) -> None:
    assert iso_duration(duration_ms) == text
