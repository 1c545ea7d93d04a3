"""Registrations with Spark's Kryo serializer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dagster_ckpt.errors import OptionError, OptionTypeError

SERIALIZER = "spark.serializer"
KRYO_SERIALIZER = "org.apache.spark.serializer.KryoSerializer"
KRYO_TYPES = "spark.kryo.classesToRegister"
KRYO_REGISTRATORS = "spark.kryo.registrator"

_CLASS_NAME = re.compile(r"[A-Za-z_]\w*([.$][A-Za-z_]\w*)*")


@dataclass(frozen=True)
class KryoRegistrations:
    """What Spark's Kryo serializer is told when the application starts.

    Spark takes a serializer for a type only from a class of the user that implements its `KryoRegistrator`, never as
    a pair of names. So where Flink is given a serializer, such a class is to be named here.

    Attributes:
        types: Full names of Java classes to register.
        registrators: Full names of classes that implement `org.apache.spark.serializer.KryoRegistrator`.
    """

    types: tuple[str, ...] = ()
    registrators: tuple[str, ...] = ()

    def with_type(self, type_class_name: object) -> "KryoRegistrations":
        """Return these with one type more.

        Raises:
            OptionError: It cannot be the name of a Java class.
            OptionTypeError: It is no string.
        """
        name = _class_name("type class name", type_class_name)
        return replace(self, types=tuple(dict.fromkeys([*self.types, name])))

    def with_registrator(self, type_class_name: object, serializer_class_name: object) -> "KryoRegistrations":
        """Return these with one type and one registrator more.

        Raises:
            OptionError: One cannot be the name of a Java class.
            OptionTypeError: One is no string.
        """
        both = self.with_type(type_class_name)
        name = _class_name("serializer class name", serializer_class_name)
        return replace(both, registrators=tuple(dict.fromkeys([*self.registrators, name])))

    def spark_settings(self) -> dict[str, str]:
        """Return the settings of an application with these registrations; none where there are none."""
        if not self.types:
            return {}
        settings = {SERIALIZER: KRYO_SERIALIZER, KRYO_TYPES: ",".join(self.types)}
        return settings | ({KRYO_REGISTRATORS: ",".join(self.registrators)} if self.registrators else {})

    def missing_in(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that a running application does not have.

        Args:
            application: Its settings, by full name.
        """
        return {
            name: value
            for name, value in self.spark_settings().items()
            if not set(value.split(",")) <= set(application.get(name, "").split(","))
        }


def _class_name(option: str, value: object) -> str:
    allowed = "the full name of a Java class, such as com.example.Event"
    if not isinstance(value, str):
        raise OptionTypeError(f"{option} is {value!r} ({type(value).__name__}), but must be {allowed}.")
    if not _CLASS_NAME.fullmatch(value):
        raise OptionError(f"{option} is {value!r}, but must be {allowed}.")
    return value
