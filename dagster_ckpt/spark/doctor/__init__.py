"""What is wrong with a live directory, in plain words; nothing here changes one.

One module a kind of examination, each a function from a `Subject` to findings. Start with `diagnosis.py`, which calls
them all, and `finding.py`, which names everything they can find.
"""

from dagster_ckpt.spark.doctor.against_snapshot import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.spark.doctor.finding import ADVICE, Code, Finding, Severity
from dagster_ckpt.spark.doctor.good_back_to import good_back_to

__all__ = ["ADVICE", "Code", "Diagnosis", "Finding", "KnownSnapshot", "Severity", "diagnose", "good_back_to"]
