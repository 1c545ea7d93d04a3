"""The sections of the bench, in the order of the page."""

from benchmarks.bench import Section
from benchmarks.sections.flink import FLINK_SECTION
from benchmarks.sections.hand_over import HAND_OVER
from benchmarks.sections.kafka import KAFKA
from benchmarks.sections.latency import LATENCY
from benchmarks.sections.local import LOCAL
from benchmarks.sections.memory import MEMORY
from benchmarks.sections.recovery import RECOVERY
from benchmarks.sections.replay import REPLAY
from benchmarks.sections.rewrites import REWRITES
from benchmarks.sections.running import RUNNING
from benchmarks.sections.s3 import S3
from benchmarks.sections.scale import SCALE
from benchmarks.sections.sensors import SENSORS
from benchmarks.sections.settings import SETTINGS
from benchmarks.sections.slopes import SLOPES

SECTIONS: tuple[Section, ...] = (
    LOCAL,
    S3,
    LATENCY,
    FLINK_SECTION,
    RECOVERY,
    HAND_OVER,
    RUNNING,
    MEMORY,
    SLOPES,
    SETTINGS,
    SENSORS,
    SCALE,
    KAFKA,
    REPLAY,
    REWRITES,
)

__all__ = ["SECTIONS"]
