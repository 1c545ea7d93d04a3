"""Ops, jobs and schedules for operating streams."""
