"""What a path or a URL of checkpoints means: a folder on a disk, a bucket, or a store that is staged."""

from collections.abc import Sequence
from pathlib import Path

from jaxlm.engine.checkpoint.bucket import SCHEME, BucketFolder, bucket_checkpoints
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import checkpoints_below
from jaxlm.engine.checkpoint.remote import is_url
from jaxlm.engine.checkpoint.staging import StagedFolder, staged_checkpoints
from jaxlm.engine.checkpoint.store import Checkpoint, CheckpointFolder


def resolve_folder(
    base: str, run_id: str | None, staging_dir: Path, *, delete_temporary: bool = True
) -> CheckpointFolder:
    """The folder of a run's checkpoints. Nothing is looked at yet.

    Args:
        base: a path or a URL.
        run_id: the folder's name below it; None for `base` itself.
        staging_dir: where checkpoints are staged, behind URLs that Orbax cannot write to.
        delete_temporary: whether a new checkpoint replaces the temporary ones.
    """
    if not is_url(base):
        return LocalFolder(Path(base, *filter(None, [run_id])), delete_temporary=delete_temporary)
    url = "/".join(filter(None, [base.rstrip("/"), run_id]))
    if url.startswith(SCHEME):
        return BucketFolder(url, delete_temporary=delete_temporary)
    return StagedFolder(url, staging_dir, delete_temporary=delete_temporary)


def resolve_checkpoints(place: str, staging_dir: Path, *, of_runs: bool = True) -> Sequence[Checkpoint]:
    """Checkpoints where a path or URL points, least steps first: at one, or at a run's folder.

    Behind a URL that is staged, the newest alone, copied here.

    Args:
        of_runs: whether a folder of runs is meant, too.

    Raises:
        ConfigError: the store cannot be read, or the local folder not be written.
    """
    if place.startswith(SCHEME):
        return bucket_checkpoints(place, of_runs=of_runs)
    if is_url(place):
        paths = staged_checkpoints(place, staging_dir, of_runs=of_runs)
    else:
        paths = checkpoints_below(Path(place), of_runs=of_runs)
    return [LocalCheckpoint(path) for path in paths]
