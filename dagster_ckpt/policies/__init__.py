"""Rules as pure functions, without I/O or clock: when to restart, what to retain, how to upgrade."""
