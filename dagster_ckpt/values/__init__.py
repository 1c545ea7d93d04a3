"""Checked values: durations, paths, modes, options, redacted and untrusted text."""
