"""Whether a query that has state can go on with another state backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_ckpt.options.state_backend import PROVIDER_CLASS, StateBackend


@dataclass(frozen=True)
class PinnedState:
    """What a query's state was begun with, as Spark wrote it into the offset log or an image says it.

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
