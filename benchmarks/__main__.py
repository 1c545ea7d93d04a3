"""`python -m benchmarks [SECTION ...]`: measure, print, and write docs/evidence/performance.md."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.bench import Bench
from benchmarks.page import render, target_table
from benchmarks.results import SectionResult, Table
from benchmarks.sections import SECTIONS
from dagster_ckpt.errors import UnsupportedSparkError

PAGE = Path("docs/evidence/performance.md")
# In the repository, so that a section alone can be measured again on another machine.
MEASURED = Path(__file__).with_name("measured")
SLOW_AFTER_DELETING_S = 300


@click.command()
@click.argument("only", nargs=-1, type=click.Choice([section.name for section in SECTIONS]))
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".bench"), show_default=True)
@click.option("--repeat", default=5, show_default=True, help="Repetitions of each measurement.")
@click.option(
    "--share",
    default=1.0,
    show_default=True,
    help="Share of the full size of section `latency`, and of the kills of `recovery`.",
)
def main(only: tuple[str, ...], folder: Path, repeat: int, share: float) -> None:
    """Measure some sections, or all of them."""
    folder = folder.absolute()
    scratch, deleted = folder / "scratch", folder / "deleted"
    console = Console()
    failed: list[str] = []
    places: list[Path] = []
    _wait_for_the_file_system(deleted, console)
    try:
        for section in SECTIONS:
            if only and section.name not in only:
                continue
            console.rule(section.title)
            place = scratch / f"{section.name}-{time.time_ns()}"
            place.mkdir(parents=True)
            places.append(place)
            try:
                result = section.run(Bench(folder, place, repeat, share))
            except UnsupportedSparkError as error:
                console.print(f"Left out: {error}")
                continue
            except Exception:  # noqa: BLE001 - the others may still work, and the page shows what they found
                console.print_exception()
                failed.append(section.name)
                continue
            result.keep(MEASURED)
            for table in (*result.tables, target_table(result.targets)):
                _print(table, console)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        deleted.touch()
    kept = {path.stem: SectionResult.model_validate_json(path.read_text()) for path in MEASURED.glob("*.json")}
    shown = [kept[section.name] for section in SECTIONS if section.name in kept]
    missing = [section.name for section in SECTIONS if section.name not in kept]
    PAGE.write_text(render(shown, missing))
    console.print(f"Wrote {PAGE}.")
    if failed:
        raise click.ClickException(
            f"These sections failed, and the page shows what they found last: {', '.join(failed)}"
        )


def _wait_for_the_file_system(deleted: Path, console: Console) -> None:
    """Files are made several times slower for minutes after many were deleted, on ext4 without a journal."""
    left = SLOW_AFTER_DELETING_S - (time.time() - deleted.stat().st_mtime) if deleted.exists() else 0
    if left > 0:
        console.print(f"The last run deleted its files a moment ago, which slows down new ones: waiting {left:.0f} s.")
        time.sleep(left)


def _print(table: Table, console: Console) -> None:
    shown = Shown(title=table.title, caption=table.note or None)
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    main()
