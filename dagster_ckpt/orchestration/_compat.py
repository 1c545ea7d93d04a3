"""The few names of Dagster that are not public, in one place and under one test.

Interrupts: Dagster raises `DagsterExecutionInterruptedError` in the main thread. If that lands inside
a py4j call, the reply stays on the socket and the next call hangs or reads the wrong answer. A
streaming step therefore captures interrupts and looks at a flag between short waits.
"""

from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._utils.interrupts import capture_interrupts, check_captured_interrupt

__all__ = ["UnresolvedAssetJobDefinition", "capture_interrupts", "check_captured_interrupt"]
