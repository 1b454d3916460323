"""Resolves paths and URLs of checkpoints: a local folder, a bucket, or a store with a local staging folder."""

from collections.abc import Sequence
from pathlib import Path

from jaxlm.core.stores import is_url
from jaxlm.engine.checkpoint.bucket import SCHEME, BucketFolder, bucket_checkpoints
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import checkpoints_below
from jaxlm.engine.checkpoint.staging import StagedFolder, staged_checkpoints
from jaxlm.engine.checkpoint.store import Checkpoint, CheckpointFolder


def resolve_folder(
    base: str, run_id: str | None, staging_dir: Path, *, delete_temporary: bool = True
) -> CheckpointFolder:
    """The folder of a run's checkpoints: `run_id` below the path or URL `base`, or `base` itself. Does not access it.

    Args:
        staging_dir: where checkpoints are staged for URLs that Orbax cannot write to.
        delete_temporary: whether a new checkpoint replaces the temporary ones.
    """
    if not is_url(base):
        return LocalFolder(Path(base, *filter(None, [run_id])), delete_temporary=delete_temporary)
    url = "/".join(filter(None, [base.rstrip("/"), run_id]))
    if url.startswith(SCHEME):
        return BucketFolder(url, delete_temporary=delete_temporary)
    return StagedFolder(url, staging_dir, delete_temporary=delete_temporary)


def resolve_checkpoints(location: str, staging_dir: Path, *, of_runs: bool = True) -> Sequence[Checkpoint]:
    """Checkpoints at a path or URL of a checkpoint, a run's folder or (with `of_runs`) a folder of runs, fewest steps first.

    For URLs that are staged, this downloads the newest checkpoint and returns only that. Raises `ConfigError` if the store
    cannot be read, or the staging folder cannot be written.
    """
    if location.startswith(SCHEME):
        return bucket_checkpoints(location, of_runs=of_runs)
    if is_url(location):
        paths = staged_checkpoints(location, staging_dir, of_runs=of_runs)
    else:
        paths = checkpoints_below(Path(location), of_runs=of_runs)
    return [LocalCheckpoint(path) for path in paths]
