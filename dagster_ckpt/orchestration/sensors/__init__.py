"""Sensors: the catalog sensor reports snapshots, the supervisor sensor restarts and reconciles streams."""
