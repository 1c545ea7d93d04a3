"""What `dagster dev` loads: the flights of 2013 as checkpointed streams."""

from examples.flights.assets import flight_definitions
from examples.flights.workspace import Workspace

defs = flight_definitions(Workspace.from_environment())
