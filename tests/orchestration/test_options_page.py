"""docs/options.md is what the code says, and leaves nothing out."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
API = yaml.safe_load((ROOT / "tests/flink/flink_api.yaml").read_text())


@pytest.fixture(scope="module")
def written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "docs/options_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(written: ModuleType) -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert page == written.page(), "run: python docs/options_page.py"


@pytest.mark.parametrize("name", list(API))
def test_every_documented_class_of_flink_is_on_the_page_with_all_it_has(written: ModuleType, name: str) -> None:
    page = written.page()
    assert name in page
    for member in [*API[name].get("methods", {}), *API[name].get("constants", ())]:
        assert f"`{member}(" in page or f"`{member}`" in page, f"{name}.{member} is not on the page"


def test_every_method_of_the_checkpoint_config_belongs_to_an_option(written: ModuleType) -> None:
    rows = "\n".join(written._checkpoint_config())
    methods = [name for name in written._public(written.options.CheckpointConfig) if not name.isupper()]
    assert [name for name in methods if f"`{name}`" not in rows] == ["describe", "options", "requested", "validate"]


def test_the_page_holds_no_address_of_an_object_and_no_path_of_a_machine(written: ModuleType) -> None:
    page = written.page()
    assert " at 0x" not in page
    assert str(ROOT) not in page
