"""Asset checks on the health of streams."""
