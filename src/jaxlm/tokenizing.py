"""Making a run's token caches on a Ray cluster, before anything else asks for them."""

import contextlib
import json
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.core.runtime import broadcast_from_main, everywhere, is_main_process, main_only
from jaxlm.data.base import Show
from jaxlm.data.config import DataConfig
from jaxlm.data.ray_cluster import Meeting, RayConfig, joined
from jaxlm.data.tokenizer import Tokenizer

_MEETING_BYTES = 512


def tokenize_on_ray(
    ray: RayConfig | None, sections: Sequence[DataConfig], tokenizer: Tokenizer, seq_len: int, show: Show
) -> None:
    """Makes the caches that are not there. Without a cluster nothing: they are then made where they are opened.

    Raises:
        ConfigError: the cluster cannot be had, or the data cannot be tokenized.
    """
    if ray is None or not ray.is_wanted:
        return
    if everywhere(not is_main_process() or all(section.is_tokenized() for section in sections)):
        return
    shared = ray.start_workers and jax.process_count() > 1
    with contextlib.ExitStack() as stack:
        cluster = main_only(lambda: stack.enter_context(ray.cluster(show, shared=shared)))
        if shared:
            meeting = _told(None if cluster is None else cluster.meeting)
            if cluster is None:
                stack.enter_context(joined(meeting))

        def make() -> None:
            assert cluster is not None, "only process 0 has it, and only that one makes caches"
            for section in sections:
                section.open(tokenizer, seq_len, show, cluster)

        main_only(make)


def _told(meeting: Meeting | None) -> Meeting:
    """Process 0's meeting, on every process."""
    text = json.dumps(meeting).encode() if meeting is not None else b""
    news = np.frombuffer(text.ljust(_MEETING_BYTES), np.uint8)
    return Meeting(*json.loads(broadcast_from_main(news).tobytes()))
