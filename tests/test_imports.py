"""What the import contracts of pyproject.toml do not say: no circle of imports between files, not even a late one."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("dagster_ckpt", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    assert len(imports) > 200
    # Raises CycleError with the circle.
    TopologicalSorter(imports).prepare()
