"""A user's own RocksDB options, made by a class that is named by its import path."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.options.spark_setting_values import SettingValue

_ALLOWED = "the import path of a RocksDBOptionsFactory, for example 'package.module.Name'"
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[.:]([A-Za-z_]\w*)")


class RocksDBOptionsFactory(ABC):
    """Makes Spark settings of the RocksDB state store; Flink's interface of this name makes RocksDB's own.

    A factory has a constructor without arguments. It is imported and called in the process that starts the query.

    Example:
        >>> class SmallCaches(RocksDBOptionsFactory):
        ...     def create_settings(self, current):
        ...         return {"spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": 4}
    """

    @abstractmethod
    def create_settings(self, current: Mapping[str, str]) -> Mapping[str, SettingValue]:
        """Return settings that are applied on top of the current ones.

        Args:
            current: The settings of the predefined options, by full name.
        """


def options_factory(name: object) -> type[RocksDBOptionsFactory]:
    """Import a factory.

    Args:
        name: "package.module.Name" or "package.module:Name".

    Raises:
        OptionTypeError: The name is not a string.
        OptionError: It names nothing that can be imported, or something that is no factory.
    """
    if not isinstance(name, str):
        kind = OptionError if name is None else OptionTypeError
        raise kind(f"options factory is {name!r} ({type(name).__name__}), but must be {_ALLOWED}.")
    parts = _IMPORT_PATH.fullmatch(name)
    if parts is None:
        raise OptionError(f"options factory is {name!r}, but must be {_ALLOWED}.")
    try:
        found = getattr(import_module(parts[1]), parts[2])
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"options factory is {name!r}, which fails to import ({error}); it must be {_ALLOWED}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, RocksDBOptionsFactory)):
        raise OptionError(f"options factory is {name!r}, which is {found!r}; it must be {_ALLOWED}.")
    return found
