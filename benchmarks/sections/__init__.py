"""The sections of the bench, in the order of the page."""

from benchmarks.bench import Section
from benchmarks.sections.local import LOCAL

SECTIONS: tuple[Section, ...] = (LOCAL,)

__all__ = ["SECTIONS"]
