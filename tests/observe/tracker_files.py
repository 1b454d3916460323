"""Reads files that trackers have written, without the trackers' own readers."""

from pathlib import Path
from typing import Any


def tensorboard_events(path: Path) -> list[Any]:
    """Every complete event of an event file."""
    from tensorboardX.proto.event_pb2 import Event

    raw, place, events = path.read_bytes(), 0, []
    while place + 12 <= len(raw):
        length = int.from_bytes(raw[place : place + 8], "little")
        if place + length + 16 > len(raw):  # truncated by a kill
            break
        events.append(Event.FromString(raw[place + 12 : place + 12 + length]))
        place += length + 16  # length, its checksum, the event, its checksum
    return events


def wandb_records(path: Path) -> list[Any]:
    """Every complete record of a .wandb file: a LevelDB log, whose records may span blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    raw, place, records, whole = path.read_bytes(), 7, [], b""
    while place + 7 < len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(raw[place + 4 : place + 6], "little"), raw[place + 6]
        if place + 7 + length > len(raw):
            break
        whole += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records
