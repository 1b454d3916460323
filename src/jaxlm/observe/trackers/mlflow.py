"""MLflow: metrics, parameters and texts on a tracking server, or in a local database."""

import json
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command
from jaxlm.core.redaction import redacted
from jaxlm.core.values.logged import Completion, Sample
from jaxlm.observe import environment
from jaxlm.observe.trackers.base import ForwardTracker, MissingLibraryError, RunInfo, Tracker, TrackerConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import flattened

_LOCAL = "sqlite:///mlflow.db"
_RUN_ID, _NEXT_STEP = "jaxlm.run_id", "jaxlm.next_step"  # tags of an MLflow run
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # of a request
_MAX_NAME, _MAX_CHARACTERS = 250, 6000  # of a name, and of a value
_SEND_S = 5.0
_FORBIDDEN = re.compile(r"[^\w\-. /:]")  # in names of metrics and parameters


@choice(TrackerConfig, "mlflow")
class MlflowConfig(TrackerConfig):
    """MLflow.

    Attributes:
        tracking_uri: the server (`https://...`) or database (`sqlite:///FILE`) to write to; null uses MLFLOW_TRACKING_URI, or
            `sqlite:///mlflow.db` if that is not set. A server's credentials belong in MLflow's own variables
            (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN).
        experiment: experiment that the run belongs to; it is created if it does not exist.
        name: display name of the run; null uses the run ID.
    """

    tracking_uri: str | None = None
    experiment: str = "jaxlm"
    name: str | None = None

    def check(self) -> None:
        if not self.experiment.strip():  # the tracker would fail while the run goes on without it
            raise ConfigError(f"trainer.tracker (mlflow): experiment: '{self.experiment}' given, a name expected")

    def how_to_open(self, run_id: str) -> str | None:
        uri = redacted(self._uri())
        if uri.startswith("http"):
            return f"{uri}: run '{self.name or run_id}' of the experiment '{self.experiment}'"
        return f"mlflow ui --backend-store-uri {uri}"

    def _uri(self) -> str:
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _LOCAL

    def open(self, run: RunInfo) -> Tracker:
        """Creates a run, or resumes the newest one of this run ID if there is a checkpoint."""
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingLibraryError(f"mlflow is not installed. Run: {install_command('mlflow')}") from error
        client = MlflowClient(tracking_uri=self._uri())
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        known = [] if run.is_new else client.search_runs([experiment_id], f"tags.`{_RUN_ID}` = '{run.run_id}'")
        tags = {"mlflow.source.git.commit": environment.commit() or "no git repository"}
        if not known:
            name = self.name or run.run_id
            known = [client.create_run(experiment_id, run_name=name, tags={**tags, _RUN_ID: run.run_id})]
        handle = known[0]  # the newest
        client.update_run(handle.info.run_id, status="RUNNING")
        tracker = MlflowTracker(client, handle, run.abandoned_steps)
        tracker.describe({**run.config, "summary": dict(run.summary)}, known=handle.data.params)
        client.log_text(handle.info.run_id, run.config_text, "config.yaml")
        client.log_text(handle.info.run_id, "\n".join(environment.packages()), "requirements.txt")
        return tracker


class MlflowTracker(ForwardTracker):
    """Passes metrics to MLflow, those of some seconds in one request. It has no histograms: `histograms.jsonl` has them."""

    def __init__(self, client: Any, handle: Any, abandoned_steps: int = 0):
        """Args: handle: an MLflow run. abandoned_steps: steps lost by going back, which MLflow cannot remove."""
        self._client, self._id = client, handle.info.run_id
        self._requests = _Requests(client, self._id)
        super().__init__(self._requests, int(handle.data.tags.get(_NEXT_STEP, 0)), abandoned_steps)

    def describe(self, facts: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Logs facts as parameters. Args: known: those that the run has, which MLflow does not change."""
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        names = _Names()
        named = ((names[key], str(value)[:_MAX_CHARACTERS]) for key, value in flattened(facts))
        params = [Param(key, value) for key, value in named if key not in known]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Stores a file for each step."""
        self._store(f"samples/step-{step}.json", [asdict(sample) for sample in samples])

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Stores a file for each step."""
        self._store(f"completions/step-{step}.json", [asdict(one) for one in completions])

    def flush(self) -> None:
        self._requests.send()

    def close(self) -> None:
        self._requests.send()
        self._client.set_terminated(self._id)

    def _store(self, path: str, records: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_text(self._id, json.dumps(records, ensure_ascii=False, indent=1), path)


class _Names(dict[str, str]):
    """Names as MLflow allows them: short, of few characters, and different if those that were given are."""

    def __missing__(self, given: str) -> str:
        name = _FORBIDDEN.sub("_", given)[:_MAX_NAME]
        is_taken, digest = name in self.values(), f"_{zlib.crc32(given.encode()):08x}"
        return self.setdefault(given, name[: _MAX_NAME - len(digest)] + digest if is_taken else name)


class _Requests:
    """Collects metrics, and sends them when there are many, or after some seconds."""

    def __init__(self, client: Any, run_id: str):
        self._client, self._id = client, run_id
        self._metrics: list[Any] = []
        self._names = _Names()
        self._next_step = 0
        self._sent = time.monotonic()

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._metrics += [Metric(self._names[name], float(value), now, step) for name, value in values.items()]
        self._next_step = step + 1
        if len(self._metrics) >= _MAX_METRICS or time.monotonic() - self._sent >= _SEND_S:
            self.send()

    def send(self) -> None:
        """Sends what was collected, and the step from which on a resumed run has something new."""
        from mlflow.entities import RunTag  # pyright: ignore[reportMissingImports]

        metrics, self._metrics, self._sent = self._metrics, [], time.monotonic()
        for first in range(0, len(metrics), _MAX_METRICS):
            last = first + _MAX_METRICS >= len(metrics)
            tags = [RunTag(_NEXT_STEP, str(self._next_step))] if last else []
            self._client.log_batch(self._id, metrics=metrics[first : first + _MAX_METRICS], tags=tags)
