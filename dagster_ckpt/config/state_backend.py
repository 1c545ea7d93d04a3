"""State backends: how Spark keeps a query's working state, and which backends can continue existing state."""

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
    """Validate Spark settings and return a copy.

    Args:
        source: Where they come from, in messages.
        settings: The settings.
        own: Names of settings that the state backend sets itself.

    Raises:
        OptionTypeError: A name or a value has the wrong type.
        OptionError: A name is not a Spark setting, or is one that the backend sets.
    """
    # Spark reads the RocksDB names case-insensitively, so a second spelling would silently win or
    # lose.
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
    """Format values as Spark reads them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


PROVIDER_CLASS = "spark.sql.streaming.stateStore.providerClass"
# Flink's `state.backend.rocksdb.checkpoint.transfer.thread.num`.
DEFAULT_TRANSFER_THREADS = 4


class StateBackend(ABC):
    """How working state is kept. Backends are configuration only: they can be pickled and shared."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        """Refuse to instantiate the abstract class, with a message that helps a PyFlink user."""
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
        """Number of threads of this package that copy files while a snapshot is taken or restored."""
        return DEFAULT_TRANSFER_THREADS

    def checkpoint_storage(self) -> CheckpointStorage | None:
        """Return where this backend stores snapshots, or None if it does not decide that, like the newer ones."""
        return None


@dataclass(frozen=True)
class CustomStateBackend(StateBackend):
    """Any state store provider on Spark's class path.

    Attributes:
        provider_class: Full name of the Java class; it must extend Spark's `StateStoreProvider`.
        settings: Additional Spark settings, by full name.

    Raises:
        OptionError: The class name is empty, or a setting is not Spark's.
        OptionTypeError: A value has the wrong type.
    """

    # The default is rejected with our message instead of Python's.
    provider_class: str = ""
    settings: Mapping[str, SettingValue] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        """Validate the class name and the settings."""
        allowed = "the full name of a Java class such as com.example.MyStateStoreProvider"
        if not self.provider_class or not isinstance(self.provider_class, str):
            raise OptionTypeError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        if not all(part.isidentifier() for part in self.provider_class.replace("$", "_").split(".")):
            raise OptionError(f"provider_class is {self.provider_class!r}, but must be {allowed}.")
        object.__setattr__(self, "settings", checked_settings("settings", self.settings, own=[PROVIDER_CLASS]))

    def spark_settings(self) -> dict[str, str]:
        """Return the provider and the additional settings."""
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
    """Return where a stream's snapshots are stored.

    A backend that names a directory (Memory, Fs, RocksDB) takes precedence, as in Flink's
    `CheckpointStorageLoader`, then the stream's storage, then the deployment's.

    Args:
        configured: The storage of the stream's `CheckpointConfig`, if any.
        backend: The stream's state backend; None if the session decides.
        deployment: The deployment's storage.
    """
    return (backend and backend.checkpoint_storage()) or configured or deployment


@dataclass(frozen=True)
class PinnedState:
    """Backend and settings that existing state was written with, from Spark's offset log or a snapshot.

    Attributes:
        provider: Full name of the state store provider; None if the query keeps no state.
        settings: Settings that Spark pins for the life of the query, by full name, as far as they
            are known.
    """

    provider: str | None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendChange:
    """Whether a query can continue with another backend.

    Attributes:
        refused: Why the query cannot continue with it, and what to do; None if it can.
        kept: Settings that Spark keeps at their old value, each as a sentence.
    """

    refused: str | None = None
    kept: tuple[str, ...] = ()


def backend_change(pinned: PinnedState, wanted: StateBackend) -> BackendChange:
    """Decide whether a query can continue with a backend.

    Each provider has its own file format, and no Spark provider reads the files of another. Spark
    itself would not fail: it uses the pinned provider and ignores the wanted one, with a line in
    the driver's log (`OffsetSeqMetadata.setSessionConf`). It does the same with every other setting
    that it pins.

    Args:
        pinned: What the existing state was written with.
        wanted: The backend to start the query with.
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
