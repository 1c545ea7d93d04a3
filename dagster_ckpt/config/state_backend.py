"""How Spark keeps the state of a query while it runs, and whether existing state can continue on another backend."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.config.option_description import Effect, OptionDescription
from dagster_ckpt.config.redaction import shown_settings
from dagster_ckpt.errors import OptionError, OptionTypeError

SettingValue = str | int | float | bool


def checked_settings(
    source: str, settings: Mapping[str, SettingValue], *, own: Iterable[str] = ()
) -> dict[str, SettingValue]:
    """Return a copy of settings if Spark can take them.

    Args:
        source: Where they come from, in messages.
        settings: The settings.
        own: Names that the state backend sets itself.

    Raises:
        OptionTypeError: A name or a value has the wrong type.
        OptionError: A name is not Spark's, or is one of the backend's own.
    """
    # Spark reads the RocksDB names without regard to case, so a second spelling would silently win or lose.
    reserved = {name.lower() for name in own}
    if not isinstance(settings, Mapping):
        raise OptionTypeError(f"{source} is {settings!r}, but must map names to strings, numbers or booleans.")
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise OptionTypeError(
                f"{source} has {name!r}: {value!r}, but must map names to strings, numbers or booleans."
            )
        if not name.startswith("spark."):
            raise OptionError(f"{source} has {name!r}, but must hold full Spark names: they begin with 'spark.'.")
        if name.lower() in reserved:
            raise OptionError(
                f"{source} has {name!r}: {value!r}, but the state backend sets that itself; "
                f"{source} must hold other names: use the backend's own arguments instead."
            )
    return dict(settings)


def as_text(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    """Write values as Spark reads them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


PROVIDER_CLASS = "spark.sql.streaming.stateStore.providerClass"
# Flink's `state.backend.rocksdb.checkpoint.transfer.thread.num`.
DEFAULT_TRANSFER_THREADS = 4


class StateBackend(ABC):
    """How working state is kept. Backends are configuration only: they pickle, and are safe to share."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        """Refuse the abstract class itself, in words a user of PyFlink understands."""
        if cls is StateBackend:
            raise OptionTypeError(
                "StateBackend() is abstract, so it cannot be made; it must be one of HashMapStateBackend, "
                "EmbeddedRocksDBStateBackend, MemoryStateBackend, FsStateBackend, RocksDBStateBackend or "
                "CustomStateBackend."
            )
        return super().__new__(cls)

    @abstractmethod
    def spark_settings(self) -> dict[str, str]:
        """Return the Spark settings that select and tune this backend."""

    @abstractmethod
    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""

    @property
    def transfer_threads(self) -> int:
        """How many threads of ours copy files while a snapshot is taken or restored."""
        return DEFAULT_TRANSFER_THREADS

    def checkpoint_storage(self) -> CheckpointStorage | None:
        """Return where this backend says that snapshots live; None where it says nothing, as the newer ones."""
        return None


@dataclass(frozen=True)
class CustomStateBackend(StateBackend):
    """Any state store provider that is on Spark's class path.

    Attributes:
        provider_class: Full name of the Java class; it must extend Spark's `StateStoreProvider`.
        settings: More Spark settings, by full name.

    Raises:
        OptionError: The class name is empty, or a setting is not Spark's.
        OptionTypeError: A value has the wrong type.
    """

    # The default is refused with our message instead of Python's.
    provider_class: str = ""
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        """Check the class name and the settings."""
        allowed = "the full name of a Java class such as com.example.MyStateStoreProvider"
        if not self.provider_class or not isinstance(self.provider_class, str):
            raise OptionTypeError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        if not all(part.isidentifier() for part in self.provider_class.replace("$", "_").split(".")):
            raise OptionError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        object.__setattr__(self, "settings", checked_settings("settings", self.settings, own=[PROVIDER_CLASS]))

    def spark_settings(self) -> dict[str, str]:
        """Return the provider and the further settings."""
        return {PROVIDER_CLASS: self.provider_class} | as_text(self.settings)

    def describe(self) -> list[OptionDescription]:
        """Return each option with its value and its effect on Spark."""
        provider = "The running query keeps its state in a provider of this class."
        return [
            OptionDescription("provider_class", self.provider_class, Effect.REAL, provider),
            OptionDescription(
                "settings", shown_settings(self.settings), Effect.REAL, "Set on the session before the start."
            ),
        ]


def storage_of_stream(
    configured: CheckpointStorage | None, backend: StateBackend | None, deployment: CheckpointStorage
) -> CheckpointStorage:
    """Return where a stream's snapshots live.

    A backend that names a place itself (Memory, Fs, RocksDB) comes first, as in Flink's `CheckpointStorageLoader`,
    then the stream's own storage, then the deployment's.

    Args:
        configured: The storage of the stream's `CheckpointConfig`, if any.
        backend: The stream's state backend; None where it is left to the session.
        deployment: The deployment's storage.
    """
    return (backend and backend.checkpoint_storage()) or configured or deployment


@dataclass(frozen=True)
class PinnedState:
    """What a query's state was begun with, as Spark wrote it into the offset log or a snapshot says it.

    Attributes:
        provider: Full name of the state store provider; None where the query keeps no state.
        settings: Settings that Spark pins for the life of the query, by full name, as far as they are known.
    """

    provider: str | None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendChange:
    """What becomes of a wanted backend.

    Attributes:
        refused: Why the query cannot go on with it, and what to do; None where it can.
        kept: Settings that Spark keeps as they were, each as a sentence.
    """

    refused: str | None = None
    kept: tuple[str, ...] = ()


def backend_change(pinned: PinnedState, wanted: StateBackend) -> BackendChange:
    """Decide whether a query can go on with a backend.

    Each provider has files of its own, and no provider of Spark reads those of another. Spark itself would not
    fail: it takes the pinned provider and the wanted one is ignored, with a line in the driver's log
    (`OffsetSeqMetadata.setSessionConf`). So does it with every other setting that it pins.

    Args:
        pinned: What the state was begun with.
        wanted: The backend the query is to be started with.
    """
    if pinned.provider is None:
        return BackendChange()
    settings = wanted.spark_settings()
    provider = settings[PROVIDER_CLASS]
    if provider != pinned.provider:
        return BackendChange(
            f"Its state was begun with {pinned.provider}, but the state backend is {type(wanted).__name__} with "
            f"{provider}, which cannot read it. Set the backend that it was begun with, or give up the state with "
            "start_from: empty."
        )
    kept = tuple(
        f"{name} stays {pinned.settings[name]}, not {value}: Spark pins it at the query's first batch"
        for name, value in settings.items()
        if pinned.settings.get(name, value) != value
    )
    return BackendChange(kept=kept)
