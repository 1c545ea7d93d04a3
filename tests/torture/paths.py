"""The folders of scenarios that import their neighbors by name."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for _folder in ("spark", "lifecycle", ""):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.insert(0, str(_TESTS / _folder))
