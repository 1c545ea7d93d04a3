"""What is done to the streams: every way a run ends, several streams beside each other, each from life to life."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster_page import dagster_page
from stage import LIMIT_S, Ending, Stage, kill

from dagster_ckpt.catalog.records import EventType, ExecutionRecord
from dagster_ckpt.orchestration.metadata import SEQUENCE_KEY
from dagster_ckpt.orchestration.run_status import STREAM_ID_TAG
from tests.support.freezing import freeze, thaw
from tests.support.thorough import either


@dataclass
class Deaths:
    """The endings by what was done; asking for one that did not come about tells why not."""

    stage: Stage
    endings: dict[str, Ending] = field(default_factory=dict)
    living: dict[str, ExecutionRecord] = field(default_factory=dict)
    restarted: dict[str, tuple[ExecutionRecord, ExecutionRecord]] = field(default_factory=dict)
    operated: dict[str, dg.DagsterRunStatus] = field(default_factory=dict)
    troubles: list[BaseException] = field(default_factory=list)
    spare: int | None = None

    def __getitem__(self, death: str) -> Ending:
        if death not in self.endings:
            raise AssertionError(f"it did not come to {death!r}") from (self.troubles[0] if self.troubles else None)
        return self.endings[death]

    def play(self) -> None:
        """Everything, with `dagster dev` started three times; in `make test`, what a person does on the page."""
        self.stage.start_dagster()
        either(quick=self._play_on_the_page, thorough=self._play_everything)()

    def _play_on_the_page(self) -> None:
        self._try(self._clicked)

    def _play_everything(self) -> None:
        with ThreadPoolExecutor(4) as beside:
            chains = (self._killed, self._own, self._nothing, self._retried)
            for future in [beside.submit(chain) for chain in chains]:
                self._try(future.result)
        if not self.troubles:
            self._try(self._dagster_dies)

    def _clicked(self) -> None:
        """A stream is started by its button, killed, saved and stopped from the launchpad."""
        pictures = self.stage.workspace.root / "pictures"
        with dagster_page(f"http://localhost:{self.stage.dev.port}", pictures) as page:

            def launch(job: str, config: dict[str, Any]) -> str:
                run_id = page.launch(job, config)
                page.rest()
                return run_id

            run_id = page.materialize("often_killed_stream")
            page.rest()
            stream = self.stage.running("often_killed", run_id)
            kill(self.stage.worker_pid(stream))
            stream = self._comes_back("SIGKILL of the process", stream)
            self._stopped_with_a_savepoint(stream, launch)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the tests of what follows tell it
            self.troubles.append(error)

    def _launched(self, stream: str, job: str = "stream", **tags: str) -> ExecutionRecord:
        return self.stage.running(stream, self.stage.launch(f"{stream}_{job}", **tags))

    def _comes_back(self, death: str, before: ExecutionRecord) -> ExecutionRecord:
        self.endings[death] = ending = self.stage.ending(before, comes_back=True)
        assert ending.successor is not None
        return ending.successor

    def _goes_on(self, death: str, before: ExecutionRecord) -> ExecutionRecord:
        successor = self.stage.running(before.stream_id, after=before)
        self.restarted[death] = before, successor
        return successor

    def _killed(self) -> None:
        stream = self._launched("often_killed")
        kill(self.stage.worker_pid(stream), signal.SIGTERM)
        stream = self._comes_back("SIGTERM", stream)
        kill(self.stage.worker_pid(stream))
        stream = self._comes_back("SIGKILL of the process", stream)
        self.spare = self.stage.spare(stream)
        kill(stream.pid)
        stream = self._goes_on("SIGKILL of the driver", stream)
        kill(self.stage.lease("often_killed").jvm_pid)
        stream = self._goes_on("SIGKILL of the JVM", stream)
        self.living["often_killed"] = stream

    def _own(self) -> None:
        stream = self._launched("in_own_process", "multiprocess")
        kill(stream.pid)
        stream = self._comes_back("SIGKILL of the step", stream)
        self.stage.force_terminate(stream.run_id)
        # At once, while the one before may still write.
        successor = self._launched("in_own_process", "multiprocess")
        self.endings["forced"] = self.stage.ending(stream, settled=True)
        orphan = self.stage.lease("in_own_process")
        kill(self.stage.worker_pid(successor))
        self.stage.await_death(orphan.pid, orphan.jvm_pid)
        self.living["in_own_process"] = self._comes_back("SIGKILL of the run worker", successor)

    def _nothing(self) -> None:
        stream = self._launched("leaves_nothing", "multiprocess")
        self.stage.dev.terminate(stream.run_id)
        self.endings["terminated in a step's process"] = self.stage.ending(stream, settled=True)
        stream = self._launched("leaves_nothing", dagster__max_runtime="3600")
        # The limit is lowered once it runs: how long a start takes is not known beforehand.
        self.stage.instance.add_run_tags(stream.run_id, {"dagster/max_runtime": "1"})
        stream = self._comes_back("max runtime", stream)
        self.stage.dev.terminate(stream.run_id)
        self.endings["terminated"] = self.stage.ending(stream, settled=True)
        self.living["leaves_nothing"] = self._launched("leaves_nothing", "multiprocess")

    def _retried(self) -> None:
        stream = self._launched("retried", dagster__max_retries="1")
        lease = self.stage.lease("retried")
        freeze(lease.pid)
        # As monitoring does with a process that does not answer.
        self.stage.instance.report_run_failed(self.stage.run(stream), message="it does not answer")
        successor = self._comes_back("retried while it hangs", stream)
        # Dagster's retry and the restart need not meet: this run comes while the successor runs, in any case.
        self.stage.launch("retried_stream")
        thaw(lease.pid)
        self.stage.await_death(lease.pid, lease.jvm_pid)
        self.stage.wait_for(
            lambda: all(r.is_finished or r.run_id == successor.run_id for r in self.runs("retried")),
            "the runs that were refused to end",
        )
        self.stage.await_beats(successor)
        self.living["retried"] = self.stage.catalog.executions.get(successor.execution_id)
        self.stage.dev.terminate(successor.run_id)
        self.stage.ending(successor, settled=True)

    def runs(self, stream: str) -> list[dg.DagsterRun]:
        """The runs of a stream, newest first."""
        return list(self.stage.instance.get_runs(dg.RunsFilter(tags={STREAM_ID_TAG: stream})))

    def _dagster_dies(self) -> None:
        stage = self.stage
        killed, own, nothing = (self.living[name] for name in ("often_killed", "in_own_process", "leaves_nothing"))
        stage.dev.client.reload_repository_location("dying_streams.py")
        stage.await_beats(killed)
        self.living["reloaded"] = stage.running("often_killed")

        stage.press_ctrl_c()
        stage.await_death(stage.worker_pid(killed), stage.worker_pid(own), stage.worker_pid(nothing), nothing.pid)
        for death, stream in (("Ctrl-C", killed), ("Ctrl-C in a step's process", nothing)):
            self.endings[death] = stage.ending(stream)
        stage.start_dagster()
        killed, own, nothing = (stage.running(e.stream_id, after=e) for e in (killed, own, nothing))
        self.living["after Ctrl-C"] = killed
        self.living["after Ctrl-C in a step's process"] = nothing

        for process in (*stage.processes("api grpc"), *stage.processes("code-server start")):
            process.kill()
        stage.await_beats(own)
        stage.terminate_somehow(own.run_id)
        self.endings["terminated without a code server"] = stage.ending(own)

        [daemon] = stage.processes("dagster._daemon run")
        daemon.kill()
        stage.dev.process.wait()
        stage.await_beats(killed)
        self.living["without a daemon"] = stage.catalog.executions.get(killed.execution_id)

        stage.power_off()
        stage.boot_again()
        self.living["switched off"] = stage.catalog.executions.get(killed.execution_id)
        stage.start_dagster()
        self._stopped_with_a_savepoint(self._comes_back("reboot", killed), stage.launch)

    def _stopped_with_a_savepoint(self, stream: ExecutionRecord, launch: Callable[[str, dict[str, Any]], str]) -> None:
        stage = self.stage
        for op in ("trigger_savepoint", "stop_with_savepoint"):
            config = {"ops": {op: {"config": {"stream_id": stream.stream_id, "label": op}}}}
            run_id = launch(f"{op}_job", config)
            self.operated[op] = stage.dev.await_end(run_id, timeout_s=LIMIT_S)
            assert self.operated[op] is dg.DagsterRunStatus.SUCCESS, stage.log(run_id)
        self.endings["stopped with a savepoint"] = stage.ending(stream, settled=True)
        savepoints = {e.sequence for e in stage.catalog.events.after(0) if e.type is EventType.SAVEPOINT_COMPLETED}
        stage.wait_for(lambda: savepoints <= set(self.reported()), "the savepoints to be reported on the asset")

    def reported(self) -> list[int]:
        """The catalog's events that the asset of the stream which is killed most shows, each as often as it does."""
        found = self.stage.instance.fetch_materializations(dg.AssetKey("often_killed"), limit=1_000)
        shown = [record.asset_materialization for record in found.records]
        return [int(str(event.metadata[SEQUENCE_KEY].value)) for event in shown if event is not None]
