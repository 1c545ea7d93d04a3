"""Spark settings as a user gives them: full names, and values that can be written as text."""

from collections.abc import Iterable, Mapping

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
