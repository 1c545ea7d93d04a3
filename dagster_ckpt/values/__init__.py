"""Checked values: durations, paths, modes, redacted text, and bytes from elsewhere. Nothing here knows a stream."""
