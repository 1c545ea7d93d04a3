"""Checked values that know nothing of streams."""
