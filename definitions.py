"""What `dagster dev` loads: the flights of 2013 as checkpointed streams."""

from dagster_ckpt.demo.assets import flight_definitions
from dagster_ckpt.demo.workspace import Workspace

defs = flight_definitions(Workspace.from_environment())
