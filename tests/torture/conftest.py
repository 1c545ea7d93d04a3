import tests.torture.paths  # noqa: F401 - the scenarios import their neighbours by name
