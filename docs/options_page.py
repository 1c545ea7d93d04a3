"""Writes docs/options.md from the options themselves: `python docs/options_page.py`.

Values, ranges, effects and sentences all come from the code, so the page cannot say anything else than it does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from dagster_ckpt import flink as options
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.rocksdb import OPTIONS_SET, RocksDBOption, RocksDBOptions
from dagster_ckpt.config.state_backend import MAX_PARALLELISM
from dagster_ckpt.flink import execution_config as execution
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.orchestration.resources import CheckpointStorageResource, StateBackendResource
from dagster_ckpt.orchestration.settings import RestartSettings
from dagster_ckpt.values.validation import Effect, OptionDescription, options_of

PAGE = Path(__file__).with_name("options.md")

# The methods of PyFlink that set and get an option, where their names do not contain its keyword.
METHODS = {
    "mode": "checkpointing_mode",
    "interval": "checkpoint_interval|checkpointing_enabled",
    "timeout": "checkpoint_timeout",
    "tolerable_failures": "tolerable|fail_on",
    "cleanup": "externalized",
    "unaligned": "able_unaligned|is_unaligned",
    "prefer_checkpoint_for_recovery": "prefer_checkpoint",
    "storage": "checkpoint_storage",
    "retention": "retention_policy",
    "trigger": "trigger_policy",
}
LINKS = {
    "retention": "a [retention policy](policies.md#retention), or the same as data",
    "trigger": "a [trigger policy](policies.md#triggers), or the same as data",
}
# What `describe` calls an option to the field of RocksDBOptions that documents it.
ROCKSDB_FIELDS = {
    "enable_incremental_checkpointing": "incremental",
    "predefined_options": "predefined",
    "options": "factory",
    "number_of_transfer_threads": "transfer_threads",
}
# What `describe` calls an option of an environment to the range it takes.
EXECUTION_RANGES: dict[str, Any] = {
    "parallelism": execution.PARALLELISM,
    "max_parallelism": MAX_PARALLELISM,
    "buffer_timeout": execution.BUFFER_TIMEOUT,
    "operator_chaining": execution.CHAINING,
    "time_characteristic": execution.TIME_CHARACTERISTIC,
    "changelog_state_backend": execution.CHANGELOG,
}
# What an object had to be given to be made: it has no default.
EXAMPLES = ("file:/data/checkpoints", "package.module:Name", "com.example.Provider")
STORAGES = (
    options.FileSystemCheckpointStorage("file:///data/checkpoints"),
    options.JobManagerCheckpointStorage(),
    options.CustomCheckpointStorage("package.module:Name"),
)
BACKENDS = (
    options.HashMapStateBackend(),
    options.EmbeddedRocksDBStateBackend(),
    options.MemoryStateBackend(),
    options.FsStateBackend("file:///data/checkpoints"),
    options.RocksDBStateBackend("file:///data/checkpoints"),
    options.CustomStateBackend("com.example.Provider"),
)
# Together these show every sentence that `describe` can say.
EXECUTIONS = (
    options.ExecutionConfig(),
    options.ExecutionConfig(parallelism=4),
    options.ExecutionConfig(buffer_timeout_ms=-1),
    *(options.ExecutionConfig(time_characteristic=each) for each in options.TimeCharacteristic),
)
STRATEGIES = {
    "no_restart": options.RestartStrategies.no_restart(),
    "fixed_delay_restart": options.RestartStrategies.fixed_delay_restart(3, 10_000),
    "failure_rate_restart": options.RestartStrategies.failure_rate_restart(3, 300_000, 10_000),
    "exponential_delay_restart": options.RestartStrategies.exponential_delay_restart(),
    "fall_back_restart": options.RestartStrategies.fall_back_restart(),
}
ENUMS: tuple[type[Enum], ...] = (
    options.CheckpointingMode,
    options.ExternalizedCheckpointCleanup,
    options.ExternalizedCheckpointRetention,
    options.PredefinedOptions,
    options.TimeCharacteristic,
)


def page() -> str:
    """Return the whole page."""
    seen: set[tuple[str, ...]] = set()
    return "\n".join(
        [
            "# Options",
            "",
            "<!-- Written by docs/options_page.py from the code. Change the code, then run it again. -->",
            "",
            "One definition, three spellings: keywords (`CheckpointConfig(interval=60_000)`), PyFlink's setters and "
            "getters on the same object, and Dagster config. Durations are milliseconds or `timedelta`. Every object "
            "has `describe()`: its values, and what each does *as it is set*.",
            "",
            "An option does under Spark just what it does under Flink, unless it is **mapped** to the setting or "
            "mechanism of Spark with the same purpose, or has **no effect**, for the reason given.",
            "",
            *_checkpoint_config(),
            *_storages(seen),
            *_backends(seen),
            *_predefined(),
            *_restart(),
            *_execution(),
            *_kafka(),
            *_dagster(),
            *_enums(),
            *_methods(),
        ]
    )


def _checkpoint_config() -> list[str]:
    rows = []
    for name, option in options_of(CheckpointOptions).items():
        rows.append(
            (
                f"`{name}`",
                "<br>".join(f"`{method}`" for method in _methods_of(name)),
                option.unset or _code(option.default),
                LINKS.get(name) or _range(option.rule.allowed),
                option.description,
            )
        )
    return [
        "## CheckpointConfig",
        "",
        *_table(("keyword", "PyFlink's methods", "default", "range", "meaning"), rows),
        "As in Flink, `unaligned` with `max_concurrent` above 1 is refused, and `AT_LEAST_ONCE` turns it off. "
        "[Retention](recovery.md#retention-what-is-kept-at-the-end) has a table of `cleanup`.",
        "",
    ]


def _methods_of(keyword: str) -> list[str]:
    wanted = METHODS.get(keyword, keyword)
    return [method for method in _public(options.CheckpointConfig) if re.search(wanted, method)]


def _storages(seen: set[tuple[str, ...]]) -> list[str]:
    lines = [
        "## Checkpoint storage",
        "",
        "Values that pickle and that threads share. What the code leaves unset is taken from the deployment (the "
        "`checkpoint_storage` resource), then from the default.",
        "",
    ]
    return [*lines, *_described(STORAGES, seen)]


def _backends(seen: set[tuple[str, ...]]) -> list[str]:
    lines = [
        "## State backends",
        "",
        "A backend becomes settings of the Spark session before the query starts. A query [keeps the provider]"
        "(guides/change-parallelism-or-backend.md) that it was begun with. A backend that names a place for snapshots "
        "(Memory, Fs, RocksDB) comes before the stream's own storage, as in Flink.",
        "",
        "`set_db_storage_paths` is `spark.local.dir`, which Spark reads when the application starts: give it to the "
        "Spark resource as well. A start in an application that has other directories is refused and says so; where "
        "the cluster manager sets the directories (`SPARK_LOCAL_DIRS`, YARN), those are used. The number of upload "
        "threads is taken by an executor from the first stateful query that it runs.",
        "",
        "`set_options` names a Python class by import path, a `RocksDBOptionsFactory` that returns Spark settings; "
        "they override the predefined options, and `settings` override both.",
        "",
    ]
    return [*lines, *_described(BACKENDS, seen)]


def _described(values: Iterable[Any], seen: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield a section for each object; an option that an earlier one has too is only named."""
    for value in values:
        kind = type(value)
        rows = [_row(line, _arguments(RocksDBOptions) | _arguments(kind)) for line in value.describe()]
        yield from (f"### {kind.__name__}", "", _summary(kind), "")
        if new := [row for row in rows if row not in seen]:
            yield from _table(("option", "default", "meaning"), new)
        if same := [row[0] for row in rows if row in seen]:
            yield from (f"As above: {', '.join(same)}.", "")
        seen.update(rows)


def _row(line: OptionDescription, arguments: dict[str, str]) -> tuple[str, ...]:
    meaning = arguments.get(ROCKSDB_FIELDS.get(line.option, line.option), "")
    if line.option == "predefined_options":
        meaning = f"{meaning} [Below](#predefined-options-of-rocksdb) is what each sets."
    elif not meaning or line.effect is not Effect.REAL:
        meaning = f"{meaning} {_effect(line.effect, line.explanation)}".strip()
    return f"`{line.option}`", _default(line), meaning


def _effect(effect: Effect, explanation: str) -> str:
    marks = {Effect.REAL: "", Effect.MAPPED: "**Mapped**: ", Effect.NONE: "**No effect**: "}
    return marks[effect] + explanation


def _range(allowed: str) -> str:
    """Shorten a range to the names of an enum, or to its lower limit where the upper one is that of the type."""
    shorter = allowed.replace("a whole number of milliseconds or a timedelta", "milliseconds")
    shorter = re.sub(r"\b[A-Z]\w+\.(\w+)", r"`\1`", shorter).removeprefix("one of ").replace("True or False", "")
    return re.sub(r",? from (-?\d+) to \d{10,}", r", at least \1", shorter)


def _default(line: OptionDescription) -> str:
    if line.value in EXAMPLES or line.option == "checkpoint_backend":
        return "required"
    return "" if line.value in (None, [], {}) else _code(line.value)


def _predefined() -> list[str]:
    sets: dict[RocksDBOption, list[str]] = {}
    for choice, calls in OPTIONS_SET.items():
        for call in calls:
            sets.setdefault(call, []).append(f"`{choice.name}`")
    rows = []
    for call, names in sets.items():
        under_spark = f"`{call.setting}` = {call.value}" if call.setting else call.reason
        where = "all" if len(names) == len(OPTIONS_SET) else ", ".join(names)
        rows.append((f"`{call.call}`", where, _effect(call.effect, under_spark)))
    return [
        "## Predefined options of RocksDB",
        "",
        "What Flink sets on RocksDB, and what becomes of it under Spark.",
        "",
        *_table(("option of RocksDB", "set by", "under Spark"), rows),
    ]


def _restart() -> list[str]:
    rows = []
    for name, strategy in STRATEGIES.items():
        signature = inspect.signature(getattr(options.RestartStrategies, name))
        rows.append((f"`{name}{_plain(signature)}`", _summary(type(strategy))))
    return [
        "## Restart strategies",
        "",
        "`RestartStrategies` makes them, under PyFlink's names; the defaults and limits are Flink's. One strategy "
        "decides for a restart within the run and for one in a new run, from one durable history. A fallback, or none "
        "at all, is Flink's default: no restart while checkpointing is off, exponential delay while it is on.",
        "",
        *_table(("strategy", "what it does"), rows),
    ]


def _execution() -> list[str]:
    told = [config.describe() for config in EXECUTIONS]
    rows = []
    for line in told[0]:
        default = "the backend's" if line.value is None else "none" if line.value == [] else _code(line.value)
        rule = EXECUTION_RANGES.get(line.option)
        allowed = _range(rule.allowed) if rule else "full names of classes" if line.option == "kryo" else ""
        effects = _effects(other for lines in told for other in lines if other.option == line.option)
        rows.append((f"`{line.option}`", default, allowed, effects))
    return [
        "## StreamExecutionEnvironment",
        "",
        "For programs without Dagster, see [environment](environment.md). A parallelism of -1: the session decides.",
        "",
        *_table(("option", "default", "range", "meaning"), rows),
    ]


def _kafka() -> list[str]:
    rows = []
    for semantic in options.Semantic:
        delivery = options.kafka_delivery(semantic)
        given = "<br>".join(f"`{name}` = {value}" for name, value in delivery.writer_options.items())
        rows.append((f"`{semantic.name}`", given, _arguments(options.Semantic)[semantic.name]))
    return [
        "## Kafka delivery",
        "",
        '`kafka_delivery(semantic).writer_options`, of a `Semantic`, are options for `writeStream.format("kafka")`; '
        "`EXACTLY_ONCE` has [conditions](sinks.md#kafka-exactly-once).",
        "",
        *_table(("semantic", "options", "meaning"), rows),
    ]


def _dagster() -> list[str]:
    lines = [
        "## As Dagster config",
        "",
        "`streaming_asset(checkpointing=..., restart_strategy=...)` takes `CheckpointSettings` and `RestartSettings` "
        "in place of the objects, read from YAML with `model_validate`. One run is given other options in the "
        "launchpad, below `checkpointing` of its config, one at a time. All spellings are checked by the same code. "
        "The fields of `CheckpointSettings` are the [keywords of `CheckpointConfig`](#checkpointconfig): durations in "
        "milliseconds, enums by name, policies as data.",
        "",
    ]
    for model in (RestartSettings, CheckpointStorageResource, StateBackendResource):
        rows = []
        for name, field in model.model_fields.items():
            value = field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else "" if value in (None, {}, []) else _code(value)
            rows.append((f"`{name}`", default, field.description or ""))
        lines += [f"### {model.__name__}", "", *_table(("field", "default", "meaning"), rows)]
    return lines


def _enums() -> list[str]:
    lines = ["## Enums", ""]
    tables: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for enum in ENUMS:
        meanings = _arguments(enum)
        rows = tuple((f"`{member.name}`", meanings.get(member.name, "")) for member in enum)
        tables.setdefault(rows, []).append(enum.__name__)
    for rows, names in tables.items():
        lines += [f"### {', '.join(names)}", "", *_table(("member", "meaning"), rows)]
    return lines


def _methods() -> list[str]:
    lines = [
        "## Every method",
        "",
        "Beside the methods of the table above; what several classes have is listed once. What each does, and "
        "its arguments: [PyFlink's classes](api/flink.md).",
        "",
    ]
    kinds = [
        options.CheckpointConfig,
        *(type(storage) for storage in STORAGES),
        *(type(backend) for backend in BACKENDS),
        StreamExecutionEnvironment,
        options.ExecutionConfig,
    ]
    kinds += [options.RestartStrategies, *(type(strategy) for strategy in STRATEGIES.values()), options.Duration]
    seen: set[str] = set()
    for kind in kinds:
        if new := [member for member in _members(kind) if member not in seen]:
            lines.append(f"- **{kind.__name__}**: {', '.join(new)}")
            seen.update(new)
    return [*lines, ""]


def _members(kind: type) -> Iterator[str]:
    of_options = {method for keyword in options_of(CheckpointOptions) for method in _methods_of(keyword)}
    for name in _public(kind):
        member = inspect.getattr_static(kind, name)
        value = getattr(kind, name)
        if callable(value) and not isinstance(value, type):
            if kind is not options.CheckpointConfig or name not in of_options:
                yield f"`{name}`"
        elif not isinstance(member, property) and not isinstance(value, type):
            yield f"`{name}` = `{value!r}`"


def _public(kind: type) -> list[str]:
    """Names that the class or one of our base classes defines, deprecated ones included, in order."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.startswith("dagster_ckpt")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    fields = {name for base in ours for name in getattr(base, "__dataclass_fields__", ())}
    constants = {name for name in names if name.isupper()}
    return sorted((names - fields) | constants)


def _plain(signature: inspect.Signature) -> str:
    """Return a signature without `self` and without types."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(parameters))


def _summary(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _arguments(kind: type) -> dict[str, str]:
    """Read the Args or Attributes section of a docstring."""
    found: dict[str, str] = {}
    section = re.search(r"(?:Args|Attributes):\n((?:    .*\n?|\n)+)", inspect.getdoc(kind) or "")
    name = ""
    for line in section[1].splitlines() if section else ():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def _effects(lines: Iterable[OptionDescription]) -> str:
    said = dict.fromkeys(_effect(line.effect, line.explanation) for line in lines)
    return "<br>".join(said)


def _code(value: object) -> str:
    return f"`{value.name}`" if isinstance(value, Enum) else f"`{value!r}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[_cell(text) for text in row] for row in rows]
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in cells),
        "",
    ]


def _cell(text: str) -> str:
    """Escape what is not code, so that it is not read as HTML."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"<(?!br>)", "&lt;", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
