"""Sensors: one observes and reports snapshots, one supervises streams."""
