"""Ops, jobs and schedules with which people operate streams."""
