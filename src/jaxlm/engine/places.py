"""What a path or a URL of checkpoints means: a folder on a disk, a bucket, or a store that is staged."""

from collections.abc import Sequence
from pathlib import Path

from jaxlm.engine.bucket import SCHEME, BucketFolder, bucket_checkpoints
from jaxlm.engine.folder import Checkpoint, CheckpointFolder
from jaxlm.engine.local_folder import LocalCheckpoint, LocalFolder
from jaxlm.engine.naming import checkpoints_below
from jaxlm.engine.remote import is_url
from jaxlm.engine.staging import StagedFolder, staged


def folder_at(base: str, run_id: str | None, staging_dir: Path, *, delete_temporary: bool = True) -> CheckpointFolder:
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


def checkpoints_at(place: str, staging_dir: Path) -> Sequence[Checkpoint]:
    """Checkpoints where a path or URL points, least steps first: at one, at a run's folder, or at a folder of runs.

    Behind a URL that is staged, the newest alone, copied here.

    Raises:
        ConfigError: the store cannot be read, or the local folder not be written.
    """
    if place.startswith(SCHEME):
        return bucket_checkpoints(place)
    paths = staged(place, staging_dir) if is_url(place) else checkpoints_below(Path(place))
    return [LocalCheckpoint(path) for path in paths]
